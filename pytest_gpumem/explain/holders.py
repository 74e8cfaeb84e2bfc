"""Holders of tensors: the module, class, function or object in use that keeps each of them alive, and by which attributes."""

from __future__ import annotations

import gc
import inspect
import itertools
import logging
import sys
import threading
import types
from collections import Counter, deque
from dataclasses import dataclass, replace
from enum import IntEnum
from typing import TYPE_CHECKING, Any

from pytest_gpumem.explain.holder_names import (
    LRU_CACHE,
    class_text,
    code_name,
    context_variable_text,
    function_text,
    is_excluded,
    is_ours,
    lru_cache_text,
    module_name,
    module_text,
    names_of_defaults,
)
from pytest_gpumem.torch_support.garbage_collector import everything_in_sight
from pytest_gpumem.torch_support.graphs import graphs_that_save
from pytest_gpumem.torch_support.private_api import MODULE_PARTS
from pytest_gpumem.torch_support.reachability import address_of, alive, blocks_of
from pytest_gpumem.torch_support.static_access import (
    class_name,
    class_namespace,
    gradient_of,
    instance_dict,
    layout_of,
    module_of,
    named_variables_of,
    package_of,
)

if TYPE_CHECKING:
    from collections.abc import Collection, Iterator, Mapping, Sequence

MOST_TENSORS = 200
"""Blocks that are looked at. To find the referrers of 256 objects takes 0.4 s beside 390,000 others, and of one 0.06 s."""
NO_OBJECT = "no object of Python's (C++ code keeps it, say)"
"""The holder of a block that no object refers to among those that Python's collector goes through."""
GRAPH = "autograd graph"
GRADIENT = "gradient"
MOST_AT_ONCE = 200
"""Objects whose referrers are looked for at each height."""
HIGHEST = 16
"""References that are followed from a tensor: accelerate's state is 7 above the tensors of a prepared `DataLoader`."""
_LONGEST = 3
"""Parts of a path that are all shown; of more, the first and the last one."""
_CONTAINERS = (list, tuple, set, frozenset, dict, deque)
_SEEN_THROUGH = ("builtins", "functools", "itertools", "operator", "weakref", "collections")
"""Packages of classes whose attributes tell nothing: methods, iterators, `functools.partial`, `weakref.WeakKeyDictionary`."""
_OF_CONTAINERS = ("weakref", "collections")
"""Those of which an object's attributes are elements of a container, for whoever uses it."""


def holders_of(blocks: Mapping[int, int]) -> dict[int, str]:
    """Return the holder of each block: what keeps its memory alive.

    Example:
        ``{0x7f00: "Net.seen[...]", 0x9f00: "the autograd graph of losses[...]"}``

    Args:
        blocks: The size of each block in bytes, by address.

    Returns:
        The path to each block, by address. The path is empty if no holder was found. Of more than `MOST_TENSORS` blocks some
        are looked at. The others have the path of the blocks of their size, if those have the same path.
    """
    if not blocks:
        return {}
    looked_at = _some_of(blocks)
    with everything_in_sight():
        paths = _paths_to(_tensors_at(looked_at), looked_at)
        lost = _without_holder(paths)
        if lost:
            for by, owners in ((GRAPH, graphs_that_save(lost)), (GRADIENT, _leaves_with_gradient_at(lost))):
                for address, of_owners in _paths_to(owners, lost).items():
                    paths[address] += (replace(path, by=by) for path in of_owners)
        lost = _without_holder(paths)
        if lost and "numpy" in sys.modules:
            arrays = _arrays_on({address: blocks[address] for address in lost})
            for address, of_arrays in _paths_to(arrays, lost).items():
                paths[address] += of_arrays
    texts = {address: _text_of(of_block) for address, of_block in paths.items()}
    return texts | _of_same_size(texts, blocks)


def _without_holder(paths: Mapping[int, Sequence[_Path]]) -> set[int]:
    return {address for address, some in paths.items() if all(path.kind >= _Kind.NOWHERE for path in some)}


