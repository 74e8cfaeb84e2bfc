"""Inspect other people's objects without running their code, in the way of `inspect.getattr_static`.

``isinstance`` asks an object for its ``__class__``, which may lie, raise or belong to another object (`weakref.proxy`); an
attribute may be a property; a container's methods may be overridden; a metaclass may answer for a class. So an object
is known by its type, and read with the methods of the builtin type that it inherits from. ``named_modules`` and
``named_parameters`` of a model may be overridden, too, and hash modules, which a model may forbid.
"""

from __future__ import annotations

import collections
import functools
import gc
import math
import sys
import types
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Literal, TypeVar, cast

from pytest_gpumem.torch_support.private_api import MODULE_PARTS, outside_torch_function

if TYPE_CHECKING:
    from collections.abc import Callable, Collection, Iterable, Iterator
    from typing import TypeGuard

    import torch


T = TypeVar("T")

_CONTAINERS: tuple[type[Any], ...] = (list, tuple, set, frozenset, collections.deque)
_NATIVE = (types.GetSetDescriptorType, types.MemberDescriptorType)
# By type's own descriptors: of a class, a metaclass may answer otherwise.
_mro, _namespace, _module_of, _qualname = (
    type.__dict__[name] for name in ("__mro__", "__dict__", "__module__", "__qualname__")
)


def is_a(value: object, *kinds: type[T]) -> TypeGuard[T]:
    """Return whether the type of ``value`` is one of ``kinds`` or inherits from one."""
    return issubclass(type(value), kinds)


def class_name(kind: type) -> str:
    """Return the qualified name of a class, without the function that it was defined in."""
    return str(_qualname.__get__(kind)).rpartition("<locals>.")[2]


def module_of(kind: type) -> str:
    """Return a class's ``__module__``; empty where it has none."""
    module = _module_of.__get__(kind)
    return module if type(module) is str else ""


def package_of(kind: type) -> str:
    """Return the outermost package of a class's ``__module__``; empty where it has none."""
    module = _module_of.__get__(kind)
    return module.partition(".")[0] if type(module) is str else ""


def class_namespace(kind: type) -> dict[str, Any] | None:
    """Return the dict that a class keeps its own attributes in, itself and not a view; ``None`` where it is not to be had."""
    return next((one for one in gc.get_referents(_namespace.__get__(kind)) if type(one) is dict), None)


def class_attribute(kind: type, name: str) -> Any:
    """Return what a class or one of its bases has under ``name``, descriptors as they are; ``None`` where none has."""
    for base in _mro.__get__(kind):
        namespace = _namespace.__get__(base)
        if name in namespace:
            return namespace[name]
    return None


def class_values(kind: type) -> Iterator[object]:
    """Return the values of all attributes of a class and those that it inherits from."""
    for base in _mro.__get__(kind):
        yield from list(_namespace.__get__(base).values())


def instance_dict(value: object) -> dict[str, Any] | None:
    """Return the ``__dict__`` of ``value``, itself and not a copy; ``None`` where it has none to read."""
    dictionary = layout_of(type(value)).dictionary
    own = None if dictionary is None else dictionary.__get__(value)
    return own if is_a(own, dict) else None


def attribute(value: object, name: str) -> Any:
    """Return an attribute of ``value`` or a plain one of its class; ``None`` where only its code could give it."""
    own = instance_dict(value) or {}
    if dict.__contains__(own, name):
        return dict.__getitem__(own, name)
    found = class_attribute(type(value), name)
    if type(found) is types.MemberDescriptorType:
        try:
            return found.__get__(value)
        except AttributeError:  # an empty slot
            return None
    return None if class_attribute(type(found), "__get__") is not None else found


def contents_of(value: object) -> Iterable[object]:
    """Return the contents of a container, what a function, method or partial is bound to, or a generator's locals."""
    contents = layout_of(type(value)).contents
    return () if contents is None else contents(value)


@dataclass(frozen=True, slots=True)
class AttributeLayout:
    """The way in which objects of a class keep what they hold."""

    package: str
    """The result of `package_of`."""
    contents: Callable[[Any], Iterable[object]] | None
    """The result of `contents_of`; ``None`` where there are none."""
    dictionary: Any
    """The descriptor that gives the ``__dict__``; ``None`` where there is none, or Python code overrides it."""
    covered: bool
    """True if Python code overrides it."""
    members: tuple[types.MemberDescriptorType, ...]
    """The slots."""

    def attributes(self, value: object) -> list[object]:
        """Return the values of all attributes of an object of the class: those in its ``__dict__`` and in its slots."""
        held: list[object] = []
        if self.dictionary is not None:
            own = self.dictionary.__get__(value)
            if issubclass(type(own), dict):
                held.extend(dict.values(own))
        elif self.covered:
            # What the collector would visit is there all the same.
            held.extend(gc.get_referents(value))
        for member in self.members:
            try:
                held.append(member.__get__(value))
            except AttributeError:  # an empty slot
                continue
        return held


