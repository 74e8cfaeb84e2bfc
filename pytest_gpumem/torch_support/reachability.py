"""Find all tensors to which a Python object refers, directly or through other objects, and the tensors' memory."""

from __future__ import annotations

import gc
import types
import warnings
import weakref
from collections.abc import Mapping
from contextlib import suppress
from typing import TYPE_CHECKING, Any, TypeVar, cast

from pytest_gpumem.torch_support.private_api.dispatch import beneath_modes, outside_torch_function
from pytest_gpumem.torch_support.private_api.tensors import parts_of_coo
from pytest_gpumem.torch_support.static_access import (
    AttributeLayout,
    contents_of,
    gradient_of,
    is_a,
    layout_of,
    tensor_property,
)

if TYPE_CHECKING:
    from collections.abc import Iterable, Iterator

    import torch


# A weak proxy does not own the object behind it, so it is not followed.
_ATOMS: tuple[type[Any], ...] = (
    *(str, bytes, bytearray, int, float, complex, bool, type(None)),
    *(type, types.ModuleType, types.CodeType),
    *weakref.ProxyTypes,
)
T = TypeVar("T")
# Attributes of objects from these packages are not followed. For example, a test's `request` refers to the session, through
# which the fixtures of all other tests would be reached.
NOT_THE_TESTS = ("_pytest", "pytest", "pluggy", "xdist", "pytest_gpumem", "logging", "threading", "asyncio")


def alive(kind: type[T]) -> list[T]:
    """Return all live instances of a class from the garbage collector's list, which lacks frozen objects."""
    # Check `type(value)`, because a proxy's ``__class__`` is another object's class. Checking each type only once is faster.
    objects = gc.get_objects()
    types_by_id = {id(type(value)): type(value) for value in objects}
    matching_ids = {number for number, candidate in types_by_id.items() if issubclass(candidate, kind)}
    return [value for value in objects if id(type(value)) in matching_ids]


def reachable_tensors(roots: Iterable[object]) -> Iterator[torch.Tensor]:
    """Return all tensors to which ``roots`` refer: in containers, attributes, closures, modules, optimizers and gradients.

    For example, ``[model, optimizer]`` reaches the model's parameters, their gradients and the optimizer's state.
    """
    return (value for value, is_tensor in _walk(roots) if is_tensor)


def reachable(roots: Iterable[object]) -> Iterator[Any]:
    """Return all objects to which ``roots`` refer, directly or through other objects, if such an object can refer to tensors.

    A function's globals, classes and Python modules are not followed, because all code shares them. Autograd graphs are not
    followed either, because reading their saved tensors would unpack them. The objects' own code is not run. An object whose
    attributes cannot be read is returned, but not followed.
    """
    return (value for value, _ in _walk(roots))


def _walk(roots: Iterable[object]) -> Iterator[tuple[Any, bool]]:
    """Yield each object to which ``roots`` refer, with True if the object is a tensor."""
    import torch

    # `seen` and `kinds` refer to the objects and classes, so none of them is freed and no id is reused.
    seen: dict[int, object] = {}
    kinds: dict[int, tuple[type, AttributeLayout | None, bool]] = {}
    stack: list[Any] = list(roots)
    while stack:
        value = stack.pop()
        if id(value) in seen:
            continue
        kind_info = kinds.get(id(type(value)))
        if kind_info is None:
            kind = type(value)
            layout = None if issubclass(kind, _ATOMS) else layout_of(kind)
            kind_info = kinds[id(kind)] = kind, layout, issubclass(kind, torch.Tensor)
        _, layout, is_tensor = kind_info
        if layout is None:
            continue
        seen[id(value)] = value
        yield value, is_tensor
        try:
            if layout.contents is not None:
                stack.extend(layout.contents(value))
            if layout.package not in NOT_THE_TESTS:
                stack.extend(layout.attributes(value))
            if is_tensor:
                stack.append(gradient_of(value))
        except Exception:  # noqa: BLE001, S112 - a foreign object may raise anything
            continue


def tensors_in(nest: object) -> Iterator[torch.Tensor]:
    """Yield each tensor in a batch once, in order. A batch is a tensor, or tuples, lists and mappings that contain tensors."""
    import torch

    seen: dict[int, object] = {}
    stack = [nest]
    while stack:
        value = stack.pop()
        if is_a(value, torch.Tensor):
            yield value
        elif id(value) not in seen:
            members = members_of(value)
            if members is not None:
                seen[id(value)] = value
                stack.extend(reversed(list(members.values())))


