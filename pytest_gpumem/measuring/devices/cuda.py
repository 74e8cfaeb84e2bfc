"""A CUDA GPU as a device. Its bytes come from the caching allocator's statistics.

Individual allocations come from the allocator's history and PyTorch's profiler.
"""

from __future__ import annotations

import functools
import gc
import os
import pickle
import re
from contextlib import contextmanager
from dataclasses import replace
from typing import TYPE_CHECKING

from pytest_gpumem.base.atomic_file import replacing
from pytest_gpumem.base.errors import DeviceUnavailable
from pytest_gpumem.base.variables import ALLOC_CONF, CUDA_ALLOC_CONF
from pytest_gpumem.emulating.emulation.load import CONTEXT_BYTES
from pytest_gpumem.facts.measurement import Environment
from pytest_gpumem.measuring.devices import proc
from pytest_gpumem.measuring.devices.capability import lacking
from pytest_gpumem.measuring.devices.contract import Device, Peak
from pytest_gpumem.measuring.devices.cuda_history import in_order_of_time, live_blocks, with_requested_sizes
from pytest_gpumem.measuring.devices.cuda_workspaces import Workspaces, transient_in_peak
from pytest_gpumem.measuring.devices.load_source import siblings_with, with_load
from pytest_gpumem.measuring.devices.memory_ledger import DeviceMemory
from pytest_gpumem.measuring.devices.profiled import check_change
from pytest_gpumem.torch_support.private_api.numerics import tf32_allowed
from pytest_gpumem.torch_support.reset_guard import before_each_reset

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator, Mapping, Sequence
    from contextlib import AbstractContextManager, ExitStack
    from pathlib import Path

    import torch

    from pytest_gpumem.facts.values.events import Token
    from pytest_gpumem.facts.values.gpu_use import GpuUse
    from pytest_gpumem.facts.values.interference import Conditions
    from pytest_gpumem.measuring.devices.contract import Blocks
    from pytest_gpumem.measuring.devices.cuda_runtime import TorchCuda
    from pytest_gpumem.measuring.devices.device_lock import DeviceLock
    from pytest_gpumem.measuring.devices.memory_ledger import MemoryLedger
    from pytest_gpumem.torch_support.private_api.profiler import Profile


_PROBE_BYTES = 4096
_REQUESTED, _ALLOCATED = "requested_bytes", "allocated_bytes"
_AMPERE = (8, 0)
_BFLOAT16 = frozenset({"amp-bf16", "bf16", "mp-bf16"})


def cuda_slug(device: str) -> str:
    """Return the slug for a GPU's name: ``"NVIDIA H100 80GB HBM3"`` becomes ``"nvidia-h100-80gb-hbm3"``."""
    return re.sub(r"[^a-z0-9]+", "-", device.lower()).strip("-")