def layout_of(kind: type) -> AttributeLayout:
    """Return the way in which objects of a class keep what they hold."""
    bases = [_namespace.__get__(base) for base in _mro.__get__(kind)]
    found = [base["__dict__"] for base in bases if "__dict__" in base]
    return AttributeLayout(
        package_of(kind),
        next((read for base, read in _READERS if issubclass(kind, base)), None),
        next((one for one in found if type(one) in _NATIVE), None),
        bool(found),
        tuple(
            member
            for base in bases
            if "__slots__" in base
            for member in list(base.values())
            if type(member) is types.MemberDescriptorType
        ),
    )


def _bound_to_a_function(value: types.FunctionType) -> list[object]:
    return [*gc.get_referents(*(value.__closure__ or ())), value.__defaults__, value.__kwdefaults__]


def _bound_to_a_partial(value: Any) -> list[object]:
    partial: Any = functools.partial
    return [member.__get__(value) for member in (partial.func, partial.args, partial.keywords)]


def _in_a_generator(value: types.GeneratorType[Any, Any, Any]) -> list[object]:
    return [] if value.gi_frame is None else variables_of(value.gi_frame)


_REFERENCES_TO_LOCALS = 3
"""References to a frame's locals: the frame, `named_variables_of` and `sys.getrefcount`. More mean a kept ``locals()``."""


def variables_of(frame: types.FrameType) -> list[object]:
    """Return the values of a function's local variables."""
    return [*named_variables_of(frame).values()]


def named_variables_of(frame: types.FrameType) -> dict[str, object]:
    """Return a function's local variables."""
    local = frame.f_locals
    held = dict(local)
    if is_a(local, dict) and sys.getrefcount(local) <= _REFERENCES_TO_LOCALS:
        # Until Python 3.12 the frame keeps this copy, and with it everything that was in it.
        local.clear()
    return held


_READERS: tuple[tuple[type[Any], Callable[[Any], Iterable[object]]], ...] = (
    (dict, lambda value: [*dict.keys(value), *dict.values(value)]),
    *((kind, kind.__iter__) for kind in _CONTAINERS),
    # The mapping behind it: its own methods may be anything.
    (types.MappingProxyType, gc.get_referents),
    (types.FunctionType, _bound_to_a_function),
    (types.MethodType, lambda value: [value.__self__, value.__func__]),
    (functools.partial, _bound_to_a_partial),
    (types.GeneratorType, _in_a_generator),
)


def tensor_property(tensor: torch.Tensor, name: str) -> Any:
    """Return a property of `torch.Tensor`: a subclass may override it, and see every use of a torch function on it."""
    import torch

    with outside_torch_function():
        return getattr(torch.Tensor, name).__get__(tensor)


def gradient_of(tensor: torch.Tensor) -> torch.Tensor | None:
    """Return the gradient of a leaf; ``None`` for other tensors, for which torch warns."""
    return tensor_property(tensor, "grad") if tensor_property(tensor, "is_leaf") else None


def clear_gradient(tensor: torch.Tensor) -> None:
    """Set the gradient of a tensor to ``None``."""
    import torch

    with outside_torch_function():
        cast("Any", torch.Tensor).grad.__set__(tensor, None)


def has_parts(tensor: torch.Tensor) -> bool:
    """Return whether a tensor is made of others, as DTensor and quantized weights are, and has no memory of its own."""
    return class_attribute(type(tensor), "__tensor_flatten__") is not None


def parts_of(tensor: torch.Tensor) -> Iterator[torch.Tensor]:
    """Return the tensors that a tensor is made of, itself for most: those among its attributes, each once."""
    import torch

    stack, seen = [tensor], {id(tensor)}
    while stack:
        one = stack.pop()
        if not has_parts(one):
            yield one
            continue
        attributes = layout_of(type(one)).attributes(one)
        parts = [part for part in attributes if is_a(part, torch.Tensor) and id(part) not in seen]
        seen.update(map(id, parts))
        stack.extend(reversed(parts))


def dense_bytes(tensor: torch.Tensor) -> int | None:
    """Return the bytes of a tensor's elements; ``None`` for one that is sparse or made of others."""
    import torch

    if has_parts(tensor) or tensor_property(tensor, "layout") is not torch.strided:
        return None
    return int(tensor_property(tensor, "nbytes"))


