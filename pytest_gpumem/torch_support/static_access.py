"""Inspect foreign objects without running their code, as `inspect.getattr_static` does.

``isinstance`` reads an object's ``__class__``, which may lie, raise or belong to another object (`weakref.proxy`). An attribute
may be a property, a container's methods may be overridden, and a metaclass may answer for a class. These functions therefore
identify an object by its type, and use the methods of the built-in base type. A model may also override
``named_modules`` and ``named_parameters``. Both methods hash modules, and a module may forbid this.

For example, ``is_a(weakref.proxy(tensor), torch.Tensor)`` is false, but ``isinstance(weakref.proxy(tensor), torch.Tensor)`` is
true.
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
# Use type's own descriptors, because a metaclass may override the attributes of a class.
_mro, _namespace, _module_of, _qualname = (
    type.__dict__[name] for name in ("__mro__", "__dict__", "__module__", "__qualname__")
)


def is_a(value: object, *kinds: type[T]) -> TypeGuard[T]:
    """Return whether ``value``'s type is among ``kinds`` or inherits from them."""
    return issubclass(type(value), kinds)


def class_name(kind: type) -> str:
    """Return a class's qualified name, without the defining function."""
    return str(_qualname.__get__(kind)).rpartition("<locals>.")[2]


def module_of(kind: type) -> str:
    """Return a class's ``__module__``; empty if the class has none."""
    module = _module_of.__get__(kind)
    return module if type(module) is str else ""


def package_of(kind: type) -> str:
    """Return the outermost package of a class's ``__module__``; empty if the class has none."""
    module = _module_of.__get__(kind)
    return module.partition(".")[0] if type(module) is str else ""


def class_namespace(kind: type) -> dict[str, Any] | None:
    """Return the dict with a class's own attributes, not a view; ``None`` if there is no access to the dict."""
    return next((value for value in gc.get_referents(_namespace.__get__(kind)) if type(value) is dict), None)


def class_attribute(kind: type, name: str) -> Any:
    """Return the attribute ``name`` from a class or its bases without invoking descriptors; ``None`` if there is none."""
    for base in _mro.__get__(kind):
        namespace = _namespace.__get__(base)
        if name in namespace:
            return namespace[name]
    return None


def class_values(kind: type) -> Iterator[object]:
    """Return the attribute values of a class and its bases."""
    for base in _mro.__get__(kind):
        yield from list(_namespace.__get__(base).values())


def instance_dict(value: object) -> dict[str, Any] | None:
    """Return the ``__dict__`` of ``value``, not a copy; ``None`` if there is no readable dict."""
    dictionary = layout_of(type(value)).dictionary
    own_dict = None if dictionary is None else dictionary.__get__(value)
    return own_dict if is_a(own_dict, dict) else None


def attribute(value: object, name: str) -> Any:
    """Return an attribute from ``value``, or a plain attribute from its class; ``None`` for computed attributes."""
    own_dict = instance_dict(value) or {}
    if dict.__contains__(own_dict, name):
        return dict.__getitem__(own_dict, name)
    from_class = class_attribute(type(value), name)
    if type(from_class) is types.MemberDescriptorType:
        try:
            return from_class.__get__(value)
        except AttributeError:  # an empty slot
            return None
    return None if class_attribute(type(from_class), "__get__") is not None else from_class


def contents_of(value: object) -> Iterable[object]:
    """Return a container's contents, the bound objects in a function, method or partial, or a generator's locals."""
    contents = layout_of(type(value)).contents
    return () if contents is None else contents(value)


@dataclass(frozen=True, slots=True)
class AttributeLayout:
    """Descriptors and functions that read the attributes and contents of a class's objects.

    For example, a class with ``__slots__ = ("weight",)`` and no ``__dict__`` has a single member and no dictionary.
    """

    package: str
    """The result of `package_of`."""
    contents: Callable[[Any], Iterable[object]] | None
    """A function that returns `contents_of` for an object; ``None`` if such objects have no contents."""
    dictionary: Any
    """The descriptor that returns the ``__dict__``; ``None`` if there is none or only Python code returns it."""
    covered: bool
    """True if the class defines ``__dict__``, as a native descriptor or in Python code."""
    members: tuple[types.MemberDescriptorType, ...]
    """The slots."""

    def attributes(self, value: object) -> list[object]:
        """Return an object's attribute values, from its ``__dict__`` and its slots."""
        values: list[object] = []
        if self.dictionary is not None:
            own_dict = self.dictionary.__get__(value)
            if issubclass(type(own_dict), dict):
                values.extend(dict.values(own_dict))
        elif self.covered:
            # Python code covers the real ``__dict__``, but the collector still visits its values.
            values.extend(gc.get_referents(value))
        for member in self.members:
            try:
                values.append(member.__get__(value))
            except AttributeError:  # an empty slot
                continue
        return values


