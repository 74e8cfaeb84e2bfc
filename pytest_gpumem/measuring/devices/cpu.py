"""The CPU as a device. The bytes come from torch's allocator events, which the profiler records.

The process's RSS would be no substitute: the RSS counts pages, the interpreter and caches, and varies between runs.
"""

from __future__ import annotations

import functools
import os
import platform
import time
from contextlib import contextmanager, nullcontext, suppress
from dataclasses import replace
from typing import TYPE_CHECKING, Any, cast

from pytest_gpumem.base.variables import ONEDNN_MAX_CPU_ISA
from pytest_gpumem.facts.measurement import Environment, MeasuringError
from pytest_gpumem.facts.values.events import AllocationEvent
from pytest_gpumem.measuring.devices import proc
from pytest_gpumem.measuring.devices.contract import Device, DeviceUnavailable
from pytest_gpumem.measuring.devices.live_blocks import FreeCallbacks, LiveBlocks
from pytest_gpumem.measuring.devices.profiled import tokens_of
from pytest_gpumem.measuring.devices.reference_workload import ReferenceWorkload
from pytest_gpumem.measuring.ranks.consensus import let_threads_rest
from pytest_gpumem.torch_support.private_api.dispatch import beneath_modes
from pytest_gpumem.torch_support.private_api.distributed import around_collectives
from pytest_gpumem.torch_support.private_api.numerics import bfloat16_instructions
from pytest_gpumem.torch_support.private_api.profiler import allocation_events, quiet_kineto, recording_no_operators

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Iterator, Sequence
    from contextlib import ExitStack

    import torch

    from pytest_gpumem.facts.values.events import Token
    from pytest_gpumem.facts.values.interference import Conditions
    from pytest_gpumem.measuring.devices.contract import BlockIds, Blocks, Peak
    from pytest_gpumem.measuring.devices.device_lock import DeviceLock
    from pytest_gpumem.measuring.devices.live_blocks import AnyToken
    from pytest_gpumem.torch_support.private_api.profiler import Profile

_PROBE_BYTES = 61
"""The size of the last allocation in each recording. If this allocation is missing, earlier events are missing as well."""

_LACKS = {
    "tf32": "TF32 is a format of NVIDIA GPUs, and this is a CPU",
    "cp": "the parts of a sequence meet in attention kernels of a GPU, and this is a CPU",
    "offload": "tensors are moved to the host, and the CPU is the host",
}

_CUT_SHORT = (
    "the recording of host allocations was cut short: only one profiler can run at a time, "
    "and the measured code started or stopped another"
)


class CpuDevice(Device):
    """Peaks of the tensors' host memory.

    Kernels allocate scratch memory for each thread (scaled_dot_product_attention, convolution backward), so figures would
    depend on the machine's cores. An open device therefore limits torch to a single intra-op thread. The device only
    counts the opening thread, and backward runs on this thread.

    For example, ``torch.ones(256)`` raises `live` by 1,024 bytes.

    While the device is open, ``lock`` shares it with other processes' measured tests. Without a lock, none wait.
    """

    name = "cpu"
    tells_time = True
    seconds_between_readings = 0.1
    """Readings of pace or conditions fill the caches. The next 9 ms of small steps then took 1.3 % to 2.7 % longer."""

    def __init__(
        self, lock: DeviceLock | None = None, *, other_ranks: Callable[[], Sequence[int]] | None = None
    ) -> None:
        """Create a closed device.

        Args:
            lock: Keeps other processes' measured tests away.
            other_ranks: Returns the processes on this machine that take part in the same steps. Called once. ``None`` if
                the process has no other ranks.
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
            return f"fully_shard of torch {torch.__version__} records events, which its CPU has none of"
        return _LACKS.get(feature)

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
        # The next profiler starts before this profile is deleted, and reports the frees of tensors from this profile.
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
        times = proc.cpu_times()
        if times is None:
            return conditions
        return replace(
            conditions, stolen=times.stolen, other_cpu_seconds=times.busy - self._own_seconds(), cores=times.cores
        )

    def _own_seconds(self) -> float:
        """Return the CPU seconds used by this process, its children, and its job's other ranks."""
        other_pids = () if self._other_ranks is None else self._other_ranks()
        return time.process_time() + proc.seconds_of_children() + proc.seconds_of(other_pids)

    def pace(self) -> float:
        if self._reference_workload is None:
            self._reference_workload = ReferenceWorkload()
        return self._reference_workload.pace()

    def _let_threads_release(self) -> None:
        """Wait until a collective's threads have freed their blocks, because the profiler does not report their frees."""
        if self._profiler is not None:
            let_threads_rest()

    @contextmanager
    def _leaving_nothing(self) -> Iterator[None]:
        """Count all blocks from inside the context as freed at its end, even if another thread frees them."""
        if self._profiler is None or self._records_operators:  # a recording of operators must not be cut in two
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
        # torch.profiler.profile wraps this class. The wrapper loads the compiler (2 s), and readings take 1.5 times as long.
        from torch.autograd.profiler import profile

        profiler: Any = profile(use_kineto=True, profile_memory=True, record_shapes=operands)
        with quiet_kineto(), nullcontext() if operators else recording_no_operators():
            profiler.__enter__()
        self._profiler, self._records_operators = profiler, operators
        return cast("Profile", profiler)

    def _stop(self, read: Callable[[Profile], list[AnyToken]]) -> list[AnyToken | AllocationEvent]:
        """Stop recording. Return the tokens from ``read``, with the frees of watched storages inserted."""
        import torch

        profiler: Any = self._profiler
        if profiler is None:
            raise RuntimeError("the cpu device is not open")
        self._profiler = None
        # A mode of the test would see the probe or replace it (`FakeTensorMode`).
        with beneath_modes():
            torch.empty(_PROBE_BYTES, dtype=torch.uint8, device="cpu")
        try:
            profiler.__exit__(None, None, None)
            tokens = read(profiler)
        except RuntimeError:  # torch 2.6 raises if other code has stopped the profiler; later releases return no events
            tokens = []
        # The probe is temporary, so its allocation and its free are the last two events.
        last_two = [index for index, token in enumerate(tokens) if isinstance(token, AllocationEvent)][-2:]
        probe = [token.nbytes for index in last_two if isinstance(token := tokens[index], AllocationEvent)]
        if probe != [_PROBE_BYTES, -_PROBE_BYTES]:
            raise MeasuringError(_CUT_SHORT)
        return self._free_callbacks.put_into([token for index, token in enumerate(tokens) if index not in last_two])

    def _pause(self) -> None:
        """Stop recording. If the recording was cut short, start again at once."""
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
