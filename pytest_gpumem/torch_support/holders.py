"""Find the holders of tensors, and the attributes on the path from each holder to the tensor.

A holder keeps a tensor alive. It is a module, a class, a function, or an object used by the running test.
"""

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

from pytest_gpumem.torch_support.garbage_collector import everything_in_sight
from pytest_gpumem.torch_support.graphs import graphs_that_save
from pytest_gpumem.torch_support.holder_names import (
    LRU_CACHE,
    class_text,
    code_name,
    context_variable_text,
    function_text,
    is_excluded,
    is_own_function,
    lru_cache_text,
    module_name,
    module_text,
    names_of_defaults,
)
from pytest_gpumem.torch_support.private_api.attributes import MODULE_PARTS
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
"""At most so many blocks are examined. In a process with 390,000 objects, a search for 256 objects' referrers takes
0.4 s, and a search for a single object's referrers takes 0.06 s."""
NO_OBJECT = "no Python object (perhaps C++ code keeps it)"
"""The text to show instead of a holder, if no object known to Python's collector refers to the block."""
GRAPH = "autograd graph"
GRADIENT = "gradient"
MOST_AT_ONCE = 200
"""At each height, referrers are searched for at most so many objects. `_Search` explains heights."""
HIGHEST = 16
"""At most so many references are followed upwards from a tensor. For example, accelerate's state is 7 references above the
tensors in a prepared `DataLoader`."""
_LONGEST = 3
"""At most so many parts are displayed in a path. A longer path is shown by its first and last part."""
_CONTAINERS = (list, tuple, set, frozenset, dict, deque)
_SEEN_THROUGH = ("builtins", "functools", "itertools", "operator", "weakref", "collections")
"""Packages whose classes are left out of a path: methods, iterators, `functools.partial`, `weakref.WeakKeyDictionary` and
others. A user does not know the attributes in these classes."""
_OF_CONTAINERS = ("weakref", "collections")
"""Packages with container classes. Values in a container's attributes are shown as the container's elements."""


def holders_of(blocks: Mapping[int, int], *, with_container: bool = False) -> dict[int, str]:
    """Find the holder that keeps each block alive, and return the paths to these holders.

    Example:
        ``{0x7f00: "Net.seen[...]", 0x9f00: "the autograd graph of losses[...]"}``

    Args:
        blocks: Each block's size in bytes, by address.
        with_container: If an attribute and a container hold a block, return both paths: ``Net.last, and Net.seen[...]``.
            Without earlier runs nobody knows which of them grows.

    Returns:
        The paths by address. A path is empty if no holder was found. Only `MOST_TENSORS` blocks are examined. Another block
        gets the same path as all examined blocks with its size, if these agree.
    """
    if not blocks:
        return {}
    sample = _sample_of(blocks)
    with everything_in_sight():
        paths = _paths_to(_tensors_at(sample), sample, with_container=with_container)
        lost = _without_holder(paths)
        if lost:
            for by, owners in ((GRAPH, graphs_that_save(lost)), (GRADIENT, _leaves_with_gradient_at(lost))):
                for address, owner_paths in _paths_to(owners, lost).items():
                    paths[address] += (replace(path, by=by) for path in owner_paths)
        lost = _without_holder(paths)
        if lost and "numpy" in sys.modules:
            arrays = _arrays_on({address: blocks[address] for address in lost})
            for address, array_paths in _paths_to(arrays, lost).items():
                paths[address] += array_paths
    texts = {address: _text_of(block_paths) for address, block_paths in paths.items()}
    return texts | _of_same_size(texts, blocks)


def _without_holder(paths: Mapping[int, Sequence[_Path]]) -> set[int]:
    return {
        address for address, block_paths in paths.items() if all(path.kind >= _Kind.NOWHERE for path in block_paths)
    }


def _paths_to(
    owners: dict[int, list[Any]], addresses: Collection[int], *, with_container: bool = False
) -> dict[int, list[_Path]]:
    """Return the paths to each block's ``owners``, and empty the lists in ``owners``, which would keep the owners alive."""
    search = _Search(with_container=with_container)
    places = {address: [search.add(owner) for owner in block_owners] for address, block_owners in owners.items()}
    for block_owners in owners.values():
        block_owners.clear()
    # The search begins with a single tensor from each block, because some blocks have hundreds of views.
    in_order = itertools.chain.from_iterable(itertools.zip_longest(*places.values()))
    first = list(dict.fromkeys(place for place in in_order if place is not None))[:MOST_AT_ONCE]
    paths = search.paths_of(first)
    return {
        address: [paths.get(place, _Path(_Kind.NOWHERE)) for place in places.get(address, ()) if place in first]
        for address in addresses
    }


