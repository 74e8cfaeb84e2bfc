"""Holders of tensors: the attribute, variable or element of a container that keeps each of them alive."""

from __future__ import annotations

import gc
import types
from collections import Counter, deque
from typing import TYPE_CHECKING, Any

from pytest_gpumem.torch_support.garbage_collector import everything_in_sight
from pytest_gpumem.torch_support.reachability import NOT_THE_TESTS, alive, storage_of
from pytest_gpumem.torch_support.static_access import class_name, instance_dict, package_of

if TYPE_CHECKING:
    from collections.abc import Collection

MOST_PATHS = 3
_HIGHEST = 6
"""The depth of nested containers that are looked through."""
_CONTAINERS = (list, tuple, set, frozenset, dict, deque)


def holders_of(addresses: Collection[int]) -> tuple[str, ...]:
    """Return what keeps the tensors whose memory lies at ``addresses`` alive: ``"Net.seen[...]"``.

    Returns:
        At most `MOST_PATHS` paths, that of the most tensors first. None for memory that only a graph of gradients holds.
    """
    import torch

    if not addresses:
        return ()
    with everything_in_sight():
        tensors = [tensor for tensor in alive(torch.Tensor) if _address(tensor) in addresses]
        held = _held(tensors)
        tensors.clear()
        counts = Counter(_Search(tensors, held).paths_of(held).values())
        held.clear()
    ranked = sorted(counts, key=lambda path: (-counts[path], path))
    return tuple(ranked[:MOST_PATHS])


def _held(tensors: list[Any]) -> list[Any]:
    """Return those of ``tensors`` that an object refers to: of a graph's tensors it is mostly none.

    Python goes through all objects to find the referrers of one, or of any of many, which is faster than one after another.
    """
    referred = {
        id(one) for holder in gc.get_referrers(*tensors) if holder is not tensors for one in gc.get_referents(holder)
    }
    return [tensor for tensor in tensors if id(tensor) in referred]


def _address(tensor: Any) -> int | None:
    storage = storage_of(tensor)
    return None if storage is None else storage.data_ptr()


class _Search:
    """Search from objects up to holders with a name. ``ours`` are lists of the caller that refer to them.

    Python goes through all objects to find the referrers of one, in much less time than for each of many after another: so
    each level is searched for all at once.
    """

    def __init__(self, *ours: list[Any]) -> None:
        self._ours: list[Any] = [*ours]
        """Containers of this search. They are kept: another object must not get the id of one."""

    def paths_of(self, values: list[Any], height: int = 0) -> dict[int, str]:
        """Return the path to each value, by the value's id. Values without a named holder are left out."""
        if not values or height > _HIGHEST:
            return {}
        holders = self._holders(values)
        found = self._names(values, holders)
        within = {
            number: [one for one in ones if issubclass(type(one), _CONTAINERS)]
            for number, ones in holders.items()
            if number not in found
        }
        containers = list({id(one): one for ones in within.values() for one in ones}.values())
        self._ours += within.values()
        above = self.paths_of(containers, height + 1)
        for number, ones in within.items():
            path = next((above[id(one)] for one in ones if id(one) in above), None)
            if path is not None:
                found[number] = path if path.endswith("[...]") else f"{path}[...]"
        return found

    def _holders(self, values: list[Any]) -> dict[int, list[Any]]:
        """Return the objects that refer to each of the values, by the value's id."""
        self._ours.append(values)
        ours = {id(self._ours), *map(id, self._ours)}
        found: dict[int, list[Any]] = {id(value): [] for value in values}
        # Without values, all objects would be searched in vain.
        for holder in gc.get_referrers(*values) if values else ():
            if id(holder) not in ours and not _is_excluded(holder):
                for number in {id(referent) for referent in gc.get_referents(holder)} & found.keys():
                    found[number].append(holder)
        self._ours += found.values()
        return found

    def _names(self, values: list[Any], holders: dict[int, list[Any]]) -> dict[int, str]:
        """Return the name that the first holder with one gives to each value, by the value's id."""
        every = {id(one): one for ones in holders.values() for one in ones}
        self._ours.append(every)
        variables = self._variables([one for one in every.values() if type(one) is types.CellType])
        of_names = {
            id(one) for value in values for one in holders[id(value)] if type(one) is dict and _key_of(one, value)
        }
        owners = self._owners([every[number] for number in of_names])
        found: dict[int, str] = {}
        for value in values:
            names = (_name(value, one, variables, owners) for one in holders[id(value)])
            name = next((name for name in names if name is not None), None)
            if name is not None:
                found[id(value)] = name
        return found

    def _owners(self, namespaces: list[Any]) -> dict[int, str]:
        """Return the module, class or object that each dict of names belongs to, by the id of the dict, where there is one."""
        found: dict[int, str] = {}
        for namespace in namespaces:
            name = dict.get(namespace, "__name__")
            if type(name) is str and dict.__contains__(namespace, "__builtins__"):
                found[id(namespace)] = name  # a module, also one that is not in sys.modules
        self._ours.append(namespaces)
        for number, ones in self._holders(
            [namespace for namespace in namespaces if id(namespace) not in found]
        ).items():
            for one in ones:
                if not issubclass(type(one), _CONTAINERS) and id(instance_dict(one)) == number:
                    found.setdefault(number, class_name(type(one)))
        return found

    def _variables(self, cells: list[Any]) -> dict[int, str]:
        """Return the variable of each closure cell, with its function, by the cell's id."""
        found: dict[int, str] = {}
        closures = self._holders(cells)
        tuples = list({id(one): one for ones in closures.values() for one in ones if type(one) is tuple}.values())
        functions = self._holders(tuples)
        for cell in cells:
            for closure in closures[id(cell)]:
                index = [one is cell for one in closure].index(True) if type(closure) is tuple else -1
                for function in functions.get(id(closure), ()):
                    if type(function) is types.FunctionType and function.__closure__ is closure:
                        found.setdefault(
                            id(cell), f"{_outer(function)}.<locals>.{function.__code__.co_freevars[index]}"
                        )
        return found


def _name(value: object, holder: Any, variables: dict[int, str], owners: dict[int, str]) -> str | None:
    """Return the name that a holder gives to a value; ``None`` where it has none."""
    if type(holder) is dict:
        key = _key_of(holder, value)
        return f"{owners[id(holder)]}.{key}" if key is not None and id(holder) in owners else None
    return variables.get(id(holder)) or _attribute(holder, value)


def _attribute(holder: object, value: object) -> str | None:
    """Return the name of an attribute of ``holder`` that lies in the object itself, without a dict."""
    if issubclass(type(holder), (*_CONTAINERS, type, types.FunctionType, types.ModuleType, types.CellType)):
        return None
    attributes = instance_dict(holder)
    key = None if attributes is None else _key_of(attributes, value)
    return None if key is None else f"{class_name(type(holder))}.{key}"


def _is_excluded(holder: object) -> bool:
    """Return whether a holder is a running frame, or pytest's or ours."""
    return type(holder) is types.FrameType or package_of(type(holder)) in NOT_THE_TESTS


def _key_of(names: dict[Any, Any], value: object) -> str | None:
    return next((key for key, one in dict.items(names) if one is value and type(key) is str), None)


def _outer(function: types.FunctionType) -> str:
    """Return the function that a closure's variables are of."""
    outer, _, inner = function.__qualname__.rpartition(".<locals>.")
    return outer or inner