class CudaDevice(Device):
    """The current CUDA GPU, whose memory is the memory of tensors in torch's caching allocator.

    `Peak.allocated` is the allocator's statistic ``requested_bytes``, the sum of the tensors' sizes before rounding. By
    contrast, ``allocated_bytes`` is the sum after rounding, and depends on the order of the tests, because the allocator rounds
    a size according to the free blocks in its cache. If an allocator has no ``requested_bytes``, ``allocated_bytes`` is used.

    For example, a tensor with 5,000 bytes counts as 5,000 requested bytes and 5,120 allocated bytes, a multiple of 512.

    Args:
        runtime: The calls to torch.cuda for this GPU.
        lock: The lock that makes other processes' measured tests wait during timing. Without a lock, they never wait.
        ledger: The ledger in which each process reserves memory under ``--gpumem-pack``. Without a ledger, several tests
            cannot share the GPU.
        others: The other GPUs that this process sees.
    """

    name = "cuda"
    memory_title = "GPU memory"
    tells_time = True

    def __init__(
        self,
        runtime: TorchCuda,
        lock: DeviceLock | None = None,
        ledger: MemoryLedger | None = None,
        others: Sequence[OtherGpu] = (),
    ) -> None:
        self.runtime = runtime
        self.lock = lock
        self.others = self._others = tuple(others)
        self.shared_memory = None if ledger is None else CudaMemory(runtime, ledger)
        self._counter = _REQUESTED
        self._snapshot: object = None
        self._workspaces = Workspaces(self, others)

    @property
    def torch_device(self) -> torch.device:
        return self.runtime.torch_device()

    def environment(self) -> Environment:
        import torch

        properties = self.runtime.properties()
        allocator = ",".join(value for name in (ALLOC_CONF, CUDA_ALLOC_CONF) if (value := os.environ.get(name)))
        details: dict[str, str | int] = {
            "total_memory": properties.total_memory,
            "torch": str(torch.__version__),
            "cuda": str(torch.version.cuda),
            "driver": properties.driver,
            "allocator": allocator or "default",
            "machine": proc.machine(),
        }
        return Environment(slug=cuda_slug(properties.name), device=properties.name, details=details)

    def lacks(self, feature: str) -> str | None:
        if feature != "tf32" or self._capability >= _AMPERE:
            return None
        return f"TF32 needs a GPU of compute capability 8.0, and this one has {self._version}"

    def emulates(self, feature: str) -> str | None:
        # Before Ampere, cuBLAS and torch's kernels compute in float32, although torch.cuda.is_bf16_supported() is true.
        if feature not in _BFLOAT16 or self._capability >= _AMPERE:
            return None
        return (
            f"torch emulates bfloat16 slowly on a GPU of compute capability {self._version}; a GPU of 8.0 or higher "
            "computes in bfloat16"
        )

    def why_cannot_run(self, error: BaseException) -> str | None:
        return lacking(f"{type(error).__name__}: {error}", self._capability)

    @property
    def _capability(self) -> tuple[int, int]:
        return self.runtime.properties().capability

    @property
    def _version(self) -> str:
        return ".".join(map(str, self._capability))

    def random_devices(self) -> tuple[int, ...]:
        indices = (device.torch_device.index for device in self.everywhere)
        return tuple(index for index in indices if index is not None)

    def tf32(self, allowed: bool) -> AbstractContextManager[object]:
        return tf32_allowed(allowed)

    @contextmanager
    def peak_from_now_on(self) -> Iterator[Callable[[], Peak] | None]:
        import torch

        from pytest_gpumem.emulating.emulated_process.cuda_statistics import CudaStatistics
        from pytest_gpumem.emulating.emulated_process.kept_peaks import KeptPeaks

        peaks = KeptPeaks(CudaStatistics())
        self.empty_cache()
        torch.cuda.reset_peak_memory_stats(self.torch_device)

        def peak() -> Peak:
            peaks.take()
            indices = self.random_devices()
            return Peak(max(peaks.allocated[i] for i in indices), max(peaks.reserved[i] for i in indices))

        with before_each_reset(peaks.take, "cuda"):
            yield peak

    def start(self, undo: ExitStack) -> None:
        self._counter = self._probe()
        for other in self._others:
            other._counter = self._counter  # noqa: SLF001 - of this class
        super().start(undo)

    def close(self) -> None:
        super().close()
        self._snapshot = None

    def synchronize(self) -> None:
        self.runtime.synchronize()
        for other in self._others:
            other.synchronize()

    def finish_backward(self) -> None:
        """Wait until autograd's threads have released their tensors. Tensors released later would count as workspaces."""
        self.runtime.finish_backward()
        for other in self._others:
            other.finish_backward()

    def empty_cache(self) -> None:
        # A block used by another stream is freed after an event on this other stream. `empty_cache` checks for such events.
        self.finish_backward()
        self.synchronize()
        self.runtime.empty_cache()

    def release_workspaces(self) -> None:
        self._workspaces.release()

    def restore_workspaces(self) -> None:
        self._workspaces.restore()

    def workspaces(self) -> tuple[int, ...]:
        return self._workspaces.count()

    @contextmanager
    def transient_workspaces(self) -> Iterator[list[int]]:
        nbytes = [0] * len(self.everywhere)
        has_history = self._counter == _REQUESTED and not self._workspaces.are_kept
        sizes = self.runtime.workspace_sizes() if has_history else frozenset()
        if not sizes:
            yield nbytes
            return
        with self.runtime.traced() as traces:
            yield nbytes
        sizes |= self.runtime.workspace_sizes()  # the measured code may have configured other sizes
        nbytes[:] = [
            transient_in_peak(traces.get(device.torch_device.index or 0, ()), sizes) for device in self.everywhere
        ]

    def live(self) -> int:
        return self._statistic(f"{self._counter}.all.current")

    def reserved(self) -> int | None:
        return self._statistic("reserved_bytes.all.current")

    def unused(self) -> int:
        return self._statistic("reserved_bytes.all.current") - self._statistic(f"{_ALLOCATED}.all.current")

    def peak(self) -> Peak:
        return Peak(self._statistic(f"{self._counter}.all.peak"), self._statistic("reserved_bytes.all.peak"))

    def reset_peak(self) -> None:
        self.runtime.reset_peaks()

    def turnover(self) -> int:
        return self._statistic(f"{self._counter}.all.allocated")

    def published(self) -> int | None:
        published = super().published()
        if published is None or not self.runtime.reports_allocations():
            return None
        # A block used by another stream is freed later, without a report.
        return published if published == self._statistic(f"{_ALLOCATED}.all.current") else None

    def published_excess(self) -> int | None:
        return None if self.published() is None else 0

    def blocks(self) -> Blocks:
        size = "requested_size" if self._counter == _REQUESTED else "size"
        return live_blocks(self.runtime.segments(), size)

    @contextmanager
    def recorded(self, tokens: list[Token], *, operands: bool = True) -> Iterator[list[Profile]]:
        self._snapshot = None
        live_before = self.live()
        requested = self._counter == _REQUESTED
        with self.unrecorded(), self.runtime.recorded(with_history=requested, operands=operands) as region:
            yield region.profiles
        self._snapshot = region.snapshot
        tokens_in_order = in_order_of_time(region.tokens)
        if requested:
            tokens_in_order = with_requested_sizes(tokens_in_order, region.history)
        check_change(
            tokens_in_order, self.live() - live_before, "the GPU", f"the allocator's statistics ({self._counter})"
        )
        tokens.extend(tokens_in_order)

    def keep_snapshot(self, path: Path) -> None:
        if self._snapshot is not None:
            with replacing(path) as file:
                pickle.dump(self._snapshot, file)

    def laps(self, runs: Sequence[Callable[[], object]]) -> list[float]:
        used = [other.torch_device.index for other in self._others if other.is_used]
        return self.runtime.laps(runs, used) if used else self.runtime.laps(runs)

    def launches(self, run: Callable[[], object]) -> Mapping[str, int] | None:
        def run_and_wait() -> None:
            run()
            self.synchronize()

        return self.runtime.launches(run_and_wait)

    def conditions(self) -> Conditions:
        """Return the counters of `Device.conditions`, and the GPU's clocks and other processes.

        Without children, only the calling thread launches kernels, so no load on the CPU is included. With children, their wait
        for a core has a bound, but stolen time and other busy cores are left out.
        """
        gpu = self.runtime.gpu()
        conditions = super().conditions()
        if conditions.waited is not None and proc.seconds_of_children() > 0:
            loaded = with_load(conditions, self._other_ranks)
            conditions = replace(loaded, tick=proc.tick_seconds(), stolen=None, cores=None)
        return replace(
            conditions,
            retries=self.runtime.statistics().get("num_alloc_retries"),
            clock_events=gpu.clock_events,
            sm_clock=gpu.sm_clock,
            sm_clock_default=gpu.sm_clock_default,
            other_processes=gpu.other_processes.number if gpu.other_processes is not None else None,
            other_pids=gpu.other_processes.pids if gpu.other_processes is not None else frozenset(),
        )

    @functools.cached_property
    def _other_ranks(self) -> tuple[int, ...]:
        return siblings_with("MASTER_PORT")

    def pace(self) -> float | None:
        return self.runtime.sm_clock()

    def gpu_use(self) -> GpuUse | None:
        return self.runtime.gpu_use()

    def bytes_by_pid(self) -> Mapping[int, int | None] | None:
        return self.runtime.bytes_by_pid()

    def _statistic(self, name: str) -> int:
        if self._undo is None:
            raise RuntimeError("the cuda device is not open")
        return self.runtime.statistics()[name]

    def _probe(self) -> str:
        """Allocate a tensor, and return the name of the statistic that counts its bytes.

        Raises:
            DeviceUnavailable: No statistic counts the tensor, because of ``PYTORCH_NO_CUDA_MEMORY_CACHING=1`` or a pluggable
                allocator without statistics. Each measurement would be 0 bytes, so each test would meet its budget.
        """
        statistics_before = self.runtime.statistics()
        tensor = self.runtime.allocate(_PROBE_BYTES)
        statistics_after = self.runtime.statistics()
        del tensor
        for counter in (_REQUESTED, _ALLOCATED):
            name = f"{counter}.all.current"
            if statistics_after.get(name, 0) - statistics_before.get(name, 0) >= _PROBE_BYTES:
                return counter
        raise DeviceUnavailable(
            "the CUDA allocator keeps no statistics (PYTORCH_NO_CUDA_MEMORY_CACHING, or a custom allocator): after an "
            f"allocation of {_PROBE_BYTES} bytes it still reports "
            f"{statistics_after.get('allocated_bytes.all.current', 0)} bytes"
        )