def _sample_of(blocks: Mapping[int, int]) -> set[int]:
    """Return the addresses to examine: the largest blocks, and an even selection from the smaller blocks."""
    by_size = sorted(blocks, key=lambda address: (-blocks[address], address))
    largest, smaller = by_size[: MOST_TENSORS // 2], by_size[MOST_TENSORS // 2 :]
    return {*largest, *smaller[:: -(-len(smaller) // (MOST_TENSORS // 2)) or 1]}


def _of_same_size(texts: Mapping[int, str], blocks: Mapping[int, int]) -> dict[int, str]:
    """Return the paths for the unexamined blocks: for each, the path of the examined blocks with the same size.

    A path is empty unless all these examined blocks have the same path.
    """
    texts_by_size: dict[int, set[str]] = {}
    for address, text in texts.items():
        texts_by_size.setdefault(blocks[address], set()).add(text)
    candidates = {
        address: texts_by_size.get(nbytes, set()) for address, nbytes in blocks.items() if address not in texts
    }
    return {address: next(iter(paths)) if len(paths) == 1 else "" for address, paths in candidates.items()}


def _tensors_at(addresses: Collection[int]) -> dict[int, list[Any]]:
    """Return the tensors and storages with memory at ``addresses``, by address."""
    import torch

    by_address: dict[int, list[Any]] = {}
    for tensor in alive(torch.Tensor):
        for address in blocks_of([tensor]).keys() & addresses:
            by_address.setdefault(address, []).append(tensor)
    for storage in alive(torch.UntypedStorage):
        storage_address = address_of(storage)
        if storage_address is not None and storage_address in addresses:
            by_address.setdefault(storage_address, []).append(storage)
    return by_address


def _leaves_with_gradient_at(addresses: Collection[int]) -> dict[int, list[Any]]:
    """Return the leaf tensors whose gradients are at ``addresses``. A gradient is no Python object until code reads it."""
    import torch

    by_address: dict[int, list[Any]] = {}
    for tensor in alive(torch.Tensor):
        gradient = gradient_of(tensor)
        for address in () if gradient is None else blocks_of([gradient]).keys() & addresses:
            by_address.setdefault(address, []).append(tensor)
    return by_address


def _arrays_on(blocks: Mapping[int, int]) -> dict[int, list[Any]]:
    """Return the NumPy arrays in the blocks' memory, by block address.

    Python's collector does not track arrays, so this function searches among all tracked objects' referents.
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
    """Return the best path's text."""
    if all(path.kind is _Kind.NO_REFERRER for path in paths):
        return NO_OBJECT
    best = min(paths, key=lambda path: path.rank(is_object=True))
    if best.kind is _Kind.TOO_FAR:
        return f"an object more than {HIGHEST} references away, or a reference cycle"
    text = best.text()
    if best.by:
        return f"the {best.by} of {text}" if text else f"a tensor's {best.by}"
    return text


class _Kind(IntEnum):
    """The kind of object with which a path begins."""

    ROOT = 0
    """A module, a class or a function."""
    IN_USE = 1
    """An object used by the running test, a fixture or the measured step."""
    VARIABLE = 2
    """A local variable in a running function."""
    NOWHERE = 3
    """An object for which the search found no holder with a name."""
    TOO_FAR = 4
    """An object more than `HIGHEST` references away from the tensor."""
    NO_REFERRER = 5
    """A tensor to which no known object refers."""


@dataclass(frozen=True, slots=True)
class _Path:
    """The path from a holder to an object.

    An instance dict (``__dict__``) adds no part to the path of its object. Instead, ``before`` and
    ``after`` are the texts around an attribute's name.

    Example:
        The class ``Cache`` has a dict ``entries``. The dict contains a loader, whose attribute ``batch`` is a tensor. The
        tensor's path has the parts ``("Cache.entries[...]", "Loader.batch")``. The path to the loader's instance dict has the
        parts ``("Cache.entries[...]",)``, and ``before`` is ``"Loader."``.
    """

    kind: _Kind
    parts: tuple[str, ...] = ()
    before: str | None = None
    """The text before an attribute's name, for example ``"Net."``. ``None`` if the path does not lead to an instance dict."""
    after: str = ""
    """The text after an attribute's name, for example ``"=...)"``."""
    of_module: bool = False
    """True for the instance dict of a `torch.nn.Module`."""
    within: bool = False
    """True for a dict that adds nothing to the path: the dict of a module's children, or the dict in which a `threading.local`
    keeps an instance dict for each thread."""
    names: tuple[str, ...] = ()
    """Texts for the elements in a function's closure or defaults, which are tuples."""
    by: str = ""
    """`GRAPH` or `GRADIENT` if the path leads to a tensor whose autograd graph or gradient is in the block."""
    also: str = ""
    """The path through a container that holds the block as well."""

    def rank(self, *, is_object: bool) -> tuple[object, ...]:
        """Return a sort key. The best path, usually the shortest, comes first. The objects' order in memory does not matter."""
        is_lost = self.kind >= _Kind.VARIABLE
        # If a path has no text, an object can still be shown by its class, but a container's class says nothing.
        is_silent = not is_object and not (self.parts or self.before or self.names)
        length = self.kind if is_lost else 0, len(self.parts) + (self.before is not None or bool(self.names))
        return (
            is_lost,
            is_silent,
            length,
            self.kind,
            sum(map(len, self.parts)),
            self.parts,
            self.before or "",
            self.names,
        )

    def itself(self) -> _Path:
        return _Path(self.kind, self.parts)

    def item(self) -> _Path:
        """Return the path to an element of the container to which this path leads."""
        if not self.parts or self.parts[-1].endswith("[...]"):
            return self.itself()
        return _Path(self.kind, (*self.parts[:-1], f"{self.parts[-1]}[...]"))

    def named(self, name: str) -> _Path:
        """Return the path to the attribute ``name``. This path must lead to an instance dict."""
        if self.of_module and name == MODULE_PARTS["modules"]:
            return _Path(self.kind, self.parts, within=True)
        if self.of_module and name in MODULE_PARTS.values():
            return _Path(self.kind, self.parts, before=self.before)
        return _Path(self.kind, (*self.parts, f"{self.before}{name}{self.after}"))

    def attributes(self, owner: object) -> _Path:
        """Return the path to the instance dict of ``owner``. This path must lead to ``owner``."""
        import torch

        kind = type(owner)
        return _Path(self.kind, self.parts, f"{class_name(kind)}.", of_module=issubclass(kind, torch.nn.Module))

    def text(self) -> str:
        shown = self.parts if len(self.parts) <= _LONGEST else (self.parts[0], "...", self.parts[-1])
        return " -> ".join(shown) + (f", and {self.also}" if self.also else "")

    @property
    def in_container(self) -> bool:
        return self.kind < _Kind.VARIABLE and any(part.endswith("[...]") for part in self.parts)


class _Search:
    """Searches upwards from tensors: from each object to its referrers, until a holder with a name is reached.

    An object's height is the number of references from the object down to a tensor. To find referrers, Python walks through all
    objects. A single walk for many objects takes much less time than a walk for each object. So all objects with the
    same height are searched together.

    An object is represented by its place, an index into a single list. If the search used more lists or dicts, it would find
    these as referrers.
    """

    def __init__(self, *, with_container: bool = False) -> None:
        self._with_container = with_container
        self._objects: list[Any] = []
        self._places: dict[int, int] = {}
        self._in_use = _variables_in_use()

    def add(self, node: object) -> int:
        """Return an object's place, and add the object if necessary."""
        place = self._places.setdefault(id(node), len(self._objects))
        if place == len(self._objects):
            self._objects.append(node)
        return place

    def paths_of(self, places: Sequence[int], height: int = 0) -> dict[int, _Path]:
        """Return the best path to the object at each place. Objects without a named holder are left out.

        Args:
            places: The objects' places, the most important first.
            height: The number of references from these objects down to a tensor.
        """
        searched = places[:MOST_AT_ONCE] if height < HIGHEST else []
        references = self._references(searched)
        candidates: dict[int, list[_Path]] = {place: [] for place in searched}
        candidates |= {place: [_Path(_Kind.TOO_FAR)] for place in places[len(searched) :]}
        if not height:
            without_referrer = {*searched} - {place for place, _ in references}
            candidates |= {place: [_Path(_Kind.NO_REFERRER)] for place in without_referrer}
        above: dict[int, list[int]] = {}
        for place, holder in references:
            path = self._end(place, holder, height)
            if path is not None:
                candidates[place].append(path)
            elif not _is_passed_over(self._objects[holder], self._objects[place]):
                above.setdefault(place, []).append(holder)
        for place in places:
            candidates[place] += self._beginning_at(place, height)
        all_ways = self._with_container and not height
        open_ended = [
            place for place in above if all_ways or not any(self._is_enough(path, place) for path in candidates[place])
        ]
        holders = Counter(holder for place in open_ended for holder in above[place])
        if holders:
            holder_paths = self.paths_of(sorted(holders, key=lambda holder: (-holders[holder], holder)), height + 1)
            for place in open_ended:
                for holder in above[place]:
                    if holder in holder_paths:
                        candidates[place] += self._below(holder_paths[holder], holder, place)
        return {place: self._best(place, paths, height) for place, paths in candidates.items() if paths}

    def _beginning_at(self, place: int, height: int) -> list[_Path]:
        """Return a path that begins at the object itself. For a container or tensor, the path begins at a local variable."""
        variable = self._in_use.get(id(self._objects[place]))
        if height and self._is_object(place):
            return [_Path(_Kind.NOWHERE if variable is None else _Kind.IN_USE)]
        return [_Path(_Kind.VARIABLE, (variable,))] if variable else []

    def _best(self, place: int, paths: list[_Path], height: int) -> _Path:
        is_object = height > 0 and self._is_object(place)
        in_order = sorted(paths, key=lambda path: path.rank(is_object=is_object))
        best = in_order[0]
        if height or not self._with_container or best.kind >= _Kind.VARIABLE or best.in_container:
            return best
        return replace(best, also=next((path.text() for path in in_order if path.in_container), ""))

    def _is_enough(self, path: _Path, place: int) -> bool:
        return path.kind is _Kind.ROOT or (path.kind is _Kind.IN_USE and self._is_object(place))

    def _is_object(self, place: int) -> bool:
        """Return whether the object's class means something to a user, unlike containers and Python's own classes."""
        kind = type(self._objects[place])
        return not issubclass(kind, _CONTAINERS) and package_of(kind) not in _SEEN_THROUGH

    def _references(self, places: Sequence[int]) -> list[tuple[int, int]]:
        """Return pairs of places: an object's place, and the place of a referrer to this object."""
        if not places:  # gc.get_referrers() would walk through all objects in vain
            return []
        # get_referrers() gets this very tuple. From a list, Python would make another tuple, which 3.14 counts as a referrer.
        objects = tuple(self._objects[place] for place in places)
        place_by_id = {id(target): place for target, place in zip(objects, places, strict=True)}
        not_holders = {id(self._objects), id(objects)}
        holders = [referrer for referrer in gc.get_referrers(*objects) if id(referrer) not in not_holders]
        del objects
        references = [
            (place_by_id[number], self.add(holder))
            for holder in holders
            for number in {id(referent) for referent in gc.get_referents(holder)} & place_by_id.keys()
        ]
        holders.clear()
        return references

    def _end(self, place: int, holder: int, height: int) -> _Path | None:
        """Return the path to an object if the search ends at its holder, or ``None`` if the search continues from there."""
        value, owner = self._objects[place], self._objects[holder]
        if type(owner) is types.FunctionType:
            return None if is_own_function(owner) else _path_in_function(owner, value)
        if type(owner) is LRU_CACHE:
            text = lru_cache_text(owner)
            return None if text is None else _Path(_Kind.ROOT, (f"{text}[...]",))
        variable = context_variable_text(owner, value)
        if variable is not None:
            return _Path(_Kind.ROOT, (variable,))
        if issubclass(type(owner), type):
            return _Path(_Kind.ROOT, before=f"{class_text(owner)}.") if class_namespace(owner) is value else None
        module = module_name(owner)
        if module is not None:
            key = None if is_excluded(module) else _key_of(owner, value)
            return None if key is None else _Path(_Kind.ROOT, (f"{module_text(owner, module)}.{key}",))
        is_pytests = is_excluded(module_of(type(owner))) and not issubclass(type(owner), logging.LogRecord)
        return _Path(_Kind.IN_USE) if height and is_pytests else None

    def _below(self, path: _Path, holder: int, place: int) -> list[_Path]:
        """Return the paths to an object through its holder. ``path`` leads to the holder."""
        owner, value = self._objects[holder], self._objects[place]
        if path.within:
            return [replace(path, within=False)]
        if path.names:
            return [path.named(name) for name, held in zip(path.names, owner, strict=False) if held is value]
        if path.before is not None:
            key = _key_of(owner, value)
            return [path.item() if key is None else path.named(key)]
        if issubclass(type(owner), _CONTAINERS) or package_of(type(owner)) in _OF_CONTAINERS:
            return [path.item()]
        return [_by_attribute(path, owner, value)] if self._is_object(holder) else [path.itself()]


def _by_attribute(path: _Path, owner: object, value: object) -> _Path:
    """Return the path to ``value``, which is an attribute or the instance dict of ``owner``. ``path`` leads to ``owner``."""
    own, attributes = instance_dict(owner), path.attributes(owner)
    if issubclass(type(owner), threading.local) and type(value) is dict:
        return replace(attributes, within=True)
    if own is value:
        return attributes
    key = None if own is None else _key_of(own, value)
    if key is None:
        members = layout_of(type(owner)).members
        key = next((member.__name__ for member in members if _slot(member, owner) is value), None)
    return path.itself() if key is None else attributes.named(key)


def _path_in_function(function: types.FunctionType, value: object) -> _Path | None:
    """Return the path to a function's closure, defaults or instance dict; ``None`` if ``value`` is none of these."""
    if value is function.__closure__:
        outer_function = function_text(function, outer=True)
        names = tuple(f"{outer_function}.<locals>.{name}" for name in function.__code__.co_freevars)
        return _Path(_Kind.ROOT, before="", names=names)
    text = function_text(function)
    if value is function.__defaults__:
        return _Path(_Kind.ROOT, before="", names=tuple(f"{text}({name}=...)" for name in names_of_defaults(function)))
    if value is function.__kwdefaults__:
        return _Path(_Kind.ROOT, before=f"{text}(", after="=...)")
    return _Path(_Kind.ROOT, before=f"{text}.") if value is instance_dict(function) else None


def _is_passed_over(holder: object, value: object) -> bool:
    """Return whether the search ignores a holder, and does not search for the holder's referrers.

    This is true for a running frame, for holders such as modules and classes, at which a path ends, and for pytest's objects.
    A wrapper function in this package is ignored as the holder of its attributes, because `functools.wraps` copies these
    attributes from the user's function.
    """
    kind = type(holder)
    if kind is types.FrameType:
        # A frame that has ended is a real holder, because an exception's traceback keeps the frame and its variables alive.
        return any(frame is holder for frame in _running())
    return (
        kind in (types.ModuleType, LRU_CACHE)
        or (kind is types.FunctionType and (not is_own_function(holder) or value is instance_dict(holder)))
        or issubclass(kind, type)
        or module_name(holder) is not None
        or (is_excluded(module_of(kind)) and not issubclass(kind, logging.LogRecord))
    )


def _variables_in_use() -> dict[int, str]:
    """Return texts for local variables in running functions, for example ``"test_it.<locals>.out"``, by the value's ``id``.

    A text is empty if the function belongs to pytest or to this package.
    """
    variables: dict[int, str] = {}
    for frame in _running():
        if frame.f_code.co_flags & inspect.CO_OPTIMIZED:
            function_name = "" if is_excluded(str(frame.f_globals.get("__name__"))) else code_name(frame.f_code)
            for name, value in named_variables_of(frame).items():
                variables[id(value)] = variables.get(id(value)) or (
                    function_name and f"{function_name}.<locals>.{name}"
                )
            value = None
        del frame  # keeping this frame would create a cycle with all calling frames
    return variables


def _running() -> Iterator[types.FrameType]:
    """Yield all threads' frames."""
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
    # Another thread may change the dict meanwhile, but not while this list of keys is made.
    keys = [*dict.keys(names)]
    return next((key for key in keys if type(key) is str and dict.get(names, key) is value), None)
