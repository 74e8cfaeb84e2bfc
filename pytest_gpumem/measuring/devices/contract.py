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

from pytest_gpumem.base.errors import MeasuringError
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

    from pytest_gpumem.emulating.emulated_process.shared_bytes import SharedBytes
    from pytest_gpumem.facts.measurement import Environment
    from pytest_gpumem.facts.values.events import Token
    from pytest_gpumem.facts.values.gpu_use import GpuUse
    from pytest_gpumem.facts.values.option_words import Routing
    from pytest_gpumem.facts.values.unknown_reads import UnknownReads
    from pytest_gpumem.measuring.devices.device_lock import DeviceLock
    from pytest_gpumem.measuring.devices.memory_ledger import SharedMemory
    from pytest_gpumem.measuring.ranks.consensus import Alone
    from pytest_gpumem.torch_support.private_api.profiler import Profile


Blocks = Mapping[int, int]
"""Memory blocks: address -> bytes."""


BlockIds = frozenset[tuple[int, int]]
"""The blocks that a device knew when `Device.known` was called. Each block is a pair of its address and a running number.

The number distinguishes a new block from an earlier block at the same address. For example, a tensor at ``0x7f00`` is
``(0x7f00, 12)``. After this tensor is freed, a new tensor at the same address is ``(0x7f00, 57)``.
"""


@dataclass(frozen=True, slots=True)
class Peak:
    """The peak of a device's memory, in bytes on the device's own counter.

    The counter's zero is arbitrary, so only the difference between a peak and another reading is meaningful.
    """

    allocated: int
    """The peak of the live bytes."""
    reserved: int | None = None
    """The peak of the reserved bytes; ``None`` if the device does not reserve memory."""
    reaching: int | None = None
    """An upper bound for ``allocated`` on an emulated GPU, where some convolutions' workspaces are only estimated.

    ``None`` on devices whose ``allocated`` contains all workspaces.
    """


def highest(first: Peak | None, second: Peak) -> Peak:
    """Return a peak with the larger value of each field. A field is ``None`` if it is ``None`` in either peak.

    For example, ``Peak(100, 512)`` and ``Peak(120, 256)`` give ``Peak(120, 512)``. If ``first`` is ``None``, the result is
    ``second``.
    """
    if first is None:
        return second
    pairs = zip(astuple(first), astuple(second), strict=True)
    larger: list[Any] = [None if None in pair else max(pair) for pair in pairs]
    return Peak(*larger)


@dataclass(slots=True)
class Window:
    """The peaks from `Device.open_window` to `Device.close_window`. `Device.split` divides this time into parts.

    For example, the parts of a training step are forward, backward and optimizer. If their peaks are 30.96 MB, 36.73 MB and
    42.52 MB, ``parts`` has these three peaks, and ``highest`` is 42.52 MB.
    """

    seen: list[Peak | None] = field(default_factory=lambda: [None])
    """The highest peak so far in each part; ``None`` for a part whose peak was not read yet."""
    of_others: tuple[Window, ...] = ()
    """The windows over the same time on the further GPUs (`Device.others`)."""

    def see(self, peak: Peak) -> None:
        """Include a peak in the window's current part."""
        self.seen[-1] = highest(self.seen[-1], peak)

    @property
    def parts(self) -> tuple[Peak, ...]:
        """The highest peak in each part. Available after the window has been closed."""
        peaks = tuple(peak for peak in self.seen if peak is not None)
        assert len(peaks) == len(self.seen), "a peak is read at the end of each part"
        return peaks

    @property
    def highest(self) -> Peak:
        """The window's highest peak. Available after the window has been closed."""
        return functools.reduce(highest, self.parts)

    @property
    def everywhere(self) -> tuple[Peak, ...]:
        """The window's highest peak on this device and on each further GPU. Available after the window has been closed."""
        return (self.highest, *(window.highest for window in self.of_others))

    @property
    def parts_everywhere(self) -> list[tuple[Peak, ...]]:
        """For each part, the highest peak on this device and on each further GPU. Available after the window was closed."""
        return list(zip(self.parts, *(window.parts for window in self.of_others), strict=True))