def layout_of(kind: type) -> AttributeLayout:
    """Return the places in which objects of a class store their attributes and contents."""
    bases = [_namespace.__get__(base) for base in _mro.__get__(kind)]
    dictionaries = [base["__dict__"] for base in bases if "__dict__" in base]
    return AttributeLayout(
        package_of(kind),
        next((read for base, read in _READERS if issubclass(kind, base)), None),
        next((descriptor for descriptor in dictionaries if type(descriptor) in _NATIVE), None),
        bool(dictionaries),
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
"""References to a frame's locals: the frame, `named_variables_of` and `sys.getrefcount`.

If there are more, some code has stored ``locals()``.
"""


def variables_of(frame: types.FrameType) -> list[object]:
    """Return the values of a function's local variables."""
    return [*named_variables_of(frame).values()]


def named_variables_of(frame: types.FrameType) -> dict[str, object]:
    """Return a function's local variables."""
    local = frame.f_locals
    variables = dict(local)
    if is_a(local, dict) and sys.getrefcount(local) <= _REFERENCES_TO_LOCALS:
        # Until Python 3.12 the frame keeps this dict and all its values alive.
        local.clear()
    return variables


_READERS: tuple[tuple[type[Any], Callable[[Any], Iterable[object]]], ...] = (
    (dict, lambda value: [*dict.keys(value), *dict.values(value)]),
    *((kind, kind.__iter__) for kind in _CONTAINERS),
    # Return the mapping behind the proxy, because its own methods may be overridden.
    (types.MappingProxyType, gc.get_referents),
    (types.FunctionType, _bound_to_a_function),
    (types.MethodType, lambda value: [value.__self__, value.__func__]),
    (functools.partial, _bound_to_a_partial),
    (types.GeneratorType, _in_a_generator),
)


def tensor_property(tensor: torch.Tensor, name: str) -> Any:
    """Return a property as `torch.Tensor` defines it, because a subclass may override the property or intercept functions."""
    import torch

    with outside_torch_function():
        return getattr(torch.Tensor, name).__get__(tensor)


def gradient_of(tensor: torch.Tensor) -> torch.Tensor | None:
    """Return a leaf's gradient; ``None`` for other tensors, because torch would warn about them."""
    return tensor_property(tensor, "grad") if tensor_property(tensor, "is_leaf") else None


def clear_gradient(tensor: torch.Tensor) -> None:
    """Set the gradient of a tensor to ``None``."""
    import torch

    with outside_torch_function():
        cast("Any", torch.Tensor).grad.__set__(tensor, None)


def has_parts(tensor: torch.Tensor) -> bool:
    """Return whether a tensor consists of other tensors (DTensor, quantized weights) and has no own memory."""
    return class_attribute(type(tensor), "__tensor_flatten__") is not None


def parts_of(tensor: torch.Tensor) -> Iterator[torch.Tensor]:
    """Return a tensor's component tensors, each once. For most tensors this is the tensor itself."""
    import torch

    stack, seen = [tensor], {id(tensor)}
    while stack:
        current = stack.pop()
        if not has_parts(current):
            yield current
            continue
        attributes = layout_of(type(current)).attributes(current)
        parts = [part for part in attributes if is_a(part, torch.Tensor) and id(part) not in seen]
        seen.update(map(id, parts))
        stack.extend(reversed(parts))


def dense_bytes(tensor: torch.Tensor) -> int | None:
    """Return the bytes in a tensor's elements; ``None`` for a sparse tensor, or a tensor made from other tensors."""
    import torch

    if has_parts(tensor) or tensor_property(tensor, "layout") is not torch.strided:
        return None
    return int(tensor_property(tensor, "nbytes"))


def elements_of(tensor: torch.Tensor) -> int:
    """Return how many elements a tensor has; 0 for a lazy module's parameter before the first call."""
    return math.prod(tensor_property(tensor, "shape"))


def dtype_and_shape(tensor: torch.Tensor) -> tuple[str, tuple[int, ...]]:
    """Return dtype and shape: ``("float32", (8, 256))``."""
    return str(tensor_property(tensor, "dtype")).removeprefix("torch."), tuple(tensor_property(tensor, "shape"))


def named_modules(root: torch.nn.Module) -> Iterator[tuple[str, torch.nn.Module]]:
    """Return the modules of a model, each once, with outer modules first. The model itself has the path ``""``."""
    seen: set[int] = set()
    stack = [("", root)]
    while stack:
        path, module = stack.pop()
        if id(module) not in seen:
            seen.add(id(module))
            yield path, module
            prefix = f"{path}." if path else ""
            stack.extend((prefix + name, child) for name, child in reversed(list(_own_parts(module, "modules"))))


def named_tensors(
    root: torch.nn.Module, kind: Literal["parameters", "buffers"]
) -> Iterator[tuple[str, str, torch.Tensor]]:
    """Yield each parameter or buffer in a model once: its module's path, its name in the module, and the tensor."""
    seen: set[int] = set()
    for path, module in named_modules(root):
        for name, tensor in _own_parts(module, kind):
            if id(tensor) not in seen:
                seen.add(id(tensor))
                yield path, name, tensor


def _own_parts(module: torch.nn.Module, kind: str) -> Iterator[tuple[str, Any]]:
    """Return the parameters, buffers or submodules that ``module`` owns directly, by name."""
    import torch

    parts = attribute(module, MODULE_PARTS[kind])
    # Scripted modules store their parts in C++, so use their class's own mapping.
    named = dict.items(parts) if is_a(parts, dict) else parts.items() if is_a(module, torch.jit.ScriptModule) else ()
    for name, part in list(named):
        if is_a(part, torch.nn.Module if kind == "modules" else torch.Tensor):
            yield name, part


def tensor_text(dtype: str, shape: tuple[int, ...]) -> str:
    """Return the text for a tensor's dtype and shape: ``float32[8, 256]``."""
    return f"{dtype}{list(shape)}"


def parameters_of(module: torch.nn.Module) -> int:
    """Return how many parameters a module has. Tied parameters count once."""
    return sum(map(elements_of, module.parameters()))


def reads_any(function: object, attributes: Collection[str], below: str | None = None) -> bool:
    """Return whether a function or its callees read any of ``attributes`` from any object.

    The search follows called functions from the same module, and functions from other modules if their file is in
    the folder ``below`` and is not part of an installed package.

    For example, ``def step(x): return scale(x)`` and ``def scale(x): return x * x.max().item()`` in the same module give true
    for ``{"item"}``.

    Args:
        function: The function or method.
        attributes: The names of attributes.
        below: A folder; ``None`` to stay in the function's module.
    """
    seen: set[int] = set()
    pending = [function.__func__ if is_a(function, types.MethodType) else function]
    while pending:
        current = pending.pop()
        if not is_a(current, types.FunctionType) or id(current) in seen:
            continue
        seen.add(id(current))
        names = {name for code in _codes(current.__code__) for name in code.co_names}
        if not names.isdisjoint(attributes):
            return True
        values = [current.__globals__.get(name) for name in names]
        modules = [instance_dict(module) or {} for module in values if is_a(module, types.ModuleType)]
        values += [module.get(name) for module in modules for name in names]
        pending += [
            callee
            for value in values
            for callee in _unwrapped(value)
            if callee.__globals__ is current.__globals__ or (below is not None and _is_below(below, callee.__code__))
        ]
        pending += _unwrapped(current)
    return False


def _is_below(folder: str, code: types.CodeType) -> bool:
    """Return whether code comes from a file in ``folder``, and not from a package that is installed there."""
    return code.co_filename.startswith(folder) and "-packages" not in code.co_filename


def _unwrapped(value: object) -> list[types.FunctionType]:
    """Return a function and its wrapped functions, outermost first. Decorators often come from another module."""
    functions: list[types.FunctionType] = []
    seen: set[int] = set()
    while value is not None and id(value) not in seen:
        seen.add(id(value))
        if is_a(value, types.FunctionType):
            functions.append(value)
        # Read the instance dict, because objects that compute their attributes have any attribute.
        value = dict.get(instance_dict(value) or {}, "__wrapped__")
    return functions


def _codes(code: types.CodeType) -> Iterator[types.CodeType]:
    """Return a function's code, and the code of functions, lambdas and comprehensions inside it."""
    yield code
    for constant in code.co_consts:
        if isinstance(constant, types.CodeType):
            yield from _codes(constant)
