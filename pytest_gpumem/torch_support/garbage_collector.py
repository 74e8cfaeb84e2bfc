"""Control Python's cyclic garbage collector: off during measurements, and fast between tests, because old objects are frozen.

A collection skips frozen objects (``gc.freeze``).
"""

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
"""If more objects than this are not frozen, all objects are collected and frozen again. A collection visits this many objects
in 5 to 10 ms."""
_OF_PYTHON = 1000
"""If more objects than this are frozen, a program has called ``gc.freeze``. Python itself freezes some objects when it starts
(375 in 3.12). ``gc.freeze`` freezes all objects in the program, many thousands."""
_LAST_FAILURE = ("last_type", "last_value", "last_traceback", "last_exc")


class _Allocator(Protocol):
    """The methods in `pytest_gpumem.measuring.devices.contract.Device` called by `FrozenHeap`."""

    def quiesce(self) -> None: ...

    def reserved(self) -> int | None: ...

    @property
    def everywhere(self) -> Sequence[_Allocator]: ...


@contextmanager
def cyclic_collector_off() -> Iterator[None]:
    """Switch automatic garbage collection off within the context, because earlier code influences when it starts."""
    was_on = gc.isenabled()
    gc.disable()
    try:
        yield
    finally:
        if was_on:
            gc.enable()


def is_heap_frozen() -> bool:
    """Return whether this plugin or other code has called ``gc.freeze`` on the program's objects."""
    return gc.get_freeze_count() > _OF_PYTHON


class FrozenHeap:
    """All objects from before a measured test. They are frozen, so garbage collections skip them.

    After ``import torch``, a program has half a million objects. Without freezing, each collection would take a quarter of a
    second, and a measurement makes several collections.

    Before each measured test, garbage among the unfrozen objects is collected. All objects are collected and frozen again only
    if garbage among the frozen objects could change the test's figures: a fixture from before the freeze was torn down, the
    device has live bytes, or nothing is frozen any more. `collect_everything` collects frozen garbage at any other time. If
    other code calls ``gc.collect()``, all objects are unfrozen first, so the call collects as much as without this plugin. The
    objects are not frozen again until the next measured test.

    For example, a session fixture creates a model for 50 tests. On the CPU, all objects are frozen before the first test, and
    only newer objects are collected before the other 49 tests. On a GPU, the model's live bytes cause a new freeze before
    every test.
    """

    def __init__(self) -> None:
        self.frozen = False
        """True if `freeze` has frozen the objects that are frozen now."""
        self._stale = True
        """True if some frozen objects may have become garbage."""
        self._younger: set[Hashable] = set()
        """The shared fixtures set up after the last freeze."""

    def freeze(self) -> None:
        """Freeze all objects, unless other code has frozen objects already, because `thaw` would unfreeze these too."""
        if not is_heap_frozen():
            gc.freeze()
            self.frozen = True

    def thaw(self) -> None:
        """Unfreeze all objects, if `freeze` has frozen them."""
        if self.frozen:
            gc.unfreeze()
            self.frozen = False

    def begin(self, device: _Allocator) -> None:
        """Collect all garbage that could change the next measured test's figures."""
        # pytest stores the last failure in `sys` until it calls the next test. The failure's frames would become garbage during
        # this test, so remove them now.
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
        """Record the setup of a shared fixture."""
        self._younger.add(fixture)

    def fixture_is_gone(self, fixture: Hashable) -> None:
        """Record the teardown of a shared fixture.

        Unless the fixture was set up after the last freeze, some of its objects may now be frozen garbage.
        """
        if fixture in self._younger:
            self._younger.remove(fixture)
        else:
            self._stale = True

    def close(self) -> None:
        """Unfreeze all objects at the end of the session."""
        if self._before_collection in gc.callbacks:
            gc.callbacks.remove(self._before_collection)
        self.thaw()

    def _freeze_anew(self) -> None:
        self.thaw()
        if is_heap_frozen():
            return  # other code has frozen objects
        gc.collect()
        self.freeze()
        if self._before_collection not in gc.callbacks:
            gc.callbacks.append(self._before_collection)
        self._stale = False
        self._younger.clear()

    def _before_collection(self, phase: str, info: dict[str, Any]) -> None:
        """Unfreeze all objects if other code starts a full collection. Python calls this function before each collection."""
        # Do not store the frame in a local variable, because this would be a reference cycle with all calling frames.
        if phase == "start" and info["generation"] == 2 and self.frozen and _is_asked_for(sys._getframe().f_back):  # noqa: SLF001
            self.thaw()


