"""The calls to torch.cuda that `CudaDevice` needs, without any decisions.

Tests of `CudaDevice` replace these calls with recorded statistics from a real GPU.
"""

from __future__ import annotations

import itertools
import os
import threading
import warnings
from contextlib import contextmanager, suppress
from dataclasses import dataclass, field
from functools import cached_property
from typing import TYPE_CHECKING, Any

from pytest_gpumem.base.errors import DeviceUnavailable
from pytest_gpumem.facts.values.option_words import NO_CUDA
from pytest_gpumem.measuring.devices.cuda_history import history_of
from pytest_gpumem.measuring.devices.gpu_use import gpu_use_of
from pytest_gpumem.measuring.devices.load_source import siblings_with
from pytest_gpumem.measuring.devices.nvml import NvmlGpu
from pytest_gpumem.measuring.devices.proc import is_of_session, program_of, workers_of_session
from pytest_gpumem.measuring.devices.profiled import launches_of, profiled
from pytest_gpumem.torch_support.private_api.allocator import (
    MOST_ENTRIES,
    clear_cublas_workspaces,
    cublas_workspace_sizes,
    cuda_has_allocated,
    cuda_history_is_on,
    cuda_snapshot,
    start_cuda_history,
    stop_cuda_history,
)
from pytest_gpumem.torch_support.private_api.autograd import in_backward, run_in_backward
from pytest_gpumem.torch_support.private_api.dispatch import beneath_modes

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator, Mapping, Sequence

    import torch

    from pytest_gpumem.facts.values.events import Token
    from pytest_gpumem.facts.values.gpu_use import GpuUse
    from pytest_gpumem.measuring.devices.cuda_history import HistoryEntry
    from pytest_gpumem.measuring.devices.nvml import GpuState
    from pytest_gpumem.torch_support.private_api.profiler import Profile


@dataclass(frozen=True, slots=True)
class GpuProperties:
    """Properties of a GPU.

    ``total_memory`` is in bytes. ``driver`` is the driver's release, or begins with ``"unknown"`` if NVML does not report it.
    ``uuid`` identifies the physical GPU. ``capability`` is the compute capability, for example (9, 0) on an H100.
    """

    name: str
    total_memory: int
    driver: str
    uuid: str
    capability: tuple[int, int]


@dataclass(slots=True)
class RecordedRegion:
    """A recording by `TorchCuda.recorded`, which fills the fields when its context ends.

    ``tokens`` come from the profiler, in the order of its event tree. ``history`` and ``snapshot`` come from the allocator, and
    are empty unless the history was requested. ``profiles`` is the list from `profiled`.
    """

    tokens: list[Token] = field(default_factory=list)
    history: list[HistoryEntry] = field(default_factory=list)
    snapshot: dict[str, Any] | None = None
    profiles: list[Profile] = field(default_factory=list)


def gpus_beside(device: torch.device) -> list[int]:
    """Return the indices of all visible GPUs other than ``device``."""
    import torch

    return [index for index in range(torch.cuda.device_count()) if index != device.index]


