"""Read the attributes and contents of users' objects without running the objects' code, as `inspect.getattr_static` does.

Ordinary access may run users' code or raise an exception. ``isinstance`` reads an object's ``__class__``, which may be a
property or the class of another object (`weakref.proxy`). An attribute may be a property, a container may override its
methods, and a metaclass may compute the attributes of a class. The functions here therefore use ``type(value)`` and the
methods of built-in base types. They replace ``named_modules`` and ``named_parameters`` too, because models may override these
methods, and because both methods need hashable modules.

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

from pytest_gpumem.torch_support.private_api.attributes import MODULE_PARTS
from pytest_gpumem.torch_support.private_api.dispatch import outside_torch_function

if TYPE_CHECKING:
    from collections.abc import Callable, Collection, Iterable, Iterator
    from typing import TypeGuard

    import torch


T = TypeVar("T")

_COMPILED = "_orig_mod"
"""The name of the original module within torch.compile's wrapper."""
_CONTAINERS: tuple[type[Any], ...] = (list, tuple, set, frozenset, collections.deque)
_NATIVE = (types.GetSetDescriptorType, types.MemberDescriptorType)
# Use the descriptors of `type`, because a metaclass may override its classes' attributes.
_mro, _namespace, _module_of, _qualname = (
    type.__dict__[name] for name in ("__mro__", "__dict__", "__module__", "__qualname__")
)


def is_a(value: object, *kinds: type[T]) -> TypeGuard[T]:
    """Return whether the type of ``value`` is one of ``kinds`` or a subclass, whatever ``value.__class__`` returns."""
    return issubclass(type(value), kinds)


def class_name(kind: type) -> str:
    """Return the qualified name of a class. For a class defined in a function, the function's name is left out."""
    return str(_qualname.__get__(kind)).rpartition("<locals>.")[2]


def module_of(kind: type) -> str:
    """Return the ``__module__`` of a class; an empty string if it is not a string."""
    module = _module_of.__get__(kind)
    return module if type(module) is str else ""


def package_of(kind: type) -> str:
    """Return the top-level package of a class (``torch`` for ``torch.nn.Linear``); an empty string if it has no module."""
    module = _module_of.__get__(kind)
    return module.partition(".")[0] if type(module) is str else ""


def class_namespace(kind: type) -> dict[str, Any] | None:
    """Return the dict in which a class stores its own attributes, not a read-only view; ``None`` if the dict is not found."""
    return next((value for value in gc.get_referents(_namespace.__get__(kind)) if type(value) is dict), None)


def class_attribute(kind: type, name: str) -> Any:
    """Return an attribute of a class or its bases, as it is stored; ``None`` if it does not exist.

    For example, the result for a property is the property itself, and not its value.
    """
    for base in _mro.__get__(kind):
        namespace = _namespace.__get__(base)
        if name in namespace:
            return namespace[name]
    return None


def class_values(kind: type) -> Iterator[object]:
    """Yield all attributes' values from a class and its bases, as they are stored."""
    for base in _mro.__get__(kind):
        yield from list(_namespace.__get__(base).values())


def instance_dict(value: object) -> dict[str, Any] | None:
    """Return the ``__dict__`` of an object itself, and not a copy; ``None`` if the object has none or it cannot be read."""
    dictionary = layout_of(type(value)).dictionary
    own_dict = None if dictionary is None else dictionary.__get__(value)
    return own_dict if is_a(own_dict, dict) else None


def attribute(value: object, name: str) -> Any:
    """Return an object's attribute; ``None`` for a property.

    If the object itself lacks the attribute, the result is its class's attribute, unless that attribute is a descriptor.
    """
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
    """Return the objects inside a container, a function's closure and defaults, a method, a partial, or a generator's locals.

    The result is empty for all other objects.
    """
    contents = layout_of(type(value)).contents
    return () if contents is None else contents(value)