class Device(ABC):
    """Base class of devices. A new device defines `name` and the abstract members, and overrides unsuitable defaults.

    `live` and `pop_peak` count bytes from a zero that the device chooses. Only differences between two readings are
    meaningful, and only if the device was not closed in between.

    The defaults fit an accelerator whose allocator keeps statistics. Such statistics cost no time, so they need not be
    switched off while a step is timed. torch's profiler records the allocations when a peak is explained.

    For example, the runner calls `open` and `open_window`, runs a step, and gets the peak from `close_window`. If 20 MB are
    live before the step and the peak is 62.52 MB, the step needs 42.52 MB.
    """

    name: str
    """This device as a value for ``--gpumem-device``, for example ``"cuda"``."""
    memory_title = "Memory"
    """The name of the device's memory in failure messages, for example ``"GPU memory"`` in "GPU memory regressed"."""
    tells_time = False
    """True if steps can be timed on this device."""
    seconds_between_readings = 0.0
    """The minimum seconds between two calls of `pace` or `conditions`; 0 unless such a call slows down the next steps."""
    lock: DeviceLock | None = None
    """The lock that makes other processes' measured tests wait during timing. Without a lock, these tests never wait."""
    shared_memory: SharedMemory | None = None
    """The memory that processes share under ``--gpumem-pack``; ``None`` if several tests cannot share the device."""
    consensus: Alone = ALONE
    """Decides how often a step runs. In a distributed job, the session sets a `Consensus` with the other ranks."""
    publishing: SharedBytes | None = None
    """The file in which this process publishes its bytes on the device. The session sets it."""
    others: Sequence[Device] = ()
    """Further GPUs that a step may use. They are opened, read and closed together with this device."""

    routing: Routing | None = None
    """The setting ``routing``. `open` passes it to `routed`, whose context lasts until `close`."""
    _undo: ExitStack | None = None
    """Undoes `open`; ``None`` while the device is closed."""
    _kept: Peak | None = None
    """The highest peak that `keep_peak` has saved since the last `pop_peak`; ``None`` if no peak was saved."""
    _windows: tuple[Window, ...] = ()
    """All open windows."""

    @property
    @abstractmethod
    def torch_device(self) -> torch.device:
        """The `torch.device` for tensors on this device."""

    @abstractmethod
    def environment(self) -> Environment:
        """Return the device's environment, which includes all versions that affect measurements on it."""

    @abstractmethod
    def live(self) -> int:
        """Return the live bytes."""

    @abstractmethod
    def peak(self) -> Peak:
        """Return the peak of the live bytes since `reset_peak`."""

    @abstractmethod
    def reset_peak(self) -> None:
        """Set the peak to the current live bytes."""

    # Properties

    @property
    def everywhere(self) -> tuple[Device, ...]:
        """This device, followed by its `others`."""
        return (self, *self.others)

    @property
    def is_used(self) -> bool:
        """True if this process has ever allocated memory on the device. The counters of an unused device are not read."""
        return True

    def lacks(self, feature: str) -> str | None:
        """Return the reason why steps on this device cannot use ``feature``; ``None`` if they can use it.

        A feature is a precision (``"tf32"``), a checkpointing kind (``"offload"``), a torch.compile mode
        (``"max-autotune"``), a way to shard (``"cp"``, ``"fully_shard"``), ``"values"`` for a device that computes all
        values of tensors, or ``"processes"`` for a device that measures other processes than the test's own.
        """
        if feature == "processes":
            return f"the {self.name} device measures only the test's own process"
        return f"the {self.name} device does not switch TF32 on" if feature == "tf32" else None

    def variables_of_processes(self) -> Mapping[str, str]:
        """Return the environment variables with which other processes measure their memory on this device.

        By default there are none, because CUDA's allocator keeps statistics.
        """
        return {}

    def emulates(self, feature: str) -> str | None:
        """Return an explanation if the device computes ``feature``, a precision, in a slower precision; otherwise ``None``.

        Steps in an emulated precision are measured all the same, because they need the same bytes. But ``gpumem advise``
        does not suggest an emulated precision.
        """
        return None

    def why_cannot_run(self, error: BaseException) -> str | None:
        """Return the message of ``error`` if the error means that the device lacks a feature; ``None`` for other errors."""
        return None

    def tf32(self, allowed: bool) -> AbstractContextManager[object]:
        """Return a context that allows or forbids TF32 in float32 matrix products and convolutions.

        By default, the context does nothing.
        """
        return nullcontext()

    def libraries(self) -> Mapping[str, str]:
        """Return the releases of the libraries that affected memory figures since the last `forget_libraries`.

        For example, ``{"emulated_cudnn": "9.10.2"}`` if convolutions ran on an emulated GPU. The result becomes a part of
        the measurement's environment. By contrast, `environment` has details common to all steps.
        """
        return {}

    def forget_libraries(self) -> None:
        """Let `libraries` forget all libraries so far, because a new measurement begins."""

    # Random numbers

    def random_devices(self) -> Sequence[int]:
        """Return the indices of accelerators with a random number generator of their own, besides the host's."""
        return ()

    def random_state(self, index: int) -> torch.Tensor:
        """Return the state of an accelerator's random number generator, as a tensor of bytes on the host."""
        import torch

        return cast("torch.Tensor", torch.get_device_module(self.torch_device).get_rng_state(index))

    def set_random_state(self, state: torch.Tensor, index: int) -> None:
        """Restore an accelerator's random number generator to a state from `random_state`."""
        import torch

        torch.get_device_module(self.torch_device).set_rng_state(state, index)

    # Counting

    def open(self) -> None:
        """Begin to count bytes. Until `close`, this process shares `lock` with other processes' measured tests.

        Raises:
            DeviceUnavailable: Allocations cannot be counted on this device.
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
        """Begin to count bytes, as a part of `open`. Callbacks and contexts added to ``undo`` end at `close`.

        By default, the peak is saved whenever measured code resets it, for example by
        ``torch.cuda.reset_peak_memory_stats()``.
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
        """Return a context for several readings in a row, between which nothing is allocated or freed.

        A device whose readings are slow can read its counters once and return the same figures within the context.
        """
        return nullcontext()

    def synchronize(self) -> None:
        """Wait until the device has finished all queued work."""

    def quiesce(self) -> None:
        """Free memory that no program uses: collect garbage, drop the backend's caches and workspaces, wait for the device."""
        gc.collect()
        self.release_workspaces()

    def settle(self) -> None:
        """Do the same as `quiesce` between two steps, but keep the program's workspaces."""
        gc.collect()
        self.empty_cache()

    def empty_cache(self) -> None:
        """Wait for the device, and return its allocator's cached memory to the device."""
        self.synchronize()

    def release_workspaces(self) -> None:
        """Wait for the device, and drop memory kept by the backend between operations. Such memory is not a leak."""
        self.empty_cache()

    def restore_workspaces(self) -> None:
        """Allocate again, as far as possible, the workspaces that the last `release_workspaces` dropped."""

    def workspaces(self) -> tuple[int, ...]:
        """Return the bytes in the backend's workspaces on each device in `everywhere`.

        If the method drops workspaces to count them, it allocates them again. A device that overrides
        `release_workspaces` must override this method as well.
        """
        return (0,) * len(self.everywhere)

    @contextmanager
    def transient_workspaces(self) -> Iterator[list[int]]:
        """Yield a list. When the context ends, the list has the workspace bytes in the peak on each device in `everywhere`.

        A workspace is counted only if it is freed right after its operation.
        """
        yield [0] * len(self.everywhere)

    def reserved(self) -> int | None:
        """Return the bytes that the allocator has reserved on the device; ``None`` if the allocator reserves nothing."""
        return None

    def unused(self) -> int:
        """Return the reserved bytes that no tensor uses. The next step may use them."""
        return 0

    def turnover(self) -> int:
        """Return the bytes of all allocations so far, including freed memory; 0 if the device does not count them.

        Only the difference between two calls is meaningful.
        """
        return 0

    def published(self) -> int | None:
        """Return the live bytes that this process publishes (`SharedBytes`); ``None`` if they are not known.

        Their zero is another one than that of `live`.
        """
        return None if self.publishing is None else self.publishing.own(self.torch_device.index or 0)

    def published_excess(self) -> int | None:
        """Return the published bytes minus the live bytes, from their own zero; ``None`` if they are not known.

        A missed free raises the difference. If it falls in a region, a block freed before the region was subtracted within it.
        Then the published bytes are too low there.
        """
        published = self.published()
        return None if published is None else published - self.live()

    def pop_peak(self) -> Peak:
        """Return the peak since the last call (or `open`), and set the device's peak to the current live bytes.

        The returned peak also counts in every open window.
        """
        peak = highest(self._kept, self.peak())
        # Clear `_kept` after the reset, because this reset also calls `keep_peak` (through `before_each_reset`).
        self.reset_peak()
        self._kept = None
        for window in self._windows:
            window.see(peak)
        return peak

    def keep_peak(self) -> None:
        """Save the current peak for `pop_peak`, because measured code is about to reset the device's peak.

        The peaks of `others` are saved as well, because the code may reset the peak of any GPU.
        """
        self._kept = highest(self._kept, self.peak())
        for other in self.others:
            # `open` opens and resets the other devices one after another, so some of them may not be open yet.
            if other._undo is not None:  # noqa: SLF001 - of this class
                other.keep_peak()

    def open_window(self) -> Window:
        """Open and return a window. It records the peaks until `close_window`. Several windows may be open at once."""
        self.pop_peak()
        if not self._windows:
            self.forget_libraries()
        window = Window(of_others=tuple(other.open_window() for other in self.others))
        self._windows = (*self._windows, window)
        return window

    def split(self, window: Window) -> None:
        """End the current part of ``window``, and begin the next part at the same moment."""
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
        """Yield a window. It is open during the context.

        If the code in the context raises an error, this error is raised, even if closing the window fails as well.
        """
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
        """Hide the peak within this context from every open window."""
        with nullcontext() if self.publishing is None else self.publishing.own_paused():
            self.keep_peak()
            peak_before = self._kept
            try:
                with ExitStack() as ignoring:
                    for other in self.others:
                        ignoring.enter_context(other.peak_ignored())
                    yield
                # `CpuDevice` computes its peak from allocation events, so it must read the events before the peak is reset.
                self.peak()
            except BaseException:
                with suppress(MeasuringError):
                    self.peak()
                raise
            finally:
                self.reset_peak()
                self._kept = peak_before

    def register_existing(self, storages: Iterable[torch.UntypedStorage]) -> None:
        """Register storages that were allocated before `open`, so the device notices when they are freed."""

    def hold_known(self) -> None:
        """Ensure that frees missed so far, for example in gloo's threads, do not change later readings."""

    def known(self) -> BlockIds:
        """Return addresses and numbers of the live blocks. The result is empty if the device counts no individual blocks."""
        return frozenset()

    def blocks(self) -> Blocks:
        """Return the live blocks. The result is empty if the device counts no individual blocks."""
        return {}

    @contextmanager
    def recorded(self, tokens: list[Token], *, operands: bool = True) -> Iterator[list[Profile]]:
        """Record allocations, and the operators and marks during which they happen, as tokens.

        `live` and `peak` cannot be called within the context.

        Args:
            tokens: An empty list, to which the tokens are added when the context ends.
            operands: Whether to record the operators' input tensors. The profile then keeps the inner tensors of
                `torch.vmap` and the components of sparse CSR tensors alive (see `profiled`).

        Yields:
            A list with the profile. Clear the list after the context to free the tensors kept alive by the profile.

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
        """Write the allocator's snapshot from the latest `recorded` context to the file ``path``. Raises ``OSError``.

        The default writes no file, because most allocators make no snapshots.
        """

    def unrecorded(self) -> AbstractContextManager[None]:
        """Return a context for timing, in which no allocations are recorded, so steps run at full speed.

        The peak within the context does not count in any window. The device may miss allocations and frees within the
        context, so call `reconcile` afterwards.
        """
        return self.peak_ignored()

    def reconcile(self, since: BlockIds, storages: Iterable[torch.UntypedStorage]) -> None:
        """Correct the live blocks after a context in which the device missed allocations and frees.

        Args:
            since: The result of `known` before the context. These blocks remain live.
            storages: The storages of all live tensors. Any other block counts as freed unless it is in ``since``.
        """

    @contextmanager
    def peak_from_now_on(self) -> Iterator[Callable[[], Peak] | None]:
        """Yield a function that returns the peak since the context began, including memory from before the context.

        Resets by other code do not affect this peak. A device whose allocator reserves nothing yields ``None``.
        """
        yield None

    def gpu_use(self) -> GpuUse | None:
        """Return the memory outside this process's allocator: other programs' bytes, and this process's CUDA context.

        The result is ``None`` if the device cannot report such memory. The device may be closed.
        """
        return None

    def bytes_by_pid(self) -> Mapping[int, int | None] | None:
        """Return the bytes of each process on the device by its pid; ``None`` for a process with unknown bytes.

        The result is ``None`` if the device cannot list processes.
        """
        return None

    # Timing

    def lost(self) -> str | None:
        """Return the reason why readings since the last call (or `open`) are invalid; ``None`` if they are valid."""
        return None

    def take_reads(self) -> UnknownReads:
        """Return the reads of uncomputed values since the last call (or `open`)."""
        return NOTHING_READ

    def routed(self, routing: Routing | None) -> AbstractContextManager[None]:
        """Return a context in which an emulated GPU assumes how a mixture of experts routes its tokens.

        ``None`` keeps the current assumption. A device that computes values needs no assumption and ignores ``routing``.
        """
        return nullcontext()

    def choices_assumed(self) -> int:
        """Return how often an emulated GPU has assumed the choice of experts so far."""
        return 0

    def time(self, run: Callable[[], object]) -> float:
        """Call ``run``, and return its duration on the device in seconds."""
        return self.laps([run])[0]

    def laps(self, runs: Sequence[Callable[[], object]]) -> list[float]:
        """Call each function in ``runs`` in turn, and return their durations on the device in seconds.

        The default waits for the device after each call, and then reads the host's clock.
        """
        self.synchronize()
        borders = [time.perf_counter()]
        for run in runs:
            run()
            self.synchronize()
            borders.append(time.perf_counter())
        return [end - start for start, end in itertools.pairwise(borders)]

    def launches(self, run: Callable[[], object]) -> Mapping[str, int] | None:
        """Call ``run``, and return the number of launches of each kernel by the kernel's name.

        A device without kernels does not call ``run``, and returns ``None``.
        """
        return None

    def conditions(self) -> Conditions:
        """Return counters that reveal interference by other processes. The call is so fast that rounds of timing can call it.

        One counter is the time for which the calling thread waited for a CPU core. So call the method before and after a
        round in the same thread.
        """
        return Conditions(time.perf_counter(), graphs=compiled_graphs(), waited=proc.waited_seconds())

    def pace(self) -> float | None:
        """Return the device's current speed, in cycles per second; ``None`` if it is unknown.

        A step's seconds times this speed are its time in cycles. For example, 10 ms at 1.98 GHz are 19.8 million cycles. On
        CUDA the speed is the SM clock in Hz. Call the method right after a timing round, because an idle GPU lowers its clock.
        On the CPU a cycle is one run of a fixed workload, so this method runs the workload. Call it inside `unrecorded`.
        """
        return None

    @contextmanager
    def exclusive(self) -> Iterator[str | None]:
        """Reserve the device for this process during timing. Contexts may be nested.

        Outside this context, an open device is shared with the same user's other processes. Within the context, measured tests
        in those processes wait.

        Yields:
            ``None``, or the reason why other processes may use the device at the same time.
        """
        if self._undo is None:
            raise RuntimeError(f"the {self.name} device is not open")
        with nullcontext() if self.lock is None else self.lock.exclusive() as refused:
            yield refused