def _is_asked_for(caller: FrameType | None) -> bool:
    """Return whether code outside this package called ``gc.collect``, so the full collection did not start automatically.

    An automatic full collection starts only after a certain number of partial collections (`gc.get_threshold`). If there were
    fewer partial collections, other code must have called the full collection. If there were enough partial collections, the
    full collection may have started automatically. Other code probably called it if the running code contains ``collect``.

    Args:
        caller: The running frame when the collection began.
    """
    if caller is None:
        return True  # no Python frame was running in this thread
    if str(caller.f_globals.get("__name__")).startswith("pytest_gpumem."):
        return False
    due = gc.isenabled() and gc.get_count()[2] > gc.get_threshold()[2]
    return not due or "collect" in caller.f_code.co_names


@contextmanager
def everything_in_sight() -> Iterator[None]:
    """Unfreeze all objects within the context, and freeze all objects at its end if some were frozen before."""
    frozen = is_heap_frozen()
    if frozen:
        gc.unfreeze()
    try:
        yield
    finally:
        if frozen:
            gc.freeze()


def collect_everything() -> None:
    """Collect all garbage, including frozen objects."""
    with everything_in_sight():
        gc.collect()


class _FinderBeforeOthers:
    """Import hook that clears the frames left behind by a module's import. The other finders find the module."""

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
    """A loader in place of a module's own loader. It lets the module's own loader execute the module, then clears frames.

    A module imported by another module is loaded without this class, because the outer import clears all new frames at its
    end.
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
    """Return whether an ``import`` statement asks for a module's spec, and not for example `importlib.util.find_spec`.

    Only ``import`` uses the spec's loader at once, so only its spec may get a `_ClearingLoader`.
    """
    asking_frame = caller.f_back
    return asking_frame is not None and asking_frame.f_code.co_name == "_find_and_load_unlocked"


def _finders_behind(finder: object) -> list[Any]:
    """Return the finders after ``finder`` in `sys.meta_path`; an empty list if ``finder`` is no longer there."""
    finders = list(sys.meta_path)
    indices = [index for index, candidate in enumerate(finders) if candidate is finder]
    return finders[indices[0] + 1 :] if indices else []


def _clear_frames(besides: list[FrameType]) -> None:
    """Clear the local variables in all frames whose function has ended, except for the frames in ``besides``.

    The list ``besides`` is emptied at the end. It contains its caller's frame, which refers to the list: a reference cycle.
    """
    kept_ids = set(map(id, besides))
    for frame in _frames():
        if id(frame) not in kept_ids:
            with suppress(RuntimeError):  # a running frame cannot be cleared
                frame.clear()
    besides.clear()


def _frames() -> list[FrameType]:
    """Return the frames of all functions, from the objects known to the garbage collector.

    Frames of generators and coroutines are left out, because clearing these frames would close the generators.
    """
    generators = inspect.CO_GENERATOR | inspect.CO_COROUTINE | inspect.CO_ASYNC_GENERATOR
    return [frame for frame in gc.get_objects() if type(frame) is FrameType and not frame.f_code.co_flags & generators]


@contextmanager
def frames_cleared_behind_imports() -> Iterator[None]:
    """Clear the frames that remain after a module is imported for the first time within the context.

    A function may store its caller's frame in a local variable. For example, `torch.fx.wrap` does so to find the calling
    module. The two frames are then a reference cycle, which keeps all calling frames alive. If a test imports such a module
    first, the cycle would keep the test's model alive, so figures would depend on the order of tests. After a failed import,
    no frames are cleared, because the traceback refers to them.
    """
    finder = _FinderBeforeOthers()
    with _import_lock():
        sys.meta_path.insert(0, finder)
    try:
        yield
    finally:
        with _import_lock(), suppress(ValueError):  # other code has removed the finder
            sys.meta_path.remove(finder)


@contextmanager
def _import_lock() -> Iterator[None]:
    """Hold Python's import lock within the context, so no other thread uses `sys.meta_path` while it is changed."""
    _imp.acquire_lock()
    try:
        yield
    finally:
        _imp.release_lock()
