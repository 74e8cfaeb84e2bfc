"""The base class of a device: the interface through which a step's bytes and seconds are measured."""

from __future__ import annotations

import functools
import gc
import itertools
import time
from abc import ABC, abstractmethod
from collections.abc import Mapping
from contextlib import ExitStack, contextmanager, nullcontext, suppress
from dataclasses import astuple, dataclass, field
from typing import TYPE_CHECKING, Any, cast

from pytest_gpumem.facts.measurement import MeasuringError
from pytest_gpumem.facts.values.interference import Conditions
from pytest_gpumem.facts.values.unknown_reads import NOTHING_READ
from pytest_gpumem.measuring.devices import proc
from pytest_gpumem.measuring.devices.cuda_history import in_order_of_time
from pytest_gpumem.measuring.devices.profiled import check_change, profiled
from pytest_gpumem.measuring.ranks.consensus import ALONE
from pytest_gpumem.torch_support.garbage_collector import frames_cleared_behind_imports
from pytest_gpumem.torch_support.private_api.compiler import compiled_graphs
from pytest_gpumem.torch_support.reset_guard import before_each_reset

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Iterator, Sequence
    from contextlib import AbstractContextManager
    from pathlib import Path

    import torch

    from pytest_gpumem.facts.measurement import Environment
    from pytest_gpumem.facts.values.events import Token
    from pytest_gpumem.facts.values.option_words import Routing
    from pytest_gpumem.facts.values.unknown_reads import UnknownReads
    from pytest_gpumem.measuring.devices.device_lock import DeviceLock
    from pytest_gpumem.measuring.devices.memory_ledger import SharedMemory
    from pytest_gpumem.measuring.ranks.consensus import Alone
    from pytest_gpumem.torch_support.private_api.profiler import Profile


Blocks = Mapping[int, int]
"""Memory blocks: address -> bytes."""


BlockIds = frozenset[tuple[int, int]]
"""Blocks that a device knew at a moment, by address and number.

A new block at a freed address counts as a different block. For example, a tensor at ``0x7f00`` is ``(0x7f00, 12)``. After it is
freed, the allocator reuses the address, and the new tensor is ``(0x7f00, 57)``.
"""


class DeviceUnavailable(Exception):
    """Raised by a device that cannot be used here. The message is a clause with the reason: ``no CUDA device: ...``."""


class CannotRun(Exception):
    """The device cannot run a step under its config. The message is a clause with the reason."""


@dataclass(frozen=True, slots=True)
class Peak:
    """The most bytes live at once, by the device's own counter. Only differences between two readings are meaningful."""

    allocated: int
    reserved: int | None = None
    """Bytes that the allocator reserved; ``None`` if the device does not reserve."""
    reaching: int | None = None
    """``allocated`` plus the most that unplanned workspaces take; ``None`` if the device plans all workspaces."""


def highest(first: Peak | None, second: Peak) -> Peak:
    """Return the larger of two peaks, field by field. A field is ``None`` if either peak has ``None``.

    For example, ``Peak(100, 512)`` and ``Peak(120, 256)`` give ``Peak(120, 512)``. Without a first peak, return the second.
    """
    if first is None:
        return second
    pairs = zip(astuple(first), astuple(second), strict=True)
    larger: list[Any] = [None if None in pair else max(pair) for pair in pairs]
    return Peak(*larger)


