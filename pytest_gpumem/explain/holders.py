"""Holders of tensors: the attribute, variable or element of a container that keeps each of them alive."""

from __future__ import annotations

import gc
import types
from collections import Counter, deque
from typing import TYPE_CHECKING, Any

from pytest_gpumem.torch_support.garbage_collector import everything_in_sight
from pytest_gpumem.torch_support.reachability import NOT_THE_TESTS, storage_of
from pytest_gpumem.torch_support.static_access import class_name, instance_dict, package_of

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
        counts = Counter(_Climb(tensors, held).paths_of(held).values())
        held.clear()
    ranked = sorted(counts, key=lambda path: (-counts[path], path))
    return tuple(ranked[:MOST_TOLD])


def _tensors() -> list[Any]:
    import torch

    # By its type: asked for its class, a proxy answers for another object.
    return [value for value in gc.get_objects() if issubclass(type(value), torch.Tensor)]


def _held(tensors: list[Any]) -> list[Any]:
    """Return those of ``tensors`` that an object refers to: of a graph's tensors it is mostly none.

    Python goes through all objects to find who refers to one, or to any of many, which takes less than one after another.
    """
    referred = {
        id(one) for holder in gc.get_referrers(*tensors) if holder is not tensors for one in gc.get_referents(holder)
    }
    return [tensor for tensor in tensors if id(tensor) in referred]


def _address(tensor: Any) -> int | None:
    storage = storage_of(tensor)
    return None if storage is None else storage.data_ptr()


class _Climb:
    """Search from objects up to holders with a name. ``ours`` are lists of the caller that refer to them.

    Python goes through all objects to find who refers to one, in much less time than for each of many after another: each
    height is climbed by all at once.
    """

    def __init__(self, *ours: list[Any]) -> None:
        self._ours: list[Any] = [*ours]
        """Containers of this climb. They are kept: another object must not get the place of one."""

    def paths_of(self, values: list[Any], height: int = 0) -> dict[int, str]:
        """Return the path to each value, by the value's id. Those that no name leads to are left out."""
        if not values or height > _HIGHEST:
            return {}
        holders, of = self._look(values)
        names = self._names(holders, of, values)
        found = {id(value): names[id(value)] for value in values if id(value) in names}
        within = {
            id(value): [one for one in of[id(value)] if issubclass(type(holders[one]), _CONTAINERS)]
            for value in values
            if id(value) not in names
        }
        containers = [holders[one] for one in {one: None for ones in within.values() for one in ones}]
        above = self.paths_of(containers, height + 1)
        for value, ones in within.items():
            path = next((above[one] for one in ones if one in above), None)
            if path is not None:
                found[value] = path if path.endswith("[...]") else f"{path}[...]"
        return found

    def _look(self, values: list[Any]) -> tuple[dict[int, Any], dict[int, list[int]]]:
        """Return the objects that refer to any of the values, by id, and their ids for each value, by the value's id."""
        self._ours.append(values)
        ours = {id(self._ours), *map(id, self._ours)}
        of: dict[int, list[int]] = {id(value): [] for value in values}
        holders: dict[int, Any] = {}
        # Of none it would look as long.
        for holder in gc.get_referrers(*values) if values else ():
            if id(holder) in ours or _is_nobodys(holder):
                continue
            holders[id(holder)] = holder
            for one in {id(referent) for referent in gc.get_referents(holder)} & of.keys():
                of[one].append(id(holder))
        self._ours.append(holders)
        return holders, of

    def _names(self, holders: dict[int, Any], of: dict[int, list[int]], values: list[Any]) -> dict[int, str]:
        """Return the name that the first holder with one gives to each value, by the value's id."""
        variables = self._variables([holder for holder in holders.values() if type(holder) is types.CellType])
        keys = {
            (one, id(value)): key
            for value in values
            for one in of[id(value)]
            if type(holders[one]) is dict and (key := _key_of(holders[one], value)) is not None
        }
        owners = self._owners([holders[one] for one in {one: None for one, _ in keys}])
        found: dict[int, str] = {}
        for value in values:
            for one in of[id(value)]:
                name: str | None
                if one in variables:
                    name = variables[one]
                elif type(holders[one]) is dict:
                    name = (
                        f"{owners[one]}.{keys[one, id(value)]}" if one in owners and (one, id(value)) in keys else None
                    )
                else:
                    name = _attribute(holders[one], value)
                if name is not None:
                    found[id(value)] = name
                    break
        return found

    def _owners(self, namespaces: list[Any]) -> dict[int, str]:
        """Return the module, class or object that each dict of names belongs to, by the id of the dict, where there is one."""
        found: dict[int, str] = {}
        for namespace in namespaces:
            name = dict.get(namespace, "__name__")
            if type(name) is str and dict.__contains__(namespace, "__builtins__"):
                found[id(namespace)] = name  # a module, also one that is not in sys.modules
        others = [namespace for namespace in namespaces if id(namespace) not in found]
        self._ours.append(namespaces)
        holders, of = self._look(others)
        for namespace in others:
            for one in of[id(namespace)]:
                if not issubclass(type(holders[one]), _CONTAINERS) and instance_dict(holders[one]) is namespace:
                    found.setdefault(id(namespace), class_name(type(holders[one])))
        return found

    def _variables(self, cells: list[Any]) -> dict[int, str]:
        """Return the variable of each closure cell, with its function, by the cell's id."""
        found: dict[int, str] = {}
        closures, of_cell = self._look(cells)
        tuples = [closure for closure in closures.values() if type(closure) is tuple]
        functions, of_closure = self._look(tuples)
        for cell in cells:
            for closure in (closures[one] for one in of_cell[id(cell)] if one in of_closure):
                for function in (functions[one] for one in of_closure[id(closure)]):
                    if type(function) is types.FunctionType and function.__closure__ is closure:
                        free = zip(function.__code__.co_freevars, function.__closure__ or (), strict=True)
                        name = next((name for name, own in free if own is cell), None)
                        if name is not None:
                            found.setdefault(id(cell), f"{_outer(function)}.<locals>.{name}")
        return found


def _attribute(holder: object, value: object) -> str | None:
    """Return the name of an attribute of ``holder`` that lies in the object itself, without a dict."""
    if issubclass(type(holder), (*_CONTAINERS, type, types.FunctionType, types.ModuleType, types.CellType)):
        return None
    attributes = instance_dict(holder)
    key = None if attributes is None else _key_of(attributes, value)
    return None if key is None else f"{class_name(type(holder))}.{key}"


def _is_nobodys(holder: object) -> bool:
    """Return whether a holder is a running frame, or pytest's or ours."""
    return type(holder) is types.FrameType or package_of(type(holder)) in NOT_THE_TESTS


def _key_of(names: dict[Any, Any], value: object) -> str | None:
    return next((key for key, one in dict.items(names) if one is value and type(key) is str), None)


def _outer(function: types.FunctionType) -> str:
    """Return the function that a closure's variables are of."""
    outer, _, inner = function.__qualname__.rpartition(".<locals>.")
    return outer or inner