def members_of(nest: object) -> dict[Any, Any] | None:
    """Return a mapping's contents by key, or the contents of a tuple or list by index.

    Return ``None`` for other objects, and for a mapping whose methods raise an exception.
    """
    if is_a(nest, dict):
        return dict(dict.items(nest))
    if is_a(nest, list, tuple):
        return dict(enumerate(contents_of(nest)))
    if is_a(nest, types.MappingProxyType):
        return next(map(members_of, contents_of(nest)))
    if not issubclass(type(nest), Mapping):
        return None
    with suppress(Exception):
        return dict(cast("Mapping[Any, Any]", nest).items())
    return None


def blocks_of(tensors: Iterable[torch.Tensor], device: torch.device | None = None) -> dict[int, int]:
    """Return the bytes in each storage that ``tensors`` have on a device (``None`` for any device), by address.

    Several views of a storage result in a single entry.
    """
    return {storage.data_ptr(): storage.nbytes() for storage in storages_of(tensors, device)}


def storages_of(tensors: Iterable[torch.Tensor], device: torch.device | None = None) -> Iterator[torch.UntypedStorage]:
    """Yield each tensor's storage, if it has memory and is on a device (on any device for ``None``).

    For several views of a storage, the storage is yielded several times.
    """
    for tensor in tensors:
        own_storage = _own_storage(tensor)
        # A tensor made from other tensors (DTensor, quantized weights) has no storage. Callers also pass the other tensors.
        for storage in (own_storage,) if own_storage is not None else map(_own_storage, sparse_parts(tensor)):
            if storage is not None and _has_memory(storage) and (device is None or is_on(storage.device, device)):
                yield storage


def address_of(storage: torch.UntypedStorage) -> int | None:
    """Return a storage's memory address; ``None`` if the storage has no memory, for example on ``meta``."""
    return storage.data_ptr() if _has_memory(storage) else None


def is_on(device: torch.device, target: torch.device) -> bool:
    """Return whether a device is ``target``. If ``target`` has no index (``cuda``), it matches all devices of its type."""
    return device.type == target.type and target.index in (None, device.index)


def storage_of(tensor: torch.Tensor) -> torch.UntypedStorage | None:
    """Return the storage of a dense tensor; ``None`` if the tensor has no memory itself.

    Tensors without memory are fake tensors, tensors on ``meta``, empty tensors, parameters of lazy modules before the first
    call, tensors inside ``vmap``, and tensors made from other tensors.
    """
    storage = _own_storage(tensor)
    return storage if storage is not None and _has_memory(storage) else None


def _own_storage(tensor: torch.Tensor) -> torch.UntypedStorage | None:
    import torch

    try:
        with outside_torch_function():
            return torch.Tensor.untyped_storage(tensor)
    except RuntimeError:  # NotImplementedError is a subclass
        return None


def _has_memory(storage: torch.UntypedStorage) -> bool:
    """Return whether a storage has memory. The storages of fake and empty tensors have no memory."""
    with warnings.catch_warnings():
        # For a fake tensor, `data_ptr` warns or raises an exception, depending on the torch release.
        warnings.simplefilter("error")
        try:
            return storage.data_ptr() != 0
        except (RuntimeError, UserWarning):
            return False


def sparse_parts(tensor: torch.Tensor) -> tuple[torch.Tensor, ...]:
    """Return the indices and values of a sparse tensor as tensors; an empty tuple for a dense tensor."""
    import torch

    tensor_class = cast("Any", torch.Tensor)
    with beneath_modes():
        layout = tensor_property(tensor, "layout")
        if layout is torch.sparse_coo:
            return parts_of_coo(tensor)
        if layout in (torch.sparse_csr, torch.sparse_bsr):
            return (tensor_class.crow_indices(tensor), tensor_class.col_indices(tensor), tensor_class.values(tensor))
        if layout in (torch.sparse_csc, torch.sparse_bsc):
            return (tensor_class.ccol_indices(tensor), tensor_class.row_indices(tensor), tensor_class.values(tensor))
    return ()


HOST = "cpu"


def is_host(device: torch.device) -> bool:
    """Return whether a device is the CPU, so its tensors are in the host's memory."""
    return device.type == HOST


def means_host(word: object) -> bool:
    """Return whether the argument ``device=word`` of a torch function means the CPU: ``None`` or ``"cpu"``."""
    return word in (None, HOST)