@dataclass(slots=True)
class Window:
    """The time between `Device.open_window` and `Device.close_window`, cut into parts by `Device.split`.

    For example, a training step has three parts. Peaks of 30.96 MB in forward, 36.73 MB in backward and 42.52 MB in the
    optimizer give ``parts`` with these three peaks, and ``highest`` is 42.52 MB.
    """

    seen: list[Peak | None] = field(default_factory=lambda: [None])
    """The highest peak so far in each part; ``None`` if a part has no peak yet."""
    of_others: tuple[Window, ...] = ()
    """The same region on each of `Device.others`."""

    def see(self, peak: Peak) -> None:
        """Count a peak towards the part that is open now."""
        self.seen[-1] = highest(self.seen[-1], peak)

    @property
    def parts(self) -> tuple[Peak, ...]:
        """The highest peak in each part, after the window has been closed."""
        peaks = tuple(peak for peak in self.seen if peak is not None)
        assert len(peaks) == len(self.seen), "a part sees a peak when it ends, if not before"
        return peaks

    @property
    def highest(self) -> Peak:
        """The highest peak, after the window has been closed."""
        return functools.reduce(highest, self.parts)

    @property
    def everywhere(self) -> tuple[Peak, ...]:
        """The highest peak on each of `Device.everywhere`, after the window has been closed."""
        return (self.highest, *(window.highest for window in self.of_others))

    @property
    def parts_everywhere(self) -> list[tuple[Peak, ...]]:
        """The highest peak in each part on each of `Device.everywhere`, after the window has been closed."""
        return list(zip(self.parts, *(window.parts for window in self.of_others), strict=True))