def elements_of(tensor: torch.Tensor) -> int:
    """Return the number of a tensor's elements: 0 for a parameter of a lazy module that has not been called."""
    return math.prod(tensor_property(tensor, "shape"))


def dtype_and_shape(tensor: torch.Tensor) -> tuple[str, tuple[int, ...]]:
    """Return dtype and shape: ``("float32", (8, 256))``."""
    return str(tensor_property(tensor, "dtype")).removeprefix("torch."), tuple(tensor_property(tensor, "shape"))


def named_modules(root: torch.nn.Module) -> Iterator[tuple[str, torch.nn.Module]]:
    """Return the modules of a model, each once and before those within it; the model itself has the path ``""``."""
    seen: set[int] = set()
    stack = [("", root)]
    while stack:
        path, module = stack.pop()
        if id(module) not in seen:
            seen.add(id(module))
            yield path, module
            before = f"{path}." if path else ""
            stack.extend((before + name, child) for name, child in reversed(list(_own_parts(module, "modules"))))


def named_tensors(
    root: torch.nn.Module, kind: Literal["parameters", "buffers"]
) -> Iterator[tuple[str, str, torch.Tensor]]:
    """Return the parameters or buffers of a model, each once: the path of its module, its name there, and the tensor."""
    seen: set[int] = set()
    for path, module in named_modules(root):
        for name, tensor in _own_parts(module, kind):
            if id(tensor) not in seen:
                seen.add(id(tensor))
                yield path, name, tensor


def _own_parts(module: torch.nn.Module, kind: str) -> Iterator[tuple[str, Any]]:
    """Return the parameters, buffers or modules of ``module`` itself, by name."""
    import torch

    parts = attribute(module, MODULE_PARTS[kind])
    # Scripted modules keep theirs in C++, and their class is torch's own.
    named = dict.items(parts) if is_a(parts, dict) else parts.items() if is_a(module, torch.jit.ScriptModule) else ()
    for name, part in list(named):
        if is_a(part, torch.nn.Module if kind == "modules" else torch.Tensor):
            yield name, part


def tensor_text(dtype: str, shape: tuple[int, ...]) -> str:
    """Return dtype and shape of a tensor as text: ``float32[8, 256]``."""
    return f"{dtype}{list(shape)}"


def parameters_of(module: torch.nn.Module) -> int:
    """Return the number of a model's or a module's parameters; tied ones count once."""
    return sum(map(elements_of, module.parameters()))


def reads_any(function: object, attributes: Collection[str], below: str | None = None) -> bool:
    """Return whether a function, or one of its own module that it calls, reads one of the ``attributes`` of anything.

    Functions of other modules are followed where their file is ``below`` a folder, and they are not installed.
    """
    seen: set[int] = set()
    pending = [function.__func__ if is_a(function, types.MethodType) else function]
    while pending:
        one = pending.pop()
        if not is_a(one, types.FunctionType) or id(one) in seen:
            continue
        seen.add(id(one))
        names = {name for code in _codes(one.__code__) for name in code.co_names}
        if not names.isdisjoint(attributes):
            return True
        there = [one.__globals__.get(name) for name in names]
        modules = [instance_dict(module) or {} for module in there if is_a(module, types.ModuleType)]
        there += [module.get(name) for module in modules for name in names]
        pending += [
            value
            for found in there
            for value in _unwrapped(found)
            if value.__globals__ is one.__globals__ or (below is not None and _is_below(below, value.__code__))
        ]
        pending += _unwrapped(one)
    return False


def _is_below(folder: str, code: types.CodeType) -> bool:
    """Return whether code is of a file in ``folder``, and of no package that is installed there."""
    return code.co_filename.startswith(folder) and "-packages" not in code.co_filename


def _unwrapped(value: object) -> list[types.FunctionType]:
    """Return a function and what it wraps, from the outside in: decorators are often another module's."""
    functions: list[types.FunctionType] = []
    passed: set[int] = set()
    while value is not None and id(value) not in passed:
        passed.add(id(value))
        if is_a(value, types.FunctionType):
            functions.append(value)
        # Not the attribute itself: objects that compute theirs have any.
        value = dict.get(instance_dict(value) or {}, "__wrapped__")
    return functions


def _codes(code: types.CodeType) -> Iterator[types.CodeType]:
    """Return the code of a function, and of functions, lambdas and comprehensions within it."""
    yield code
    for constant in code.co_consts:
        if isinstance(constant, types.CodeType):
            yield from _codes(constant)