class OtherGpu(CudaDevice):
    """A further GPU in a process, which is measured together with the current GPU.

    Until the process uses this GPU, this class neither allocates memory on it nor waits for it. Either action would create a
    CUDA context, which takes hundreds of MB on the GPU.
    """

    def __init__(self, runtime: TorchCuda) -> None:
        super().__init__(runtime)
        self.name = str(self.torch_device)

    @property
    def is_used(self) -> bool:
        return self.runtime.has_allocated()

    def start(self, undo: ExitStack) -> None:
        """Do nothing, because the current GPU's `CudaDevice` saves all GPUs' peaks before each reset."""

    def synchronize(self) -> None:
        if self.is_used:
            super().synchronize()

    def finish_backward(self) -> None:
        if self.is_used:
            super().finish_backward()

    def reset_peak(self) -> None:
        if self.is_used:
            super().reset_peak()

    def _statistic(self, name: str) -> int:
        return super()._statistic(name) if self.is_used else 0


class CudaMemory:
    """A GPU's memory, which processes share under ``--gpumem-pack`` (see `SharedMemory`).

    A process holds its CUDA context and its allocator's reserved memory. The context's size is the process's
    memory according to NVML minus the reserved memory. A context grows with each kernel whose code is loaded. So its size is
    assumed to be at least `CONTEXT_BYTES`, the size after many kinds of kernels have run.
    """

    def __init__(self, runtime: TorchCuda, ledger: MemoryLedger) -> None:
        self.ledger = ledger
        self._runtime = runtime

    def now(self) -> DeviceMemory:
        free, total = self._runtime.free_and_total()
        return DeviceMemory(total, free, self._context() + self._reserved())

    def limit(self, most: int | None) -> None:
        _, total = self._runtime.free_and_total()
        self._runtime.limit(1.0 if most is None else min(1.0, max(0, most - self._context()) / total))

    def release(self) -> None:
        gc.collect()
        self._runtime.synchronize()
        self._runtime.clear_workspaces()
        self._runtime.empty_cache()

    def refusals(self) -> int:
        return self._runtime.statistics().get("num_ooms", 0)

    def _context(self) -> int:
        use = self._runtime.gpu_use()
        return CONTEXT_BYTES if use is None or use.beside_torch is None else max(CONTEXT_BYTES, use.beside_torch)

    def _reserved(self) -> int:
        return self._runtime.statistics()["reserved_bytes.all.current"]