class Device(ABC):
    """Base class of devices. A new device defines `name` and the abstract members, and overrides unsuitable defaults.

    Readings (`live`, `pop_peak`) count bytes from a zero that the device chooses. Only differences between readings in the
    same `open` ... `close` region are meaningful.

    The defaults fit an accelerator whose allocator keeps statistics. Such statistics cost no time, so nothing is paused for
    timing. torch's profiler records the allocations when a peak is explained.

    For example, a runner calls `open` and `open_window`, runs the step, and `close_window` returns the step's peak. If 20 MB
    are live before the step and the peak is 62.52 MB, the step needs 42.52 MB.
    """

    name: str
    """The value for ``--gpumem-device`` that selects this device."""
    memory_title = "Memory"
    """The name of the counted memory in failures, for example ``"GPU memory"`` in "GPU memory regressed"."""
    tells_time = False
    """True if seconds on this device are meaningful. `laps` waits for the device, by default with `synchronize`."""
    seconds_between_readings = 0.0
    """The least seconds between two readings of pace and conditions; more than 0 if a reading slows the next steps."""
    lock: DeviceLock | None = None
    """The lock that makes other processes' measured tests wait during timing; ``None`` if they never wait."""
    shared_memory: SharedMemory | None = None
    """The memory that this process shares with others under ``--gpumem-pack``; ``None`` if tests cannot share the device."""
    consensus: Alone = ALONE
    """Decides how often a step runs, for this process alone or together with all ranks in its job. The session sets it."""
    others: Sequence[Device] = ()
    """Further GPUs that a step may use. They are opened, read and closed together with this device."""

    routing: Routing | None = None
    """The setting ``routing``, which `routed` applies from `open` to `close`."""
    _undo: ExitStack | None = None
    """Undoes `open`; ``None`` while the device is closed."""
    _kept: Peak | None = None
    """The peak before the device's last reset, if code other than `pop_peak` made this reset."""
    _windows: tuple[Window, ...] = ()
    """The windows that are open."""

    @property
    @abstractmethod
    def torch_device(self) -> torch.device:
        """The `torch.device` of tensors."""

    @abstractmethod
    def environment(self) -> Environment:
        """Return the device's environment, with the versions that its figures depend on."""

    @abstractmethod
    def live(self) -> int:
        """Return the live bytes."""

    @abstractmethod
    def peak(self) -> Peak:
        """Return the most live bytes since `reset_peak`."""

    @abstractmethod
    def reset_peak(self) -> None:
        """Start the next peak from the live bytes."""

    # Properties

    @property
    def everywhere(self) -> tuple[Device, ...]:
        """This device and its `others`, in the order of their readings."""
        return (self, *self.others)

    @property
    def is_used(self) -> bool:
        """True if this process has ever allocated on the device. An unused device is not read."""
        return True

    def lacks(self, feature: str) -> str | None:
        """Return a clause with the reason why no step can use ``feature`` here; ``None`` if steps can.

        A feature is a precision (``"tf32"``), a checkpointing kind (``"offload"``), a torch.compile mode
        (``"max-autotune"``), a way to shard (``"cp"``, ``"fully_shard"``), or ``"values"`` for computed tensors.
        """
        return f"the {self.name} device does not switch TF32 on" if feature == "tf32" else None

    def emulates(self, feature: str) -> str | None:
        """Return a clause if the device computes a precision in another, slower precision; otherwise ``None``.

        Such a precision is still measured, because its bytes are the same. Advice prefers a fast precision.
        """
        return None

    def why_cannot_run(self, error: BaseException) -> str | None:
        """Return the error's words as a clause if they say that the device lacks something; ``None`` for other errors."""
        return None

    def tf32(self, allowed: bool) -> AbstractContextManager[object]:
        """Return a context that switches TF32 for float32 products and convolutions on or off; by default an empty context."""
        return nullcontext()

    def libraries(self) -> Mapping[str, str]:
        """Return the library releases that affected figures since `forget_libraries` (or `open`).

        They are details of the measurement's environment. `environment` only has details that are equal for all steps.
        """
        return {}

    def forget_libraries(self) -> None:
        """Forget the libraries so far, because a new measurement begins."""

    # Random numbers

    def random_devices(self) -> Sequence[int]:
        """Return the indices of the accelerators with their own random numbers, apart from the host's."""
        return ()

    def random_state(self, index: int) -> torch.Tensor:
        """Return the state for an accelerator's random numbers, as bytes on the host."""
        import torch

        return cast("torch.Tensor", torch.get_device_module(self.torch_device).get_rng_state(index))

    def set_random_state(self, state: torch.Tensor, index: int) -> None:
        """Set an accelerator's random numbers to a state from `random_state`."""
        import torch

        torch.get_device_module(self.torch_device).set_rng_state(state, index)

    # Counting

    def open(self) -> None:
        """Begin counting.

        Until `close`, `lock` shares the device with other processes' measured tests.

        Raises:
            DeviceUnavailable: The device does not count allocations.
            RuntimeError: The device is already open.
        """
        if self._undo is not None:
            raise RuntimeError(f"the {self.name} device is already open")
        with ExitStack() as undo:
            if self.lock is not None:
                undo.enter_context(self.lock.shared())
            undo.enter_context(frames_cleared_behind_imports())
            undo.enter_context(self.routed(self.routing))
            self.start(undo)
            self._undo = undo.pop_all()
        try:
            for other in self.others:
                other.open()
            self.reset_peak()
        except BaseException:
            self.close()
            raise
        self._kept = None
        self._windows = ()

    def start(self, undo: ExitStack) -> None:
        """Start counting after `open` has taken the lock. Callbacks on ``undo`` run at `close`.

        By default, measured code may reset the peak itself (``torch.cuda.reset_peak_memory_stats()``).
        """
        undo.enter_context(before_each_reset(self.keep_peak, self.torch_device.type))

    def close(self) -> None:
        """Stop counting and undo `open`. A second call does nothing."""
        for other in self.others:
            other.close()
        undo, self._undo = self._undo, None
        if undo is not None:
            undo.close()

    def one_moment(self) -> AbstractContextManager[object]:
        """Return a context for code that allocates and frees nothing. A device may read its counters once for this context."""
        return nullcontext()

    def synchronize(self) -> None:
        """Wait until the device has finished its work."""

    def quiesce(self) -> None:
        """Bring memory to rest: collect garbage, drop the backend's caches and workspaces, wait for the device."""
        gc.collect()
        self.release_workspaces()

    def settle(self) -> None:
        """Bring memory to rest between steps like `quiesce`, but without dropping the program's workspaces."""
        gc.collect()
        self.empty_cache()

    def empty_cache(self) -> None:
        """Wait for the device, and return the memory that its allocator caches."""
        self.synchronize()

    def release_workspaces(self) -> None:
        """Wait for the device, and drop the memory that the backend caches between operations. Such memory is no leak."""
        self.empty_cache()

    def restore_workspaces(self) -> None:
        """Allocate the workspaces again that the last `release_workspaces` dropped, as far as possible."""

    def workspaces(self) -> tuple[int, ...]:
        """Return the bytes in the backend's workspaces on each of `everywhere`. Afterwards, as many bytes are allocated.

        A device that overrides `release_workspaces` must override this method.
        """
        return (0,) * len(self.everywhere)

    @contextmanager
    def transient_workspaces(self) -> Iterator[list[int]]:
        """Yield a list, which is filled when the context ends: the workspace bytes in the peak on each of `everywhere`.

        Only workspaces that were dropped after their operation count.
        """
        yield [0] * len(self.everywhere)

    def reserved(self) -> int | None:
        """Return the bytes that the allocator has reserved on the device; ``None`` if it does not reserve."""
        return None

    def unused(self) -> int:
        """Return the reserved but unused bytes. The next step may use them."""
        return 0

    def turnover(self) -> int:
        """Return the bytes allocated so far, including freed ones; 0 if they are not counted. Use differences only."""
        return 0

    def pop_peak(self) -> Peak:
        """Return the peak since the last call (or `open`), and start the next peak from the live bytes.

        The call also counts the peak in every open window.
        """
        peak = highest(self._kept, self.peak())
        # Reset the peak before clearing `_kept`, because `before_each_reset` reacts to this reset as well.
        self.reset_peak()
        self._kept = None
        for window in self._windows:
            window.see(peak)
        return peak

    def keep_peak(self) -> None:
        """Save the peak so far for `pop_peak`, because the measured code is about to reset the device's peak.

        Save the peaks on `others` as well, because the code may reset any GPU's peak.
        """
        self._kept = highest(self._kept, self.peak())
        for other in self.others:
            # `open` opens the other devices one after another, and each device then resets its peak.
            if other._undo is not None:  # noqa: SLF001 - of this class
                other.keep_peak()

    def open_window(self) -> Window:
        """Open and return a window, which counts every peak until `close_window`. Windows may overlap."""
        self.pop_peak()
        if not self._windows:
            self.forget_libraries()
        window = Window(of_others=tuple(other.open_window() for other in self.others))
        self._windows = (*self._windows, window)
        return window

    def split(self, window: Window) -> None:
        """End a part of ``window`` and begin the next part with the same reading."""
        self.pop_peak()
        window.seen.append(None)
        for other, its_window in zip(self.others, window.of_others, strict=True):
            other.split(its_window)

    def close_window(self, window: Window) -> Peak:
        """Close ``window``, and return its highest peak."""
        try:
            self.pop_peak()
            for other, its_window in zip(self.others, window.of_others, strict=True):
                other.close_window(its_window)
        finally:
            self._windows = tuple(other for other in self._windows if other is not window)
        return window.highest

    @contextmanager
    def window(self) -> Iterator[Window]:
        """Yield a window for the peaks within the context. An error from the context's code is raised even without a peak."""
        window = self.open_window()
        try:
            yield window
        except BaseException:
            with suppress(MeasuringError):
                self.close_window(window)
            raise
        self.close_window(window)

    @contextmanager
    def peak_ignored(self) -> Iterator[None]:
        """Hide the context's peak from every window."""
        self.keep_peak()
        peak_before = self._kept
        try:
            with ExitStack() as ignoring:
                for other in self.others:
                    ignoring.enter_context(other.peak_ignored())
                yield
            # A device that counts events has to read the context's events before it can reset its peak.
            self.peak()
        except BaseException:
            with suppress(MeasuringError):
                self.peak()
            raise
        finally:
            self.reset_peak()
            self._kept = peak_before

    def register_existing(self, storages: Iterable[torch.UntypedStorage]) -> None:
        """Register storages that existed before `open`, so their deallocation is noticed."""

    def hold_known(self) -> None:
        """Account for frees that were missed, for example by gloo's threads, so later readings are not affected."""

    def known(self) -> BlockIds:
        """Return the live blocks' identities; empty if the device only knows sums."""
        return frozenset()

    def blocks(self) -> Blocks:
        """Return the live blocks; empty if the device only knows sums."""
        return {}

    @contextmanager
    def recorded(self, tokens: list[Token], *, operands: bool = True) -> Iterator[list[Profile]]:
        """Record allocations and their surrounding spans. ``tokens`` is filled at the end.

        No readings are possible within the context.

        Args:
            tokens: The list to fill.
            operands: Whether to record the operators' input tensors. The profile then keeps the inner tensors of
                `torch.vmap` and the parts of sparse CSR tensors alive (see `profiled`).

        Yields:
            A list with the profile. Clear the list after the context to free the tensors that the profile kept alive.
            The live bytes fall accordingly.

        Raises:
            MeasuringError: The recording was cut short.
        """
        live_before = self.live()
        recording: list[Token] = []
        with self.unrecorded(), profiled(recording, self.torch_device, operands=operands) as profiles:
            yield profiles
            self.synchronize()
        recording = in_order_of_time(recording)
        check_change(recording, self.live() - live_before, f"the {self.name} device", "its own counter")
        tokens.extend(recording)

    def keep_snapshot(self, path: Path) -> None:
        """Write the allocator's own record of the latest `recorded` region to a file. Raises ``OSError``.

        A device whose allocator records nothing writes no file.
        """

    def unrecorded(self) -> AbstractContextManager[None]:
        """Return a context for timing, in which nothing is recorded or slowed down. No window sees its peak.

        The device may miss allocations and frees inside. Call `reconcile` afterwards.
        """
        return self.peak_ignored()

    def reconcile(self, since: BlockIds, storages: Iterable[torch.UntypedStorage]) -> None:
        """Forget the blocks that are neither in ``since`` (an earlier result from `known`) nor in ``storages``."""

    @contextmanager
    def peak_from_now_on(self) -> Iterator[Callable[[], Peak] | None]:
        """Yield a function for the peak since the context began. The peak includes all memory, and resets do not affect it.

        Yield ``None`` on a device that reserves nothing.
        """
        yield None

    # Timing

    def lost(self) -> str | None:
        """Return a clause if readings since the last call (or `open`) are not valid; ``None`` if they are."""
        return None

    def take_reads(self) -> UnknownReads:
        """Return the reads of uncomputed values since the last call (or `open`)."""
        return NOTHING_READ

    def routed(self, routing: Routing | None) -> AbstractContextManager[None]:
        """Return a context with an assumption about choices that depend on uncomputed values.

        ``None`` keeps the current assumption. A device that computes values ignores this call.
        """
        return nullcontext()

    def choices_assumed(self) -> int:
        """Return how many choices were made by assumption so far."""
        return 0

    def time(self, run: Callable[[], object]) -> float:
        """Call ``run``, and return its duration on the device in seconds."""
        return self.laps([run])[0]

    def laps(self, runs: Sequence[Callable[[], object]]) -> list[float]:
        """Call each function in ``runs``, and return its duration on the device in seconds. No other wait separates the calls.

        The default reads the host's clock after the device has finished each run.
        """
        self.synchronize()
        borders = [time.perf_counter()]
        for run in runs:
            run()
            self.synchronize()
            borders.append(time.perf_counter())
        return [end - start for start, end in itertools.pairwise(borders)]

    def launches(self, run: Callable[[], object]) -> Mapping[str, int] | None:
        """Run a function and return its kernel launches by name. A device without kernels returns ``None`` and runs nothing."""
        return None

    def conditions(self) -> Conditions:
        """Return the interference counters. The reading is cheap enough to take between two rounds.

        They include the calling thread's waiting, so both readings of a region must come from the same thread.
        """
        return Conditions(time.perf_counter(), graphs=compiled_graphs(), waited=proc.waited_seconds())

    def pace(self) -> float | None:
        """Return the clock rate for steps; ``None`` if it is unknown.

        Seconds times rate give a step's time in cycles. On CUDA the rate is the SM clock in Hz. Read the clock right after
        a round, before the GPU becomes idle. On the CPU the rate is the runs per second of a fixed workload, which
        runs for this reading, inside `unrecorded`. For example, 10 ms at 1.98 GHz are 19.8 million cycles.
        """
        return None

    @contextmanager
    def exclusive(self) -> Iterator[str | None]:
        """Reserve the device for this process during timing.

        Between `open` and `close` the device is shared with other processes of the same user. While a process has the device
        to itself, measured tests in the other processes wait. Calls may be nested.

        Yields:
            ``None``, or a clause that says why other processes may run at the same time.
        """
        if self._undo is None:
            raise RuntimeError(f"the {self.name} device is not open")
        with nullcontext() if self.lock is None else self.lock.exclusive() as refused:
            yield refused
