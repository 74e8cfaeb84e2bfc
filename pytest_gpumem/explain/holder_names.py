"""Names of what can hold a tensor for good: modules, classes, functions and their caches, and the package that each is of."""

from __future__ import annotations

import contextvars
import functools
import gc
import itertools
import sys
import types
from pathlib import PurePath
from typing import Any

from pytest_gpumem.requirements.installed import installed_file
from pytest_gpumem.torch_support.reachability import NOT_THE_TESTS
from pytest_gpumem.torch_support.static_access import class_name, instance_dict, is_a, module_of

LRU_CACHE: type[Any] = type(functools.lru_cache(lambda: None))


def is_excluded(module: str) -> bool:
    """Return whether a module is pytest's or ours, or leads from a test to every other one."""
    return module.partition(".")[0] in NOT_THE_TESTS


def is_ours(value: object) -> bool:
    """Return whether a value is a function of this package: it stands in the place of another function, and holds that one.

    Its globals tell, because it takes over the name and the module of the other one.
    """
    package = __name__.partition(".")[0]
    name = dict.get(value.__globals__, "__name__") if is_a(value, types.FunctionType) else None
    return type(name) is str and name.partition(".")[0] == package


def context_variable_text(node: object, value: object) -> str | None:
    """Return a context variable as a holder is named by it: ``"ContextVar('mask')"``; ``None`` if it does not have the value.

    Args:
        node: Any object. A context keeps values, each before its variable, in nodes of a tree, whose class has no public name.
        value: What the variable has.
    """
    if not class_name(type(node)).startswith("hamt_"):
        return None
    pairs = itertools.pairwise(gc.get_referents(node))
    names = (variable.name for one, variable in pairs if one is value and type(variable) is contextvars.ContextVar)
    return next((f"ContextVar({name!r})" for name in names), None)


def module_name(namespace: object) -> str | None:
    """Return the name of the module whose globals a dict is, also of one that is not in ``sys.modules``; ``None`` of others."""
    if type(namespace) is not dict or not (
        dict.__contains__(namespace, "__builtins__") or dict.__contains__(namespace, "__spec__")
    ):
        return None
    name = dict.get(namespace, "__name__")
    return name if type(name) is str else None


def module_text(namespace: dict[str, Any], name: str) -> str:
    """Return a module as a holder is named by it: ``"models"``, ``"accelerate 1.3.0: accelerate.state"``."""
    return _of_release(_release(namespace), name)


def class_text(kind: type) -> str:
    """Return a class as a holder is named by it: ``"Net"``, ``"accelerate 1.3.0: GradientState"``."""
    return _of_release(_release(instance_dict(sys.modules.get(module_of(kind))) or {}), class_name(kind))


def function_text(function: types.FunctionType, *, outer: bool = False, of: str = "") -> str:
    """Return a function as a holder is named by it; one of a package with its module.

    Its code tells which it is: decorators copy the names of what they wrap.

    Args:
        function: Any function.
        outer: Whether the function around it is meant, if there is one.
        of: What of the function is meant, to stand before it.
    """
    qualname = code_name(function.__code__, function.__qualname__)
    around, _, _ = qualname.rpartition(".<locals>.")
    text = (around or qualname) if outer else qualname
    module = module_name(function.__globals__)
    release = None if module is None else _release(function.__globals__)
    return f"{of}{text}" if release is None else f"{release}: {of}{module}.{text}"


def code_name(code: types.CodeType, name: str | None = None) -> str:
    """Return the qualified name of code; until Python 3.10, whose code has none, ``name`` or else the plain one."""
    return str(getattr(code, "co_qualname", name or code.co_name))


def lru_cache_text(cached: Any) -> str | None:
    """Return the cache of a function as a holder is named by it: ``"lru_cache of tables"``; ``None`` where it is of none."""
    function = dict.get(instance_dict(cached) or {}, "__wrapped__")
    return function_text(function, of="lru_cache of ") if is_a(function, types.FunctionType) else None


def names_of_defaults(function: types.FunctionType) -> list[str]:
    """Return the parameters that the values of ``function.__defaults__`` belong to."""
    code, defaults = function.__code__, function.__defaults__ or ()
    return list(code.co_varnames[code.co_argcount - len(defaults) : code.co_argcount])


def _release(namespace: dict[str, Any]) -> str | None:
    """Return the package that the file of a module is of, with its version: ``"accelerate 1.3.0"``; ``None`` of others."""
    file = dict.get(namespace, "__file__")
    installed = installed_file(PurePath(file)) if type(file) is str else None
    if installed is None:
        return None
    package = installed.package
    # A folder without a distribution is told by its name.
    return installed.parts[0].removesuffix(".py") if package is None else f"{package.name} {package.version}"


def _of_release(release: str | None, text: str) -> str:
    return text if release is None else f"{release}: {text}"
