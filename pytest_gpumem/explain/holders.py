"""Holders of tensors: the attribute, variable or element of a container that keeps each of them alive."""

from __future__ import annotations

import gc
import types
from collections import Counter, deque
from typing import TYPE_CHECKING, Any

from pytest_gpumem.collector import everything_in_sight
from pytest_gpumem.inspection import class_name, instance_dict, package_of
from pytest_gpumem.reach import NOT_THE_TESTS, storage_of

if TYPE_CHECKING:
    from collections.abc import Collection

MOST_TOLD = 3
_HIGHEST = 6
"""How many containers within one another are looked through."""
_CONTAINERS = (list, tuple, set, frozenset, dict, deque)


def holders_of(addresses: Collection[int]) -> tuple[str, ...]:
    """Return what keeps the tensors whose memory lies at ``addresses`` alive: ``"Net.seen[...]"``.

    Returns:
        At most `MOST_TOLD` paths, that of the most tensors first. None for memory that only a graph of gradients holds.
    """
    if not addresses:
        return ()
    with everything_in_sight():
        tensors = [tensor for tensor in _tensors() if _address(tensor) in addresses]
        held = _held(tensors)
        tensors.clear()
        climb = _Climb(ignored={id(tensors), id(held)})
        counts = Counter(path for tensor in held if (path := climb.path_of(tensor)) is not None)
        held.clear()
    ranked = sorted(counts, key=lambda path: (-counts[path], path))
    return tuple(ranked[:MOST_TOLD])


def _tensors() -> list[Any]:
    import torch

    # By its type: asked for its class, a proxy answers for another object.
    return [value for value in gc.get_objects() if issubclass(type(value), torch.Tensor)]


def _held(tensors: list[Any]) -> list[Any]:
    """Those of ``tensors`` that an object refers to: of a graph's tensors it is mostly none.

    Python goes through all objects to find who refers to one, in about 0.1 s; or to any of many, as fast.
    """
    referred = {
        id(one) for holder in gc.get_referrers(*tensors) if holder is not tensors for one in gc.get_referents(holder)
    }
    return [tensor for tensor in tensors if id(tensor) in referred]


def _address(tensor: Any) -> int | None:
    storage = storage_of(tensor)
    return None if storage is None else storage.data_ptr()


class _Climb:
    """From an object up to whoever has a name. ``ignored`` are the ids of containers of our own."""

    def __init__(self, ignored: set[int]) -> None:
        self._ignored = ignored

    def path_of(self, value: object, height: int = 0) -> str | None:
        if height > _HIGHEST:
            return None
        containers = []
        holders = gc.get_referrers(value)
        self._ignored.add(id(holders))
        try:
            for holder in holders:
                if id(holder) in self._ignored or _is_nobodys(holder):
                    continue
                named = self._name_in(holder, value)
                if named is not None:
                    return named
                if issubclass(type(holder), _CONTAINERS):
                    containers.append(holder)
            self._ignored.add(id(containers))
            for container in containers:
                path = self.path_of(container, height + 1)
                if path is not None:
                    return f"{path}[...]" if not path.endswith("[...]") else path
        finally:
            self._ignored.discard(id(holders))
            self._ignored.discard(id(containers))
        return None

    def _name_in(self, holder: object, value: object) -> str | None:
        """The name that ``holder`` itself gives to ``value``."""
        if type(holder) is types.CellType:
            return self._variable(holder)
        if type(holder) is dict:
            key = _key_of(holder, value)
            owner = self._owner_of(holder) if key is not None else None
            return None if owner is None else f"{owner}.{key}"
        if issubclass(type(holder), (*_CONTAINERS, type, types.FunctionType, types.ModuleType)):
            return None
        # Attributes may lie in the object itself, without a dict.
        attributes = instance_dict(holder)
        key = None if attributes is None else _key_of(attributes, value)
        return None if key is None else f"{class_name(type(holder))}.{key}"

    def _owner_of(self, namespace: dict[Any, Any]) -> str | None:
        """The module, class or object whose names are in ``namespace``; ``None`` for a dict that is none's."""
        name = dict.get(namespace, "__name__")
        if type(name) is str and dict.__contains__(namespace, "__builtins__"):
            return name  # a module, also one that is not in sys.modules
        for owner in gc.get_referrers(namespace):
            if id(owner) in self._ignored or _is_nobodys(owner) or issubclass(type(owner), _CONTAINERS):
                continue
            if instance_dict(owner) is namespace:
                return class_name(type(owner))
        return None

    @staticmethod
    def _variable(cell: object) -> str | None:
        for closure in gc.get_referrers(cell):
            if type(closure) is not tuple:
                continue
            for function in gc.get_referrers(closure):
                if type(function) is types.FunctionType and function.__closure__ is closure:
                    names = [
                        name for name, own in zip(function.__code__.co_freevars, closure, strict=True) if own is cell
                    ]
                    return f"{_outer(function)}.<locals>.{names[0]}" if names else None
        return None


def _is_nobodys(holder: object) -> bool:
    """Whether it is a running frame, or pytest's or ours."""
    return type(holder) is types.FrameType or package_of(type(holder)) in NOT_THE_TESTS


def _key_of(names: dict[Any, Any], value: object) -> str | None:
    return next((key for key, one in dict.items(names) if one is value and type(key) is str), None)


def _outer(function: types.FunctionType) -> str:
    """The function that a closure's variables are of."""
    outer, _, inner = function.__qualname__.rpartition(".<locals>.")
    return outer or inner
