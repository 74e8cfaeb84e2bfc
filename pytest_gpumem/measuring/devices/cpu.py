"""The CPU as a device. Its bytes are sums over torch's allocations and frees, which PyTorch's profiler records.

The process's RSS cannot replace these sums, because it includes the interpreter and caches, and varies between runs.
"""

from __future__ import annotations

import functools
import os
import platform
from contextlib import contextmanager, nullcontext, suppress
from dataclasses import replace
from typing import TYPE_CHECKING, Any, cast

from pytest_gpumem.base.errors import DeviceUnavailable, MeasuringError
from pytest_gpumem.base.variables import ONEDNN_MAX_CPU_ISA
from pytest_gpumem.emulating.emulated_process.before_torch import COUNTER
from pytest_gpumem.emulating.emulated_process.counter_library import counter_library
from pytest_gpumem.facts.measurement import Environment
from pytest_gpumem.facts.values.events import AllocationEvent
from pytest_gpumem.measuring.devices import proc
from pytest_gpumem.measuring.devices.contract import Device
from pytest_gpumem.measuring.devices.live_blocks import FreeCallbacks, LiveBlocks
from pytest_gpumem.measuring.devices.load_source import with_load
from pytest_gpumem.measuring.devices.profiled import tokens_of
from pytest_gpumem.measuring.devices.reference_workload import ReferenceWorkload
from pytest_gpumem.measuring.ranks.consensus import let_threads_rest
from pytest_gpumem.torch_support.private_api.dispatch import beneath_modes
from pytest_gpumem.torch_support.private_api.distributed import around_collectives
from pytest_gpumem.torch_support.private_api.numerics import bfloat16_instructions
from pytest_gpumem.torch_support.private_api.profiler import allocation_events, quiet_kineto, recording_no_operators

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
    from contextlib import ExitStack

    import torch

    from pytest_gpumem.facts.values.events import Token
    from pytest_gpumem.facts.values.interference import Conditions
    from pytest_gpumem.measuring.devices.contract import BlockIds, Blocks, Peak
    from pytest_gpumem.measuring.devices.device_lock import DeviceLock
    from pytest_gpumem.measuring.devices.live_blocks import AnyToken
    from pytest_gpumem.torch_support.private_api.profiler import Profile

_PROBE_BYTES = 61
"""The size of a probe: the last allocation in each recording. If the probe is missing, the recording was cut short."""

_LACKS = {
    "tf32": "TF32 is a format of NVIDIA GPUs, and this is a CPU",
    "cp": "context parallelism needs the attention kernels of a GPU, and this is a CPU",
    "offload": "offloading moves tensors from a GPU to the host, and the CPU is the host",
}

_CUT_SHORT = (
    "the recording of host allocations was cut short: only one profiler can run at a time, "
    "and the measured code started or stopped another profiler"
)


