"""Name the permanent holders of tensors: modules, classes, functions and caches, with their packages."""

from __future__ import annotations

import contextvars
import functools
import gc
import itertools
import sys
import types
from pathlib import PurePath
from typing import Any

from pytest_gpumem.base.requirements.installed import installed_file
from pytest_gpumem.torch_support.reachability import NOT_THE_TESTS
from pytest_gpumem.torch_support.static_access import class_name, instance_dict, is_a, module_of

LRU_CACHE: type[Any] = type(functools.lru_cache(lambda: None))
_PROGRAM = ("__main__", "__mp_main__")
"""Names for the module that Python runs as a program. `multiprocessing` uses the second name in its processes."""


def is_excluded(module: str) -> bool:
    """Return whether a module cannot be a holder: it belongs to pytest or this package, or refers to all tests."""
    return module.partition(".")[0] in NOT_THE_TESTS


def is_own_function(value: object) -> bool:
    """Return whether a value is a function from this package, for example a wrapper that replaces a user's function.

    Only the function's globals show this, because a wrapper copies the wrapped function's name and ``__module__``.
    """
    package = __name__.partition(".")[0]
    name = dict.get(value.__globals__, "__name__") if is_a(value, types.FunctionType) else None
    return type(name) is str and name.partition(".")[0] == package


def context_variable_text(node: object, value: object) -> str | None:
    """Return the text for a context variable that keeps a tensor alive: ``"ContextVar('mask')"``.

    Args:
        node: Any object. Python stores context variables' values in a tree, whose node class has no public name. A
            node refers to a value and directly afterwards to the value's variable.
        value: The value to look for.

    Returns:
        The variable's name, or ``None`` if ``node`` is another object or does not contain the value.
    """
    if not class_name(type(node)).startswith("hamt_"):
        return None
    pairs = itertools.pairwise(gc.get_referents(node))
    names = (variable.name for held, variable in pairs if held is value and type(variable) is contextvars.ContextVar)
    return next((f"ContextVar({name!r})" for name in names), None)


def module_name(namespace: object) -> str | None:
    """Return the name of the module whose globals are ``namespace``, even if the module is not in ``sys.modules``.

    Return ``None`` if no module has these globals.
    """
    if type(namespace) is not dict or not (
        dict.__contains__(namespace, "__builtins__") or dict.__contains__(namespace, "__spec__")
    ):
        return None
    name = dict.get(namespace, "__name__")
    return name if type(name) is str else None


def module_text(namespace: dict[str, Any], name: str) -> str:
    """Return a module's name to show as a holder: ``"models"``, or ``"accelerate 1.3.0: accelerate.state"``.

    A program is called after its file: ``"serve"`` and not ``"__main__"``.
    """
    file = dict.get(namespace, "__file__")
    if name in _PROGRAM and type(file) is str:
        path = PurePath(file)
        name = path.stem if path.stem != "__main__" else path.parent.name
    return _of_release(_release(namespace), name)


def class_text(kind: type) -> str:
    """Return a class's name to show as a holder: ``"Net"``, or ``"accelerate 1.3.0: GradientState"``."""
    return _of_release(_release(instance_dict(sys.modules.get(module_of(kind))) or {}), class_name(kind))


def function_text(function: types.FunctionType, *, outer: bool = False, prefix: str = "") -> str:
    """Return a function's name to show as a holder. If a package contains the function, its module is included.

    The name comes from the code object, because decorators copy the wrapped function's ``__qualname__``.

    Args:
        function: Any function.
        outer: True to return the enclosing function's name, if ``function`` is nested.
        prefix: Text before the name, for example ``"lru_cache of "``.
    """
    qualname = code_name(function.__code__, function.__qualname__)
    around, _, _ = qualname.rpartition(".<locals>.")
    text = (around or qualname) if outer else qualname
    module = module_name(function.__globals__)
    release = None if module is None else _release(function.__globals__)
    return f"{prefix}{text}" if release is None else f"{release}: {prefix}{module}.{text}"


def code_name(code: types.CodeType, name: str | None = None) -> str:
    """Return a code object's qualified name. In Python 3.10, which lacks ``co_qualname``, return ``name`` or the plain name."""
    return str(getattr(code, "co_qualname", name or code.co_name))


def lru_cache_text(cached: Any) -> str | None:
    """Return a cache's name to show as a holder: ``"lru_cache of tables"``; ``None`` if ``cached`` wraps no function."""
    function = dict.get(instance_dict(cached) or {}, "__wrapped__")
    return function_text(function, prefix="lru_cache of ") if is_a(function, types.FunctionType) else None


def names_of_defaults(function: types.FunctionType) -> list[str]:
    """Return the parameters' names with defaults in ``function.__defaults__``."""
    code, defaults = function.__code__, function.__defaults__ or ()
    return list(code.co_varnames[code.co_argcount - len(defaults) : code.co_argcount])


def _release(namespace: dict[str, Any]) -> str | None:
    """Return a module's package with its version: ``"accelerate 1.3.0"``; ``None`` if the module is not installed."""
    file = dict.get(namespace, "__file__")
    installed = installed_file(PurePath(file)) if type(file) is str else None
    if installed is None:
        return None
    package = installed.package
    # A folder in site-packages may belong to no distribution, and so has no version. Then the folder's name is returned.
    return installed.parts[0].removesuffix(".py") if package is None else f"{package.name} {package.version}"


def _of_release(release: str | None, text: str) -> str:
    return text if release is None else f"{release}: {text}"