class TorchCuda:
    """The calls to torch.cuda for the GPU with an index, by default the current GPU.

    Raises:
        DeviceUnavailable: torch sees no GPU, or cannot initialise CUDA.
    """

    def __init__(self, index: int | None = None) -> None:
        import torch

        if torch.version.cuda is None and torch.version.hip is None:
            raise DeviceUnavailable(f"{NO_CUDA}: torch {torch.__version__} is built without CUDA")
        with warnings.catch_warnings():
            # torch warns about a missing or old driver, and a test suite may turn warnings into errors.
            warnings.simplefilter("ignore")
            available = torch.cuda.is_available()
        if not available:
            raise DeviceUnavailable(f"{NO_CUDA}: torch {torch.__version__} (CUDA {torch.version.cuda}) sees no GPU")
        try:
            torch.cuda.init()  # type: ignore[no-untyped-call]
        except RuntimeError as error:
            raise DeviceUnavailable(f"{NO_CUDA}: torch {torch.__version__} cannot initialise CUDA: {error}") from None
        self._index = torch.cuda.current_device() if index is None else index

    def torch_device(self) -> torch.device:
        import torch

        # A dispatch mode of the test would see even this call.
        with beneath_modes():
            return torch.device("cuda", self._index)

    def properties(self) -> GpuProperties:
        import torch

        properties = torch.cuda.get_device_properties(self._index)
        return GpuProperties(
            properties.name,
            properties.total_memory,
            self._nvml.driver_version(),
            str(properties.uuid),
            (properties.major, properties.minor),
        )

    def statistics(self) -> dict[str, int]:
        import torch

        return dict(torch.cuda.memory_stats(self._index))

    def has_allocated(self) -> bool:
        """Return whether this process has ever allocated on the GPU. This is ten times faster than reading `statistics`."""
        return cuda_has_allocated(self._index)

    def reports_allocations(self) -> bool:
        """Return whether the allocator reports each allocation and each free. ``cudaMallocAsync`` reports none."""
        import torch

        return torch.cuda.get_allocator_backend() == "native"

    def reset_peaks(self) -> None:
        import torch

        torch.cuda.reset_peak_memory_stats(self._index)

    def clear_workspaces(self) -> None:
        clear_cublas_workspaces()

    def make_workspace(self, stream: int | None = None, *, in_backward: bool = False) -> None:
        """Let cuBLAS allocate its workspace for a stream and a thread, as before a matrix product.

        If this workspace already exists, or if the GPU's memory is full, nothing is allocated.

        Args:
            stream: The stream's handle; by default the current stream.
            in_backward: True for the workspace of autograd's backward thread, false for the calling thread's.
        """
        import torch

        cuda_stream = torch.cuda.current_stream(self._index)
        if stream == 0:
            cuda_stream = torch.cuda.default_stream(self._index)
        elif stream not in (None, cuda_stream.cuda_stream):
            cuda_stream = torch.cuda.ExternalStream(stream, self._index)  # type: ignore[no-untyped-call]
        with (
            suppress(torch.OutOfMemoryError),
            torch.cuda.device(self._index),
            torch.cuda.stream(cuda_stream),
            beneath_modes(),
        ):
            if in_backward:
                run_in_backward(torch.cuda.current_blas_handle, self.torch_device())
            else:
                torch.cuda.current_blas_handle()  # type: ignore[no-untyped-call]

    def workspace_sizes(self) -> frozenset[int]:
        return cublas_workspace_sizes()

    def empty_cache(self) -> None:
        import torch

        torch.cuda.empty_cache()

    def synchronize(self) -> None:
        import torch

        torch.cuda.synchronize(self._index)

    def finish_backward(self) -> None:
        """Wait until autograd's backward thread has released its tensors."""
        if not in_backward():
            with beneath_modes():
                run_in_backward(lambda: None, self.torch_device())

    def allocate(self, nbytes: int) -> object:
        import torch

        with beneath_modes():
            return torch.empty(nbytes, dtype=torch.uint8, device=self.torch_device())

    def laps(self, runs: Sequence[Callable[[], object]], beside: Sequence[int] = ()) -> list[float]:
        """Call each function in ``runs``, and return its seconds on the GPU, measured by CUDA events.

        The host waits for the GPU only before the first and after the last run, not in between.

        Args:
            runs: The functions, in the order of the calls.
            beside: Indices of other GPUs that the functions use. A run ends when these GPUs have finished as well.
        """
        import torch

        borders = [torch.cuda.Event(enable_timing=True) for _ in range(len(runs) + 1)]  # type: ignore[no-untyped-call]
        torch.cuda.synchronize(self._index)
        borders[0].record()
        for run, border in zip(runs, borders[1:], strict=True):
            run()
            for index in beside:
                torch.cuda.current_stream(self._index).wait_event(torch.cuda.current_stream(index).record_event())
            border.record(torch.cuda.current_stream(self._index))
        borders[-1].synchronize()
        return [float(start.elapsed_time(end)) / 1e3 for start, end in itertools.pairwise(borders)]

    def launches(self, run: Callable[[], object]) -> Mapping[str, int] | None:
        return launches_of(run, self.synchronize)

    def gpu(self) -> GpuState:
        return self._nvml.now(is_of_session, workers_of_session())

    def sm_clock(self) -> float | None:
        return self._nvml.sm_clock()

    def segments(self) -> list[dict[str, Any]]:
        import torch

        segments: list[dict[str, Any]] = torch.cuda.memory_snapshot()  # type: ignore[no-untyped-call]
        return [segment for segment in segments if segment["device"] == self._index]

    @contextmanager
    def recorded(self, *, with_history: bool, operands: bool = True) -> Iterator[RecordedRegion]:
        """Record the operators and allocations within the context.

        Backward keeps its own thread, as in a measured step. Each thread has its own cuBLAS workspace (33,554,432 bytes on an
        H100), so with backward in the main thread the recorded step would need less memory than the measured step.

        Args:
            with_history: Whether to record the allocator's history as well.
            operands: Whether to record the operators' input tensors, as in `profiled`.

        Yields:
            A recording, whose fields are filled when the context ends.

        Raises:
            MeasuringError: The recording was cut short.
        """
        region = RecordedRegion()
        if not with_history:
            with profiled(region.tokens, self.torch_device(), operands=operands) as region.profiles:
                yield region
                self.synchronize()
            return
        with _history(frames=True) as before:
            with profiled(region.tokens, self.torch_device(), operands=operands) as region.profiles:
                yield region
                self.synchronize()
            region.snapshot = cuda_snapshot()
            # Every thread except the main thread begins in the same Python function. So only the main thread can distinguish
            # its own call stacks from other threads' call stacks.
            in_main_thread = threading.current_thread() is threading.main_thread()
            entries = region.snapshot["device_traces"][self._index][before.get(self._index, 0) :]
            region.history = history_of(entries, threads_apart=in_main_thread)

    @contextmanager
    def traced(self) -> Iterator[Mapping[int, Sequence[HistoryEntry]]]:
        """Record the allocator's history within the context, without call stacks.

        Yields:
            A mapping, which is filled when the context ends: GPU index -> entries. A GPU with more entries than the history
            can store is left out.
        """
        histories: dict[int, Sequence[HistoryEntry]] = {}
        with _history(frames=False) as before:
            yield histories
            for index, trace in enumerate(cuda_snapshot()["device_traces"]):
                if before or len(trace) < MOST_ENTRIES:
                    histories[index] = history_of(trace[before.get(index, 0) :])

    def free_and_total(self) -> tuple[int, int]:
        """Return the free bytes and the total bytes of the GPU."""
        import torch

        free, total = torch.cuda.mem_get_info(self._index)
        return int(free), int(total)

    def bytes_by_pid(self) -> Mapping[int, int | None] | None:
        """Return the bytes of each process on the GPU, as `NvmlGpu.bytes_by_pid` does."""
        return self._nvml.bytes_by_pid()

    def gpu_use(self) -> GpuUse | None:
        """Return the GPU's memory outside this process's allocator; ``None`` if NVML does not list the GPU's processes."""
        bytes_by_pid = self.bytes_by_pid()
        if bytes_by_pid is None:
            return None
        has_context = self.has_allocated()
        return gpu_use_of(
            str(self.torch_device()),
            bytes_by_pid,
            os.getpid(),
            lambda pid: is_of_session(pid) or pid in siblings_with("MASTER_PORT"),
            workers_of_session() if has_context else 0,
            self.statistics()["reserved_bytes.all.current"] if has_context else 0,
            program_of,
        )

    def limit(self, fraction: float) -> None:
        """Limit the allocator to a ``fraction`` of the GPU's memory. Allocators that support no limit ignore this call."""
        import torch

        with suppress(RuntimeError):
            torch.cuda.set_per_process_memory_fraction(fraction, self._index)

    @cached_property
    def _nvml(self) -> NvmlGpu:
        import torch

        return NvmlGpu(str(torch.cuda.get_device_properties(self._index).uuid))


@contextmanager
def _history(*, frames: bool) -> Iterator[Mapping[int, int]]:
    """Record the allocator's history within the context, unless the program already records it.

    Yields:
        How many entries the program has already recorded, by GPU index. Empty if the program does not record the history.
    """
    if cuda_history_is_on():
        yield {index: len(trace) for index, trace in enumerate(cuda_snapshot()["device_traces"])}
        return
    start_cuda_history(frames=frames)
    try:
        yield {}
    finally:
        stop_cuda_history()
