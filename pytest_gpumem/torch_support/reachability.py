"""Reachability of tensors from a value, by the ways in which Python code holds on to tensors, and where their memory lies."""

from __future__ import annotations

import gc
import types
import warnings
import weakref
from collections.abc import Mapping
from contextlib import suppress
from typing import TYPE_CHECKING, Any, TypeVar, cast

from pytest_gpumem.torch_support.private_api import beneath_modes, outside_torch_function, parts_of_coo
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


# A proxy holds nothing: the object behind it is reached from its own holder.
_ATOMS: tuple[type[Any], ...] = (
    *(str, bytes, bytearray, int, float, complex, bool, type(None)),
    *(type, types.ModuleType, types.CodeType),
    *weakref.ProxyTypes,
)
T = TypeVar("T")
# A test's `request` leads to the session, and from there to every other test's values.
NOT_THE_TESTS = ("_pytest", "pytest", "pluggy", "xdist", "pytest_gpumem", "logging", "threading", "asyncio")


def alive(kind: type[T]) -> list[T]:
    """Return the objects of a class that Python's collector goes through: not those of a frozen heap."""
    # By its type: asked for its class, a proxy answers for another object. Each type is asked once, as that takes longest.
    objects = gc.get_objects()
    types_there = {id(type(value)): type(value) for value in objects}
    wanted = {number for number, one in types_there.items() if issubclass(one, kind)}
    return [value for value in objects if id(type(value)) in wanted]


def reachable_tensors(roots: Iterable[object]) -> Iterator[torch.Tensor]:
    """Return every tensor held by ``roots``: in containers, attributes, closures, modules, optimizers, gradients."""
    return (value for value, is_tensor in _walk(roots) if is_tensor)


def reachable(roots: Iterable[object]) -> Iterator[Any]:
    """Return everything held by ``roots`` that can hold tensors.

    A function's globals, classes and modules are not followed: they belong to everybody. Neither is an autograd graph,
    since looking at what it saved would unpack it. No code of the objects is run, and one that cannot be read for
    another reason holds nothing that can be seen.
    """
    return (value for value, _ in _walk(roots))


def _walk(roots: Iterable[object]) -> Iterator[tuple[Any, bool]]:
    """Yield what can be reached, each with whether it is a tensor."""
    import torch

    # All are kept, classes as well: no id is used again.
    seen: dict[int, object] = {}
    kinds: dict[int, tuple[type, AttributeLayout | None, bool]] = {}
    stack: list[Any] = list(roots)
    while stack:
        value = stack.pop()
        if id(value) in seen:
            continue
        known = kinds.get(id(type(value)))
        if known is None:
            kind = type(value)
            layout = None if issubclass(kind, _ATOMS) else layout_of(kind)
            known = kinds[id(kind)] = kind, layout, issubclass(kind, torch.Tensor)
        _, layout, is_tensor = known
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
        except Exception:  # noqa: BLE001, S112 - whatever is wrong with it
            continue


def tensors_in(nest: object) -> Iterator[torch.Tensor]:
    """Yield the tensors of a batch, in order and each once: a tensor, or tuples, lists and mappings in any nesting."""
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
    """Return the contents of a mapping, tuple or list by key or index; ``None`` for others, and a mapping that raises."""
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
    """Return the storages of ``tensors`` on ``device``, or anywhere, as address -> bytes. Views count once."""
    return {storage.data_ptr(): storage.nbytes() for storage in storages_of(tensors, device)}


def storages_of(tensors: Iterable[torch.Tensor], device: torch.device | None = None) -> Iterator[torch.UntypedStorage]:
    """Yield the storages of ``tensors`` on ``device`` that have memory; one may come up more than once."""
    for tensor in tensors:
        own = _own_storage(tensor)
        # Subclasses made of other tensors (DTensor, quantized weights) have none, and these are reached by themselves.
        for storage in (own,) if own is not None else map(_own_storage, sparse_parts(tensor)):
            if storage is not None and _has_memory(storage) and (device is None or is_on(storage.device, device)):
                yield storage


def address_of(storage: torch.UntypedStorage) -> int | None:
    """Return the address of a storage's memory; ``None`` for a storage without memory."""
    return storage.data_ptr() if _has_memory(storage) else None


def is_on(there: torch.device, wanted: torch.device) -> bool:
    """Return whether a device is ``wanted``: the same one, or one of its type where ``wanted`` has no index."""
    return there.type == wanted.type and wanted.index in (None, there.index)


def storage_of(tensor: torch.Tensor) -> torch.UntypedStorage | None:
    """Return the storage of a dense tensor if there is memory behind it.

    There is none behind a tensor that is fake, on meta, empty, not initialised yet or within ``vmap``, nor behind one that is
    made of others.
    """
    storage = _own_storage(tensor)
    return storage if storage is not None and _has_memory(storage) else None


def _own_storage(tensor: torch.Tensor) -> torch.UntypedStorage | None:
    import torch

    try:
        with outside_torch_function():
            return torch.Tensor.untyped_storage(tensor)
    except RuntimeError:  # NotImplementedError is one
        return None


def _has_memory(storage: torch.UntypedStorage) -> bool:
    """Return whether there is memory behind a storage, unlike behind those of fake tensors and empty ones."""
    with warnings.catch_warnings():
        # Depending on the release, torch warns or raises when a fake tensor is asked.
        warnings.simplefilter("error")
        try:
            return storage.data_ptr() != 0
        except (RuntimeError, UserWarning):
            return False


def sparse_parts(tensor: torch.Tensor) -> tuple[torch.Tensor, ...]:
    """Return the tensors that a sparse tensor is made of; none of another one."""
    import torch

    anything = cast("Any", torch.Tensor)
    with beneath_modes():
        layout = tensor_property(tensor, "layout")
        if layout is torch.sparse_coo:
            return parts_of_coo(tensor)
        if layout in (torch.sparse_csr, torch.sparse_bsr):
            return (anything.crow_indices(tensor), anything.col_indices(tensor), anything.values(tensor))
        if layout in (torch.sparse_csc, torch.sparse_bsc):
            return (anything.ccol_indices(tensor), anything.row_indices(tensor), anything.values(tensor))
    return ()


HOST = "cpu"


def is_host(device: torch.device) -> bool:
    """Return whether tensors on this device lie in the host's memory."""
    return device.type == HOST


def means_host(word: object) -> bool:
    """Return whether ``device=word`` names the host, as no device does."""
    return word in (None, HOST)