class CpuDevice(Device):
    """The CPU, whose memory is the host memory of torch's tensors.

    For example, ``torch.ones(256)`` raises `live` by 1,024 bytes.

    While the device is open, torch uses a single intra-op thread. Some kernels allocate scratch memory for each thread, for
    example ``scaled_dot_product_attention``, so memory would otherwise depend on the number of cores. The device counts only
    allocations in the thread that called `open`. On the CPU, backward runs in this thread as well.

    Other processes' measured tests wait while this device holds its ``lock`` alone. Without a lock, they never wait.
    """

    name = "cpu"
    tells_time = True
    seconds_between_readings = 0.1
    """`pace` and `conditions` evict the step's data from the caches. Afterwards, small steps take 1.3 % to 2.7 % longer for 9
    ms. So readings are at least 0.1 s apart."""

    def __init__(
        self, lock: DeviceLock | None = None, *, other_ranks: Callable[[], Sequence[int]] | None = None
    ) -> None:
        """Create a closed device.

        Args:
            lock: The lock that makes other processes' measured tests wait; ``None`` if they need not wait.
            other_ranks: Returns the pids of the job's other ranks on this machine. Called at most once. ``None`` outside
                distributed jobs.
        """
        self.lock = lock
        self._other_ranks = None if other_ranks is None else functools.cache(other_ranks)
        self._live_blocks = LiveBlocks()
        self._free_callbacks = FreeCallbacks()
        self._profiler: Profile | None = None
        self._records_operators = False
        self._in_one_moment = False
        self._reference_workload: ReferenceWorkload | None = None

    @property
    def torch_device(self) -> torch.device:
        import torch

        with beneath_modes():
            return torch.device("cpu")

    def environment(self) -> Environment:
        import torch

        machine = platform.machine() or "unknown"
        instructions = bfloat16_instructions()
        limit = os.environ.get(ONEDNN_MAX_CPU_ISA)
        bfloat16 = instructions if instructions is None or not limit else f"{instructions}, at most {limit}"
        return Environment(
            slug=f"cpu-{machine.lower()}",
            device=f"CPU ({machine})",
            details={
                "torch": str(torch.__version__),
                "cpu_capability": torch.backends.cpu.get_cpu_capability(),
                **({} if bfloat16 is None else {"cpu_bfloat16": bfloat16}),
                "machine": proc.machine(),
            },
        )

    def lacks(self, feature: str) -> str | None:
        import torch

        if feature == "fully_shard" and not hasattr(torch.cpu.current_stream(), "record_event"):
            return f"fully_shard records events, and torch {torch.__version__} has no events on a CPU"
        if feature == "processes":
            library = counter_library()
            return library if isinstance(library, str) else None
        return _LACKS.get(feature)

    def variables_of_processes(self) -> Mapping[str, str]:
        library = counter_library()
        return {} if isinstance(library, str) else {COUNTER: str(library)}

    def start(self, undo: ExitStack) -> None:
        import torch

        undo.callback(torch.set_num_threads, torch.get_num_threads())
        torch.set_num_threads(1)
        self._live_blocks = LiveBlocks()
        self._free_callbacks = FreeCallbacks()
        undo.callback(self._end)
        if self._other_ranks is not None:
            undo.enter_context(around_collectives(self._let_threads_release, self._leaving_nothing))
        try:
            self._start()
            self._live_blocks.apply(self._stop(allocation_events))
            self._start()
        except (MeasuringError, RuntimeError) as error:
            raise DeviceUnavailable(
                f"torch {torch.__version__} does not report host allocations to a profiler here ({error})"
            ) from None

    @contextmanager
    def one_moment(self) -> Iterator[None]:
        self._flush()
        self._in_one_moment = True
        try:
            yield
        finally:
            self._in_one_moment = False

    def live(self) -> int:
        self._flush()
        return self._live_blocks.live

    def peak(self) -> Peak:
        self._flush()
        return self._live_blocks.peak

    def reset_peak(self) -> None:
        self._live_blocks.reset_peak()

    def turnover(self) -> int:
        return self._live_blocks.turnover

    def register_existing(self, storages: Iterable[torch.UntypedStorage]) -> None:
        self._flush()
        known_addresses = self._live_blocks.addresses
        for storage in storages:
            address = storage.data_ptr()
            if address not in known_addresses:
                self._live_blocks.register_existing({address: storage.nbytes()})
                self._free_callbacks.watch(storage, recording=lambda: self._profiler is not None)

    def hold_known(self) -> None:
        self._flush()
        self._live_blocks.hold_known()

    def known(self) -> BlockIds:
        self._flush()
        return self._live_blocks.known

    def blocks(self) -> Blocks:
        self._flush()
        return self._live_blocks.blocks

    @contextmanager
    def recorded(self, tokens: list[Token], *, operands: bool = True) -> Iterator[list[Profile]]:
        self._pause()
        # The caller deletes this profile only after the next profiler has started. So the next profiler reports the frees of
        # tensors kept alive by this profile.
        profiles = [self._start(operators=True, operands=operands)]
        try:
            yield profiles
        finally:
            try:
                recorded = self._stop(lambda profiler: tokens_of(profiler, self.torch_device))
                self._live_blocks.apply(token for token in recorded if isinstance(token, AllocationEvent))
                tokens.extend(recorded)
            finally:
                if self._undo is not None and self._profiler is None:
                    self._start()

    @contextmanager
    def unrecorded(self) -> Iterator[None]:
        self._pause()
        try:
            yield
        finally:
            self._start()

    def reconcile(self, since: BlockIds, storages: Iterable[torch.UntypedStorage]) -> None:
        self._flush()
        known_addresses = self._live_blocks.addresses
        blocks: dict[int, int] = {}
        for storage in storages:
            address = storage.data_ptr()
            if address not in known_addresses and address not in blocks:
                self._free_callbacks.watch(storage, recording=lambda: self._profiler is not None)
            blocks[address] = storage.nbytes()
        self._live_blocks.restrict(since, blocks)

    def conditions(self) -> Conditions:
        conditions = replace(super().conditions(), tick=proc.tick_seconds())
        return with_load(conditions, () if self._other_ranks is None else self._other_ranks())

    def pace(self) -> float:
        if self._reference_workload is None:
            self._reference_workload = ReferenceWorkload()
        return self._reference_workload.pace()

    def _let_threads_release(self) -> None:
        """Wait until the threads of a collective have freed their blocks. The profiler does not report these frees."""
        if self._profiler is not None:
            let_threads_rest()

    @contextmanager
    def _leaving_nothing(self) -> Iterator[None]:
        """At the end of the context, count all blocks allocated within the context as freed.

        Another thread may free some of these blocks, and the profiler does not report its frees.
        """
        if self._profiler is None or self._records_operators:  # a recording with operators must not be interrupted
            yield
            return
        known_blocks = self.known()
        yield
        self._let_threads_release()
        self._flush()
        self._live_blocks.keep_only(known_blocks)

    def _end(self) -> None:
        if self._profiler is not None:
            with suppress(MeasuringError):
                self._stop(allocation_events)

    def _start(self, *, operators: bool = False, operands: bool = False) -> Profile:
        # torch.profiler.profile, which wraps this class, would load torch's compiler (2 s) and slow down readings by 50 %.
        from torch.autograd.profiler import profile

        profiler: Any = profile(use_kineto=True, profile_memory=True, record_shapes=operands)
        with quiet_kineto(), nullcontext() if operators else recording_no_operators():
            profiler.__enter__()
        self._profiler, self._records_operators = profiler, operators
        return cast("Profile", profiler)

    def _stop(self, read: Callable[[Profile], list[AnyToken]]) -> list[AnyToken | AllocationEvent]:
        """Stop the profiler. Return the profiler's tokens from ``read``, with the frees of watched storages inserted."""
        import torch

        profiler: Any = self._profiler
        if profiler is None:
            raise RuntimeError("the cpu device is not open")
        self._profiler = None
        # Allocate a probe as the last recorded allocation. If the probe is missing, the recording was cut short. A dispatch
        # mode that the test has entered would see the probe, and `FakeTensorMode` would replace it. So allocate it beneath
        # these modes.
        with beneath_modes():
            torch.empty(_PROBE_BYTES, dtype=torch.uint8, device="cpu")
        try:
            profiler.__exit__(None, None, None)
            tokens = read(profiler)
        except (
            RuntimeError
        ):  # torch 2.6 raises if other code has stopped the profiler, and later releases return no events
            tokens = []
        # The probe is freed at once, so its allocation and its free are the last two events.
        last_two = [index for index, token in enumerate(tokens) if isinstance(token, AllocationEvent)][-2:]
        probe = [token.nbytes for index in last_two if isinstance(token := tokens[index], AllocationEvent)]
        if probe != [_PROBE_BYTES, -_PROBE_BYTES]:
            raise MeasuringError(_CUT_SHORT)
        return self._free_callbacks.put_into([token for index, token in enumerate(tokens) if index not in last_two])

    def _pause(self) -> None:
        """Apply the recorded events and stop recording. If the recording was cut short, start a new one and raise an error."""
        try:
            self._live_blocks.apply(self._stop(allocation_events))
        except MeasuringError:
            self._start()
            raise

    def _flush(self) -> None:
        if self._in_one_moment:
            return
        try:
            self._live_blocks.apply(self._stop(allocation_events))
        finally:
            if self._undo is not None and self._profiler is None:
                self._start()
