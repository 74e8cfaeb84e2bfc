"""Python's cyclic collector: switched off while measuring, and faster between tests because the heap is frozen."""

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
"""The most unfrozen objects before the heap is frozen again. A collection visits all unfrozen objects in 5 to 10 ms."""
_OF_PYTHON = 1000
"""A number between the objects that Python freezes at its start (375 in 3.12) and a program's heap (many thousands)."""
_LAST_FAILURE = ("last_type", "last_value", "last_traceback", "last_exc")


class _Allocator(Protocol):
    """A device's interface for a collection (`pytest_gpumem.measuring.devices.contract.Device`)."""

    def quiesce(self) -> None: ...

    def reserved(self) -> int | None: ...

    @property
    def everywhere(self) -> Sequence[_Allocator]: ...


@contextmanager
def cyclic_collector_off() -> Iterator[None]:
    """Switch the automatic collector off within the context, because its timing depends on all earlier allocations."""
    was_on = gc.isenabled()
    gc.disable()
    try:
        yield
    finally:
        if was_on:
            gc.enable()


def is_heap_frozen() -> bool:
    """Return whether the heap is frozen, by this plugin or by other code."""
    return gc.get_freeze_count() > _OF_PYTHON


class FrozenHeap:
    """Objects from before a measured test. They are frozen, so collections skip them.

    With torch loaded there are half a million objects. Each measurement collects several times, and each collection would take
    a quarter of a second.

    Each measured test begins with a collection of the unfrozen objects. All objects are collected and frozen again only if the
    figures could include frozen garbage: an older shared fixture was torn down, the device has live bytes, or nothing is frozen
    any more. `collect_everything` collects frozen garbage at other times. If other code starts a full collection, all objects
    are thawed first, as without the plugin. They stay thawed until the next measured test.

    For example, on the CPU a session fixture creates a model for 50 tests. The first test freezes the heap, and the other 49
    tests only collect younger objects. On a GPU, the model's live bytes make every test freeze the heap again.
    """

    def __init__(self) -> None:
        self.frozen = False
        """True if this heap has frozen objects."""
        self._stale = True
        """True if frozen objects may be garbage."""
        self._younger: set[Hashable] = set()
        """Shared fixtures that were set up after the heap was frozen."""

    def freeze(self) -> None:
        """Freeze all live objects, unless other code has frozen the heap, because `thaw` would thaw its objects as well."""
        if not is_heap_frozen():
            gc.freeze()
            self.frozen = True

    def thaw(self) -> None:
        """Undo `freeze`."""
        if self.frozen:
            gc.unfreeze()
            self.frozen = False

    def begin(self, device: _Allocator) -> None:
        """Collect the garbage that could affect the next measured test's figures."""
        # pytest keeps the last failure until the next call begins. Its frames would then become garbage during the test.
        for name in _LAST_FAILURE:
            vars(sys).pop(name, None)
        freezes_again = self._stale or not self.frozen
        if freezes_again:
            self._freeze_anew()
        device.quiesce()
        if not freezes_again and (
            any(gpu.reserved() for gpu in device.everywhere) or len(gc.get_objects()) > MOST_YOUNGER
        ):
            self._freeze_anew()
            device.quiesce()

    def fixture_is_set_up(self, fixture: Hashable) -> None:
        """Record that a shared fixture was set up."""
        self._younger.add(fixture)

    def fixture_is_gone(self, fixture: Hashable) -> None:
        """Record that a shared fixture was torn down.

        Frozen objects may now be garbage, unless the fixture was set up after the heap was frozen.
        """
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
        # A frame in its own local variable would be a reference cycle with all calling frames.
        if phase == "start" and info["generation"] == 2 and self.frozen and _is_asked_for(sys._getframe().f_back):  # noqa: SLF001
            self.thaw()


