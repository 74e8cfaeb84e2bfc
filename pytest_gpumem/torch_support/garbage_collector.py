"""Python's cyclic collector: switched off while measuring, and fast between tests by a frozen heap."""

from __future__ import annotations

import _imp
import gc
import inspect
import sys
import threading
from contextlib import contextmanager, suppress
from types import FrameType
from typing import TYPE_CHECKING, Any, Protocol, cast

if TYPE_CHECKING:
    from collections.abc import Hashable, Iterator, Sequence
    from importlib.abc import Loader
    from importlib.machinery import ModuleSpec
    from types import ModuleType


MOST_YOUNGER = 20_000
"""Objects younger than the frozen heap before it is made anew: each collection goes through all of them, in 5 to 10 ms."""
_OF_PYTHON = 1000
"""More frozen objects than Python begins with, which are 375 in 3.12. Whoever freezes a heap has many thousands."""
_LAST_FAILURE = ("last_type", "last_value", "last_traceback", "last_exc")


class _Allocator(Protocol):
    """The part of a device that a collection needs (`pytest_gpumem.devices.contract.Device`)."""

    def quiesce(self) -> None: ...

    def reserved(self) -> int | None: ...

    @property
    def everywhere(self) -> Sequence[_Allocator]: ...


@contextmanager
def cyclic_collector_off() -> Iterator[None]:
    """Switch the automatic collector off within the context: when it runs depends on everything that ran before."""
    was_on = gc.isenabled()
    gc.disable()
    try:
        yield
    finally:
        if was_on:
            gc.enable()


def is_heap_frozen() -> bool:
    """Return whether somebody has frozen the heap."""
    return gc.get_freeze_count() > _OF_PYTHON


class FrozenHeap:
    """Objects from before a measured test that are frozen, so that collections skip them.

    With torch loaded there are half a million of them, and each of a measurement's several collections would go through
    all, for a quarter of a second. `collect_everything` is for when one of them may have become garbage meanwhile.

    Each measured test begins with a collection of everything younger. All objects are collected, and frozen anew, only where
    garbage among the frozen ones could be in the test's figures: a shared fixture from before has been torn down, the device
    has live bytes, or nothing is frozen any more. A full collection that other code starts sees all objects, as without the
    plugin; they stay thawed until the next measured test.
    """

    def __init__(self) -> None:
        self.frozen = False
        """True if this heap has frozen objects."""
        self._stale = True
        """True if frozen objects may be garbage."""
        self._younger: set[Hashable] = set()
        """Shared fixtures that were set up since the heap was frozen."""

    def freeze(self) -> None:
        """Freeze all live objects, unless other code has: thawing ours would thaw its objects, too."""
        if not is_heap_frozen():
            gc.freeze()
            self.frozen = True

    def thaw(self) -> None:
        """Undo `freeze`."""
        if self.frozen:
            gc.unfreeze()
            self.frozen = False

    def begin(self, device: _Allocator) -> None:
        """Collect the garbage that could be in the figures of the measured test that is about to run."""
        # pytest lets go of the last failure when the next call begins. Its frames would then be garbage of before.
        for name in _LAST_FAILURE:
            vars(sys).pop(name, None)
        anew = self._stale or not self.frozen
        if anew:
            self._freeze_anew()
        device.quiesce()
        if not anew and (any(one.reserved() for one in device.everywhere) or len(gc.get_objects()) > MOST_YOUNGER):
            self._freeze_anew()
            device.quiesce()

    def fixture_is_set_up(self, fixture: Hashable) -> None:
        """Note that a fixture that several tests may share has been set up."""
        self._younger.add(fixture)

    def fixture_is_gone(self, fixture: Hashable) -> None:
        """Note that a fixture that several tests may share has been torn down. Young ones are garbage like any other."""
        if fixture in self._younger:
            self._younger.remove(fixture)
        else:
            self._stale = True

    def close(self) -> None:
        """Thaw everything at the end of the session."""
        if self._before_collection in gc.callbacks:
            gc.callbacks.remove(self._before_collection)
        self.thaw()

    def _freeze_anew(self) -> None:
        self.thaw()
        if is_heap_frozen():
            return  # frozen by other code
        gc.collect()
        self.freeze()
        if self._before_collection not in gc.callbacks:
            gc.callbacks.append(self._before_collection)
        self._stale = False
        self._younger.clear()

    def _before_collection(self, phase: str, info: dict[str, Any]) -> None:
        """Thaw everything before a full collection that other code starts."""
        # A frame that was kept in a variable of itself would be a cycle, with all the frames that called it.
        if phase == "start" and info["generation"] == 2 and self.frozen and _is_asked_for(sys._getframe().f_back):  # noqa: SLF001
            self.thaw()