@dataclass(frozen=True, slots=True)
class AttributeLayout:
    """Descriptors and functions for reading the attributes and contents of a class's objects.

    For example, a class with ``__slots__ = ("weight",)`` and no ``__dict__`` has a single member and no dictionary.
    """

    package: str
    """The top-level package of the class, as `package_of` returns it."""
    contents: Callable[[Any], Iterable[object]] | None
    """A function that returns an object's contents (`contents_of`); ``None`` if the class's objects have no contents."""
    dictionary: Any
    """The built-in descriptor that returns an object's ``__dict__``. ``None`` if there is no ``__dict__``, or if the class
    overrides it in Python code."""
    covered: bool
    """True if the class or a base defines ``__dict__``, by a built-in descriptor or in Python code."""
    members: tuple[types.MemberDescriptorType, ...]
    """The descriptors of all ``__slots__`` in the class and its bases."""

    def attributes(self, value: object) -> list[object]:
        """Return the values of all attributes in an object's ``__dict__`` and slots."""
        values: list[object] = []
        if self.dictionary is not None:
            own_dict = self.dictionary.__get__(value)
            if issubclass(type(own_dict), dict):
                values.extend(dict.values(own_dict))
        elif self.covered:
            # The class overrides ``__dict__`` in Python code. The garbage collector still knows to which objects the real dict
            # refers.
            values.extend(gc.get_referents(value))
        for member in self.members:
            try:
                values.append(member.__get__(value))
            except AttributeError:  # an empty slot
                continue
        return values


def layout_of(kind: type) -> AttributeLayout:
    """Return the descriptors and functions for reading a class's objects."""
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
"""In `named_variables_of`, a frame's dict of locals has three references: from the frame, the variable and `sys.getrefcount`.

If there are more references, other code has stored the result of ``locals()``, so the dict must not be cleared."""


def variables_of(frame: types.FrameType) -> list[object]:
    """Return the values of the local variables in a frame."""
    return [*named_variables_of(frame).values()]


def named_variables_of(frame: types.FrameType) -> dict[str, object]:
    """Return the local variables in a frame, by name."""
    local = frame.f_locals
    variables = dict(local)
    if is_a(local, dict) and sys.getrefcount(local) <= _REFERENCES_TO_LOCALS:
        # Until Python 3.12, the frame refers to this dict, so the dict would keep all values alive. Clear it.
        local.clear()
    return variables


_READERS: tuple[tuple[type[Any], Callable[[Any], Iterable[object]]], ...] = (
    (dict, lambda value: [*dict.keys(value), *dict.values(value)]),
    *((kind, kind.__iter__) for kind in _CONTAINERS),
    # Return the mapping behind a read-only proxy, and not its contents: the mapping's class may override its methods.
    (types.MappingProxyType, gc.get_referents),
    (types.FunctionType, _bound_to_a_function),
    (types.MethodType, lambda value: [value.__self__, value.__func__]),
    (functools.partial, _bound_to_a_partial),
    (types.GeneratorType, _in_a_generator),
)


def tensor_property(tensor: torch.Tensor, name: str) -> Any:
    """Return a property such as ``shape`` as `torch.Tensor` computes it, even if a subclass overrides the property."""
    import torch

    with outside_torch_function():
        return getattr(torch.Tensor, name).__get__(tensor)


def gradient_of(tensor: torch.Tensor) -> torch.Tensor | None:
    """Return a leaf tensor's gradient; ``None`` for other tensors, because reading their gradient causes a warning."""
    return tensor_property(tensor, "grad") if tensor_property(tensor, "is_leaf") else None


def clear_gradient(tensor: torch.Tensor) -> None:
    """Set a tensor's gradient to ``None``, even if a subclass overrides ``grad``."""
    import torch

    with outside_torch_function():
        cast("Any", torch.Tensor).grad.__set__(tensor, None)


def has_parts(tensor: torch.Tensor) -> bool:
    """Return whether a tensor is made from other tensors (DTensor, quantized weights) and has no memory itself."""
    return class_attribute(type(tensor), "__tensor_flatten__") is not None


def parts_of(tensor: torch.Tensor) -> Iterator[torch.Tensor]:
    """Yield the tensors from which a tensor is made, each once. For an ordinary tensor, yield the tensor itself."""
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
    """Return how many elements a tensor has; 0 for a parameter of a lazy module before the module's first call."""
    return math.prod(tensor_property(tensor, "shape"))


