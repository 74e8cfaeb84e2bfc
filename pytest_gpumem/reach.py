"""Which tensors can be reached from a value, by the ways in which Python code holds on to tensors."""

from __future__ import annotations

import functools
import types
import warnings
from typing import TYPE_CHECKING, Any

from pytest_gpumem.devices.torch_internals import parts_of_coo

if TYPE_CHECKING:
    from collections.abc import Iterable, Iterator

    import torch

_ATOMS = (str, bytes, bytearray, int, float, complex, bool, type(None), type, types.ModuleType, types.CodeType)
# A test's `request` leads to the session, and from there to every other test's values.
_NOT_THE_TESTS = ("_pytest", "pytest", "pluggy", "xdist", "pytest_gpumem", "logging", "threading", "asyncio")


def reachable_tensors(roots: Iterable[object]) -> Iterator[torch.Tensor]:
    """Every tensor held by ``roots``: in containers, attributes, closures, modules, optimizers, gradients."""
    import torch

    return (value for value in reachable(roots) if isinstance(value, torch.Tensor))


def reachable(roots: Iterable[object]) -> Iterator[Any]:
    """Everything held by ``roots`` that can hold tensors.

    A function's globals, classes and modules are not followed: they belong to everybody. Neither is an autograd graph,
    since looking at what it saved would unpack it.
    """
    import torch

    seen: dict[int, object] = {}
    stack = list(roots)
    while stack:
        value = stack.pop()
        if isinstance(value, _ATOMS) or id(value) in seen:
            continue
        seen[id(value)] = value
        yield value
        if isinstance(value, torch.Tensor):
            if value.is_leaf and value.grad is not None:
                stack.append(value.grad)
            if hasattr(value, "__tensor_flatten__"):
                names, _ = value.__tensor_flatten__()
                stack.extend(getattr(value, name) for name in names)
        stack.extend(_held_by(value))


def _held_by(value: Any) -> Iterator[object]:
    """What ``value`` refers to directly."""
    if isinstance(value, dict):
        # dict's own methods: those of a subclass may compute, allocate or fail.
        yield from list(dict.keys(value))
        yield from list(dict.values(value))
    elif isinstance(value, types.MappingProxyType):
        yield from list(value.values())
    elif isinstance(value, (list, tuple, set, frozenset)) or type(value).__name__ == "deque":
        yield from list(value)
    elif isinstance(value, types.FunctionType):
        yield from (cell.cell_contents for cell in value.__closure__ or () if _is_filled(cell))
        yield from value.__defaults__ or ()
        yield from (value.__kwdefaults__ or {}).values()
    elif isinstance(value, types.MethodType):
        yield value.__self__
        yield value.__func__
    elif isinstance(value, functools.partial):
        yield from (value.func, value.args, value.keywords)
    elif isinstance(value, types.GeneratorType) and value.gi_frame is not None:
        seen = value.gi_frame.f_locals
        yield from list(seen.values())
        if isinstance(seen, dict):
            # Until Python 3.12 the frame keeps this copy, and with it everything that was in it.
            seen.clear()
    if type(value).__module__.partition(".")[0] in _NOT_THE_TESTS:
        return
    yield from _attributes(value)


def _attributes(value: object) -> Iterator[object]:
    # Not getattr: a property may compute, allocate or fail.
    try:
        attributes = object.__getattribute__(value, "__dict__")
    except AttributeError:
        attributes = None
    if isinstance(attributes, dict):
        yield from list(attributes.values())
    for kind in type(value).__mro__:
        slots = kind.__dict__.get("__slots__", ())
        for name in (slots,) if isinstance(slots, str) else slots:
            member = kind.__dict__.get(name)
            if isinstance(member, types.MemberDescriptorType):
                try:
                    yield member.__get__(value, kind)
                except AttributeError:
                    continue


def _is_filled(cell: types.CellType) -> bool:
    try:
        cell.cell_contents  # noqa: B018 - an empty cell raises
    except ValueError:
        return False
    return True


def blocks_of(tensors: Iterable[torch.Tensor], device: torch.device) -> dict[int, int]:
    """The memory of ``tensors`` on ``device``: address of each storage -> its bytes. Views of one storage count once."""
    return {storage.data_ptr(): storage.nbytes() for storage in storages_of(tensors, device)}


def storages_of(tensors: Iterable[torch.Tensor], device: torch.device) -> Iterator[torch.UntypedStorage]:
    """The storages of ``tensors`` on ``device`` that have memory behind them; one may come up more than once."""
    for tensor in tensors:
        if tensor.device.type == device.type and device.index in (None, tensor.device.index):
            for dense in _dense_parts(tensor):
                storage = storage_of(dense)
                if storage is not None:
                    yield storage


def storage_of(tensor: torch.Tensor) -> torch.UntypedStorage | None:
    """The storage of a dense tensor if there is memory behind it: not of fake or meta tensors, nor within ``vmap``."""
    try:
        storage = tensor.untyped_storage()
    except RuntimeError:  # NotImplementedError is one
        return None
    return storage if _has_memory(storage) else None


def _has_memory(storage: torch.UntypedStorage) -> bool:
    """Whether there is memory behind a storage, unlike behind those of fake tensors and empty ones."""
    with warnings.catch_warnings():
        # Depending on the release, torch warns or raises when a fake tensor is asked.
        warnings.simplefilter("error")
        try:
            return storage.data_ptr() != 0
        except (RuntimeError, UserWarning):
            return False


def _dense_parts(tensor: torch.Tensor) -> Iterator[torch.Tensor]:
    import torch

    # Subclasses made of other tensors (DTensor, quantized weights) have no storage; their parts are reached by themselves.
    if hasattr(tensor, "__tensor_flatten__"):
        return
    if tensor.layout is torch.strided:
        yield tensor
    elif tensor.layout is torch.sparse_coo:
        yield from parts_of_coo(tensor)
    elif tensor.layout in (torch.sparse_csr, torch.sparse_bsr):
        yield from (tensor.crow_indices(), tensor.col_indices(), tensor.values())
    elif tensor.layout in (torch.sparse_csc, torch.sparse_bsc):
        yield from (tensor.ccol_indices(), tensor.row_indices(), tensor.values())
