"""What the stand-ins for a GPU have in common: a `TorchCuda` of which nothing is known but what runs."""

from __future__ import annotations

from contextlib import contextmanager
from typing import TYPE_CHECKING, Any, NoReturn

from pytest_gpumem.measuring.devices.nvml import GpuState

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator, Mapping, Sequence
    from contextlib import AbstractContextManager

    import torch

    from pytest_gpumem.measuring.devices.cuda_history import HistoryEntry
    from pytest_gpumem.measuring.devices.cuda_runtime import GpuProperties, RecordedRegion


class SilentCuda:
    """Waits for nothing, has no NVML and counts no kernels. What a stand-in does not say itself is asked of it by mistake."""

    def synchronize(self) -> None:
        return

    def finish_backward(self) -> None:
        return

    def clear_workspaces(self) -> None:
        return

    def make_workspace(self, stream: int | None = None, *, in_backward: bool = False) -> None:
        return

    def workspace_sizes(self) -> frozenset[int]:
        return frozenset()

    def empty_cache(self) -> None:
        return

    def gpu(self) -> GpuState:
        return GpuState()

    def sm_clock(self) -> float | None:
        return None

    def launches(self, run: Callable[[], object]) -> Mapping[str, int] | None:
        run()
        return None

    def torch_device(self) -> torch.device:
        self._is_not_there("device")

    def properties(self) -> GpuProperties:
        self._is_not_there("properties")

    def statistics(self) -> dict[str, int]:
        self._is_not_there("statistics")

    def reports_allocations(self) -> bool:
        return True

    def reset_peaks(self) -> None:
        self._is_not_there("peaks")

    def allocate(self, nbytes: int) -> object:
        self._is_not_there("memory")

    def laps(self, runs: Sequence[Callable[[], object]]) -> list[float]:
        self._is_not_there("clock")

    def segments(self) -> list[dict[str, Any]]:
        return []

    def recorded(self, *, with_history: bool) -> AbstractContextManager[RecordedRegion]:
        self._is_not_there("events")

    @contextmanager
    def traced(self) -> Iterator[Mapping[int, Sequence[HistoryEntry]]]:
        yield {}

    def _is_not_there(self, what: str) -> NoReturn:
        raise AssertionError(f"{type(self).__name__} has no {what}")