def _is_asked_for(caller: FrameType | None) -> bool:
    """Return whether a full collection that begins in the frame of ``caller`` is other code's call of ``gc.collect``.

    Python starts one by itself only after as many younger ones as its threshold, in whatever code allocates then.
    """
    if caller is None:
        return True  # a thread that runs nothing else
    if str(caller.f_globals.get("__name__")).startswith("pytest_gpumem."):
        return False
    due = gc.isenabled() and gc.get_count()[2] > gc.get_threshold()[2]
    return not due or "collect" in caller.f_code.co_names


@contextmanager
def everything_in_sight() -> Iterator[None]:
    """Thaw all objects within the context, and freeze again afterwards what was frozen."""
    frozen = is_heap_frozen()
    if frozen:
        gc.unfreeze()
    try:
        yield
    finally:
        if frozen:
            gc.freeze()


def collect_everything() -> None:
    """Collect garbage among all objects, frozen ones too."""
    with everything_in_sight():
        gc.collect()


class _FinderBeforeOthers:
    """Import hook that finds nothing itself: what the finders behind it find has its frames cleared once it is loaded."""

    def __init__(self) -> None:
        self._loading = threading.local()

    def find_spec(
        self, name: str, path: Sequence[str] | None = None, target: ModuleType | None = None
    ) -> ModuleSpec | None:
        if getattr(self._loading, "is_under_way", False) or not _is_for_loading(sys._getframe(1)):  # noqa: SLF001
            return None
        for finder in _finders_behind(self):
            spec: ModuleSpec | None = finder.find_spec(name, path, target) if hasattr(finder, "find_spec") else None
            if spec is not None:
                if hasattr(spec.loader, "exec_module"):
                    spec.loader = cast("Loader", _ClearingLoader(spec, self._loading))
                return spec
        return None


class _ClearingLoader:
    """Stand-in for the loader of one module, until that loader executes it; then the module's spec has its own again.

    Modules that this one imports are loaded as always: their frames are younger than the list that is made before it.
    """

    def __init__(self, spec: ModuleSpec, loading: threading.local) -> None:
        self._loader: Any = spec.loader
        self._spec = spec
        self._loading = loading

    def __getattr__(self, name: str) -> Any:
        return getattr(self._loader, name)

    def create_module(self, spec: ModuleSpec) -> ModuleType | None:
        create = getattr(self._loader, "create_module", None)
        module: ModuleType | None = create(spec) if create is not None else None
        return module

    def exec_module(self, module: ModuleType) -> None:
        __tracebackhide__ = True
        self._spec.loader = self._loader
        if vars(module).get("__loader__") is self:
            module.__loader__ = self._loader
        before = _frames()
        self._loading.is_under_way = True
        try:
            self._loader.exec_module(module)
        finally:
            self._loading.is_under_way = False
        _clear_frames(besides=before)


def _is_for_loading(caller: FrameType) -> bool:
    """Return whether ``import`` asks for a spec: others, as `importlib.util.find_spec`, keep its loader to read from it."""
    asks = caller.f_back
    return asks is not None and asks.f_code.co_name == "_find_and_load_unlocked"


def _finders_behind(finder: object) -> list[Any]:
    """Return the finders that come after one; none where it has been taken out meanwhile."""
    finders = list(sys.meta_path)
    places = [place for place, one in enumerate(finders) if one is finder]
    return finders[places[0] + 1 :] if places else []


def _clear_frames(besides: list[FrameType]) -> None:
    """Clear the frames of functions that have ended, but for some, whose list is emptied: this frame's caller is in them."""
    known = set(map(id, besides))
    for frame in _frames():
        if id(frame) not in known:
            with suppress(RuntimeError):  # of one that runs
                frame.clear()
    besides.clear()


def _frames() -> list[FrameType]:
    """Return the frames of functions that the collector goes through; a generator's would be closed by clearing it."""
    generators = inspect.CO_GENERATOR | inspect.CO_COROUTINE | inspect.CO_ASYNC_GENERATOR
    return [one for one in gc.get_objects() if type(one) is FrameType and not one.f_code.co_flags & generators]


@contextmanager
def frames_cleared_behind_imports() -> Iterator[None]:
    """Have the modules that are first imported within keep nothing alive that their importer has.

    A function that has the frame of its caller in a variable, as `torch.fx.wrap` does to find the module that calls it, leaves
    a cycle of frames, which refers to all callers up to the test and so to its model. Which test imports a module first depends
    on their order. Frames that wait for a traceback of an error to be shown are left alone: nothing is cleared behind an import
    that fails.
    """
    finder = _FinderBeforeOthers()
    with _import_lock():
        sys.meta_path.insert(0, finder)
    try:
        yield
    finally:
        with _import_lock(), suppress(ValueError):  # where other code has taken it out
            sys.meta_path.remove(finder)


@contextmanager
def _import_lock() -> Iterator[None]:
    """Have no other thread ask a finder within: `import` holds this lock while it asks one."""
    _imp.acquire_lock()
    try:
        yield
    finally:
        _imp.release_lock()