def _paths_to(owners: dict[int, list[Any]], addresses: Collection[int]) -> dict[int, list[_Path]]:
    """Return the paths to the ``owners`` of each block, which are emptied: nothing refers to these objects afterwards."""
    search = _Search()
    places = {address: [search.add(owner) for owner in its_owners] for address, its_owners in owners.items()}
    for its_owners in owners.values():
        its_owners.clear()
    # First one tensor of each block: most blocks have a single tensor, and a few have hundreds of views.
    in_order = itertools.chain.from_iterable(itertools.zip_longest(*places.values()))
    first = list(dict.fromkeys(place for place in in_order if place is not None))[:MOST_AT_ONCE]
    paths = search.paths_of(first)
    return {
        address: [paths.get(place, _Path(_Kind.NOWHERE)) for place in places.get(address, ()) if place in first]
        for address in addresses
    }


def _some_of(blocks: Mapping[int, int]) -> set[int]:
    """Return the addresses of the blocks that are looked at: the largest, and some of the others, evenly among their sizes."""
    by_size = sorted(blocks, key=lambda address: (-blocks[address], address))
    largest, others = by_size[: MOST_TENSORS // 2], by_size[MOST_TENSORS // 2 :]
    return {*largest, *others[:: -(-len(others) // (MOST_TENSORS // 2)) or 1]}


def _of_same_size(texts: Mapping[int, str], blocks: Mapping[int, int]) -> dict[int, str]:
    """Return the paths to the blocks that were not looked at, as far as all blocks of their size have one path."""
    of_size: dict[int, set[str]] = {}
    for address, text in texts.items():
        of_size.setdefault(blocks[address], set()).add(text)
    others = {address: of_size.get(nbytes, set()) for address, nbytes in blocks.items() if address not in texts}
    return {address: next(iter(paths)) if len(paths) == 1 else "" for address, paths in others.items()}


def _tensors_at(addresses: Collection[int]) -> dict[int, list[Any]]:
    """Return the tensors and storages whose memory lies at some addresses, by address."""
    import torch

    by_address: dict[int, list[Any]] = {}
    for tensor in alive(torch.Tensor):
        for address in blocks_of([tensor]).keys() & addresses:
            by_address.setdefault(address, []).append(tensor)
    for storage in alive(torch.UntypedStorage):
        where = address_of(storage)
        if where is not None and where in addresses:
            by_address.setdefault(where, []).append(storage)
    return by_address


def _leaves_with_gradient_at(addresses: Collection[int]) -> dict[int, list[Any]]:
    """Return the leaves whose gradients lie at some addresses: a gradient that nobody has read is no object of Python's."""
    import torch

    by_address: dict[int, list[Any]] = {}
    for tensor in alive(torch.Tensor):
        gradient = gradient_of(tensor)
        for address in () if gradient is None else blocks_of([gradient]).keys() & addresses:
            by_address.setdefault(address, []).append(tensor)
    return by_address


def _arrays_on(blocks: Mapping[int, int]) -> dict[int, list[Any]]:
    """Return NumPy's arrays on the memory of blocks, by the address of the block.

    Python's collector does not go through arrays, so each is looked for among what an object refers to.
    """
    import numpy

    arrays = {
        id(referent): referent
        for holder in gc.get_objects()
        for referent in gc.get_referents(holder)
        if issubclass(type(referent), numpy.ndarray)
    }
    by_address: dict[int, list[Any]] = {}
    interface: Any = numpy.ndarray.__dict__["__array_interface__"]
    for array in arrays.values():
        begin, _ = interface.__get__(array)["data"]
        for address, nbytes in blocks.items():
            if address <= begin < address + nbytes:
                by_address.setdefault(address, []).append(array)
    return by_address


def _text_of(paths: Sequence[_Path]) -> str:
    """Return the text for a block that is at the end of each of some paths."""
    if all(path.kind is _Kind.NO_REFERRER for path in paths):
        return NO_OBJECT
    best = min(paths, key=lambda path: path.rank(is_object=True))
    if best.kind is _Kind.TOO_FAR:
        return f"something more than {HIGHEST} references away"
    text = best.text()
    if best.by:
        return f"the {best.by} of {text}" if text else f"a tensor's {best.by}"
    return text


class _Kind(IntEnum):
    """The way in which a path begins."""

    ROOT = 0
    """At a module, a class or a function."""
    IN_USE = 1
    """At an object that the running test, a fixture or the step that is measured has."""
    VARIABLE = 2
    """At a variable of a function that runs."""
    NOWHERE = 3
    """At an object that nothing with a name holds."""
    TOO_FAR = 4
    NO_REFERRER = 5
    """At a tensor that no object refers to."""


@dataclass(frozen=True, slots=True)
class _Path:
    """The path to an object: ``("Cache.entries[...]", "Loader.batch")``.

    An object's own dict has the path of the object, with what tells the names in it.
    """

    kind: _Kind
    parts: tuple[str, ...] = ()
    before: str | None = None
    """Text before the name of what an object's own dict holds: ``"Net."``; ``None`` for what is no such dict."""
    after: str = ""
    of_module: bool = False
    """True for the own dict of a `torch.nn.Module`."""
    within: bool = False
    """True for the dict of a module's children, which have the path of the module, and for that of the own dicts that a
    `threading.local` has, one for each thread."""
    names: tuple[str, ...] = ()
    """Texts for the elements of a tuple that belongs to a function."""
    by: str = ""
    """`GRAPH` or `GRADIENT` for a block that is not the memory of the tensor at the end of the path."""

    def rank(self, *, is_object: bool) -> tuple[object, ...]:
        """Return a sort key: the shortest path comes first, whatever the order of objects in memory is."""
        lost = self.kind >= _Kind.VARIABLE
        # An object is told by its class; a container only by where it was found.
        silent = not is_object and not (self.parts or self.before or self.names)
        length = self.kind if lost else 0, len(self.parts) + (self.before is not None or bool(self.names))
        return lost, silent, length, self.kind, sum(map(len, self.parts)), self.parts, self.before or "", self.names

    def itself(self) -> _Path:
        return _Path(self.kind, self.parts)

    def item(self) -> _Path:
        """Return the path to an element of what this one leads to."""
        if not self.parts or self.parts[-1].endswith("[...]"):
            return self.itself()
        return _Path(self.kind, (*self.parts[:-1], f"{self.parts[-1]}[...]"))

    def named(self, name: str) -> _Path:
        """Return the path to what an object's own dict, which this one leads to, has under ``name``."""
        if self.of_module and name == MODULE_PARTS["modules"]:
            return _Path(self.kind, self.parts, within=True)
        if self.of_module and name in MODULE_PARTS.values():
            return _Path(self.kind, self.parts, before=self.before)
        return _Path(self.kind, (*self.parts, f"{self.before}{name}{self.after}"))

    def attributes(self, owner: object) -> _Path:
        """Return the path to the own dict of an object that this one leads to."""
        import torch

        kind = type(owner)
        return _Path(self.kind, self.parts, f"{class_name(kind)}.", of_module=issubclass(kind, torch.nn.Module))

    def text(self) -> str:
        shown = self.parts if len(self.parts) <= _LONGEST else (self.parts[0], "...", self.parts[-1])
        return " -> ".join(shown)


class _Search:
    """Search from objects up to holders with a name, for all objects of one height at once.

    Python goes through all objects to find the referrers of one, in much less time than for each of many after another.
    Objects are known by their place in one list, so that a search finds no containers of its own.
    """

    def __init__(self) -> None:
        self._objects: list[Any] = []
        self._places: dict[int, int] = {}
        self._in_use = _variables_in_use()

    def add(self, one: object) -> int:
        """Return the place of an object."""
        place = self._places.setdefault(id(one), len(self._objects))
        if place == len(self._objects):
            self._objects.append(one)
        return place

    def paths_of(self, places: Sequence[int], height: int = 0) -> dict[int, _Path]:
        """Return the path to the object at each place. Those without a named holder are left out.

        Args:
            places: Places of objects, the most important first.
            height: The number of references from a tensor to them.
        """
        looked_at = places[:MOST_AT_ONCE] if height < HIGHEST else []
        references = self._references(looked_at)
        found: dict[int, list[_Path]] = {place: [] for place in looked_at}
        found |= {place: [_Path(_Kind.TOO_FAR)] for place in places[len(looked_at) :]}
        if not height:
            found |= {place: [_Path(_Kind.NO_REFERRER)] for place in {*looked_at} - {place for place, _ in references}}
        above: dict[int, list[int]] = {}
        for place, holder in references:
            path = self._end(place, holder, height)
            if path is not None:
                found[place].append(path)
            elif not _is_passed_over(self._objects[holder], self._objects[place]):
                above.setdefault(place, []).append(holder)
        for place in places:
            found[place] += self._beginning_at(place, height)
        open_ended = [place for place in above if not any(self._is_enough(path, place) for path in found[place])]
        wanted = Counter(holder for place in open_ended for holder in above[place])
        if wanted:
            paths = self.paths_of(sorted(wanted, key=lambda one: (-wanted[one], one)), height + 1)
            for place in open_ended:
                for holder in above[place]:
                    if holder in paths:
                        found[place] += self._below(paths[holder], holder, place)
        return {place: self._best(place, paths, height) for place, paths in found.items() if paths}

    def _beginning_at(self, place: int, height: int) -> list[_Path]:
        """Return the path that begins at an object, or at the variable of a running function that has a container or tensor."""
        variable = self._in_use.get(id(self._objects[place]))
        if height and self._is_object(place):
            return [_Path(_Kind.NOWHERE if variable is None else _Kind.IN_USE)]
        return [_Path(_Kind.VARIABLE, (variable,))] if variable else []

    def _best(self, place: int, paths: list[_Path], height: int) -> _Path:
        is_object = height > 0 and self._is_object(place)
        return min(paths, key=lambda path: path.rank(is_object=is_object))

    def _is_enough(self, path: _Path, place: int) -> bool:
        return path.kind is _Kind.ROOT or (path.kind is _Kind.IN_USE and self._is_object(place))

    def _is_object(self, place: int) -> bool:
        """Return whether the object at a place is told by its class and attribute: no container and no part of Python."""
        kind = type(self._objects[place])
        return not issubclass(kind, _CONTAINERS) and package_of(kind) not in _SEEN_THROUGH

    def _references(self, places: Sequence[int]) -> list[tuple[int, int]]:
        """Return the places of objects, each with that of an object that refers to it."""
        if not places:  # then all objects would be searched in vain
            return []
        # A tuple, which is given as it is: one that Python makes of a list is among the referrers from 3.14 on.
        objects = tuple(self._objects[place] for place in places)
        wanted = {id(one): place for one, place in zip(objects, places, strict=True)}
        not_holders = {id(self._objects), id(objects)}
        holders = [one for one in gc.get_referrers(*objects) if id(one) not in not_holders]
        del objects
        found = [
            (wanted[number], self.add(holder))
            for holder in holders
            for number in {id(one) for one in gc.get_referents(holder)} & wanted.keys()
        ]
        holders.clear()
        return found

    def _end(self, place: int, holder: int, height: int) -> _Path | None:
        """Return the path to an object where it ends at its holder; ``None`` where that is held by something itself."""
        value, one = self._objects[place], self._objects[holder]
        if type(one) is types.FunctionType:
            return None if is_ours(one) else _path_in_function(one, value)
        if type(one) is LRU_CACHE:
            text = lru_cache_text(one)
            return None if text is None else _Path(_Kind.ROOT, (f"{text}[...]",))
        variable = context_variable_text(one, value)
        if variable is not None:
            return _Path(_Kind.ROOT, (variable,))
        if issubclass(type(one), type):
            return _Path(_Kind.ROOT, before=f"{class_text(one)}.") if class_namespace(one) is value else None
        module = module_name(one)
        if module is not None:
            key = None if is_excluded(module) else _key_of(one, value)
            return None if key is None else _Path(_Kind.ROOT, (f"{module_text(one, module)}.{key}",))
        is_pytests = is_excluded(module_of(type(one))) and not issubclass(type(one), logging.LogRecord)
        return _Path(_Kind.IN_USE) if height and is_pytests else None

    def _below(self, path: _Path, holder: int, place: int) -> list[_Path]:
        """Return the paths to an object by way of its holder, to which there is a path."""
        one, value = self._objects[holder], self._objects[place]
        if path.within:
            return [replace(path, within=False)]
        if path.names:
            return [path.named(name) for name, held in zip(path.names, one, strict=False) if held is value]
        if path.before is not None:
            key = _key_of(one, value)
            return [path.item() if key is None else path.named(key)]
        if issubclass(type(one), _CONTAINERS) or package_of(type(one)) in _OF_CONTAINERS:
            return [path.item()]
        return [_by_attribute(path, one, value)] if self._is_object(holder) else [path.itself()]


def _by_attribute(path: _Path, owner: object, value: object) -> _Path:
    """Return the path to what an object with a path holds by an attribute, or in its own dict."""
    own, attributes = instance_dict(owner), path.attributes(owner)
    if issubclass(type(owner), threading.local) and type(value) is dict:
        return replace(attributes, within=True)
    if own is value:
        return attributes
    key = None if own is None else _key_of(own, value)
    if key is None:
        key = next((one.__name__ for one in layout_of(type(owner)).members if _slot(one, owner) is value), None)
    return path.itself() if key is None else attributes.named(key)


def _path_in_function(function: types.FunctionType, value: object) -> _Path | None:
    """Return the path to what a function holds: its closure, defaults and attributes."""
    if value is function.__closure__:
        around = function_text(function, outer=True)
        names = tuple(f"{around}.<locals>.{name}" for name in function.__code__.co_freevars)
        return _Path(_Kind.ROOT, before="", names=names)
    text = function_text(function)
    if value is function.__defaults__:
        return _Path(_Kind.ROOT, before="", names=tuple(f"{text}({name}=...)" for name in names_of_defaults(function)))
    if value is function.__kwdefaults__:
        return _Path(_Kind.ROOT, before=f"{text}(", after="=...)")
    return _Path(_Kind.ROOT, before=f"{text}.") if value is instance_dict(function) else None


def _is_passed_over(holder: object, value: object) -> bool:
    """Return whether what holds a holder of a value does not matter.

    That is a running frame, what has been seen to be an end, or pytest's. The attributes of this package's functions are
    copies: `functools.wraps` takes them from the function that each stands for.
    """
    kind = type(holder)
    if kind is types.FrameType:
        # One that has ended is kept by the traceback of an exception, with its variables.
        return any(frame is holder for frame in _running())
    return (
        kind in (types.ModuleType, LRU_CACHE)
        or (kind is types.FunctionType and (not is_ours(holder) or value is instance_dict(holder)))
        or issubclass(kind, type)
        or module_name(holder) is not None
        or (is_excluded(module_of(kind)) and not issubclass(kind, logging.LogRecord))
    )


def _variables_in_use() -> dict[int, str]:
    """Return the variables of running functions, ``"test_it.<locals>.out"``, by the id of the value.

    The text is empty for functions of pytest and of this package.
    """
    variables: dict[int, str] = {}
    for frame in _running():
        if frame.f_code.co_flags & inspect.CO_OPTIMIZED:
            around = "" if is_excluded(str(frame.f_globals.get("__name__"))) else code_name(frame.f_code)
            for name, value in named_variables_of(frame).items():
                variables[id(value)] = variables.get(id(value)) or (around and f"{around}.<locals>.{name}")
            value = None
        del frame  # this function's own one would be a cycle, with all the frames that called it
    return variables


def _running() -> Iterator[types.FrameType]:
    """Yield the frames of the functions that run, in all threads."""
    frames = [*sys._current_frames().values()]  # noqa: SLF001 - the only way to other threads' frames
    while frames:
        frame = frames.pop()
        if frame.f_back is not None:
            frames.append(frame.f_back)
        yield frame
        del frame


def _slot(member: types.MemberDescriptorType, owner: object) -> object:
    try:
        return member.__get__(owner)
    except AttributeError:  # an empty slot
        return None


def _key_of(names: dict[Any, Any], value: object) -> str | None:
    return next((key for key, one in dict.items(names) if one is value and type(key) is str), None)