def _is_asked_for(caller: FrameType | None) -> bool:
    """Return whether a full collection was started by other code's call to ``gc.collect``, and not by Python itself.

    Python starts a full collection by itself only if the number of younger collections exceeds the threshold. In any other
    case, or if the calling code uses the name ``collect``, other code asked for the collection. This package's own collections
    are left out.

    Args:
        caller: The frame in which the collection begins.
    """
    if caller is None:
        return True  # a thread without other frames
    if str(caller.f_globals.get("__name__")).startswith("pytest_gpumem."):
        return False
    due = gc.isenabled() and gc.get_count()[2] > gc.get_threshold()[2]
    return not due or "collect" in caller.f_code.co_names


@contextmanager
def everything_in_sight() -> Iterator[None]:
    """Thaw all objects within the context, and freeze them again if they were frozen."""
    frozen = is_heap_frozen()
    if frozen:
        gc.unfreeze()
    try:
        yield
    finally:
        if frozen:
            gc.freeze()


def collect_everything() -> None:
    """Collect garbage among all objects, including frozen ones."""
    with everything_in_sight():
        gc.collect()


class _FinderBeforeOthers:
    """Import hook that delegates to the finders behind it, and clears a module's frames after the module is loaded."""

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
    """A temporary loader for a module. Before executing the module, the loader restores the module's own loader.

    Nested imports are loaded without this class. Their frames are newer than the list of frames from before the import, so the
    outer import clears them.
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
        frames_before = _frames()
        self._loading.is_under_way = True
        try:
            self._loader.exec_module(module)
        finally:
            self._loading.is_under_way = False
        _clear_frames(besides=frames_before)


def _is_for_loading(caller: FrameType) -> bool:
    """Return whether ``import`` asks for a spec. Other callers (`importlib.util.find_spec`) keep the loader for later."""
    asking_frame = caller.f_back
    return asking_frame is not None and asking_frame.f_code.co_name == "_find_and_load_unlocked"


def _finders_behind(finder: object) -> list[Any]:
    """Return the finders that come after ``finder``; an empty list if other code has removed ``finder``."""
    finders = list(sys.meta_path)
    indices = [index for index, candidate in enumerate(finders) if candidate is finder]
    return finders[indices[0] + 1 :] if indices else []


def _clear_frames(besides: list[FrameType]) -> None:
    """Clear the frames of ended functions, except the frames in ``besides``. Empty this list at the end.

    The list has to be emptied because it contains the caller's own frame, which would be a cycle.
    """
    kept_ids = set(map(id, besides))
    for frame in _frames():
        if id(frame) not in kept_ids:
            with suppress(RuntimeError):  # the frame is running
                frame.clear()
    besides.clear()


def _frames() -> list[FrameType]:
    """Return all functions' frames from the collector's objects, without generators, because clearing would close them."""
    generators = inspect.CO_GENERATOR | inspect.CO_COROUTINE | inspect.CO_ASYNC_GENERATOR
    return [frame for frame in gc.get_objects() if type(frame) is FrameType and not frame.f_code.co_flags & generators]


@contextmanager
def frames_cleared_behind_imports() -> Iterator[None]:
    """Clear the frames that modules leave behind when they are first imported within the context.

    A function may store the frame of its caller in a local variable. For example, `torch.fx.wrap` does so to find the calling
    module. The frames then form a cycle with all callers, including the test and its model. The first test to
    import such a module would keep its model alive, so figures would depend on the order of tests. After a failed import
    nothing is cleared, because a traceback may still need the frames.
    """
    finder = _FinderBeforeOthers()
    with _import_lock():
        sys.meta_path.insert(0, finder)
    try:
        yield
    finally:
        with _import_lock(), suppress(ValueError):  # other code may have removed the finder
            sys.meta_path.remove(finder)


@contextmanager
def _import_lock() -> Iterator[None]:
    """Keep other threads from asking a finder within the context. ``import`` holds this lock while asking finders."""
    _imp.acquire_lock()
    try:
        yield
    finally:
        _imp.release_lock()