def dtype_and_shape(tensor: torch.Tensor) -> tuple[str, tuple[int, ...]]:
    """Return a tensor's dtype and shape: ``("float32", (8, 256))``."""
    return str(tensor_property(tensor, "dtype")).removeprefix("torch."), tuple(tensor_property(tensor, "shape"))


def named_modules(root: torch.nn.Module) -> Iterator[tuple[str, torch.nn.Module]]:
    """Yield each module in a model once, with its path: ``"blocks.0"``, or ``""`` for the model. Outer modules come first."""
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
    """Yield each parameter or buffer in a model once, as (module's path, name in the module, tensor)."""
    seen: set[int] = set()
    for path, module in named_modules(root):
        for name, tensor in _own_parts(module, kind):
            if id(tensor) not in seen:
                seen.add(id(tensor))
                yield path, name, tensor


def _own_parts(module: torch.nn.Module, kind: str) -> Iterator[tuple[str, Any]]:
    """Yield the module's own parameters, buffers or submodules with their names, but none from inside submodules."""
    import torch

    parts = attribute(module, MODULE_PARTS[kind])
    # A TorchScript module stores its parts in C++, so `parts` is not a dict. Its class belongs to torch and runs no user code.
    named = dict.items(parts) if is_a(parts, dict) else parts.items() if is_a(module, torch.jit.ScriptModule) else ()
    for name, part in list(named):
        if is_a(part, torch.nn.Module if kind == "modules" else torch.Tensor):
            yield name, part


def displayed_path(root: torch.nn.Module, prefix: str, path: str) -> str:
    """Return a module's path without torch.compile's wrappers. For the model itself, return the model's class.

    A path that begins with a number would look like a row number. So paths in a ``Sequential`` begin with the class, for
    example ``Sequential.2``.
    """
    parts = [part for part in path.split(".") if part not in ("", _COMPILED)]
    if parts and not parts[0].isdecimal():
        return prefix + ".".join(parts)
    modules = attribute(root, MODULE_PARTS["modules"])
    model = dict.get(modules, _COMPILED, root) if is_a(modules, dict) else root
    return ".".join([type(model).__name__, *parts])


def tensor_text(dtype: str, shape: tuple[int, ...]) -> str:
    """Return a dtype and shape as a text: ``float32[8, 256]``."""
    return f"{dtype}{list(shape)}"


def parameters_of(module: torch.nn.Module) -> int:
    """Return how many elements a module's parameters have in total. Tied parameters count once."""
    return sum(map(elements_of, module.parameters()))


def reads_any(function: object, attributes: Collection[str], below: str | None = None) -> bool:
    """Return whether a function's code, or the code of its callees, reads an attribute with one of these names.

    The search follows calls to functions in the same module. It follows calls to other modules only if their files are in the
    folder ``below`` and do not belong to an installed package.

    For example, a module has ``def step(x): return scale(x)`` and ``def scale(x): return x * x.max().item()``. For ``step``
    and the name ``item``, the result is True.

    Args:
        function: The function or method.
        attributes: The attribute names to search for: ``{"item", "tolist"}``.
        below: The folder with modules to search; ``None`` to search only the function's own module.
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
    """Return whether code comes from a file in a folder, except for packages installed in this folder."""
    return code.co_filename.startswith(folder) and "-packages" not in code.co_filename


def _unwrapped(value: object) -> list[types.FunctionType]:
    """Return a decorated function and its wrapped functions (``__wrapped__``), the outermost first."""
    functions: list[types.FunctionType] = []
    seen: set[int] = set()
    while value is not None and id(value) not in seen:
        seen.add(id(value))
        if is_a(value, types.FunctionType):
            functions.append(value)
        # Read `__wrapped__` from the instance dict, because a mock object returns a value for every attribute.
        value = dict.get(instance_dict(value) or {}, "__wrapped__")
    return functions


def _codes(code: types.CodeType) -> Iterator[types.CodeType]:
    """Yield a function's code object, and the code objects of all functions, lambdas and comprehensions inside it."""
    yield code
    for constant in code.co_consts:
        if isinstance(constant, types.CodeType):
            yield from _codes(constant)
