"""The seam between `CudaDevice` and torch.cuda: what it calls, and nothing that it decides.

Tests put recorded statistics of a real GPU in its place.
"""

from __future__ import annotations

import warnings
from dataclasses import dataclass
from typing import TYPE_CHECKING, Protocol

from pytest_gpumem.devices.contract import DeviceUnavailable
from pytest_gpumem.devices.torch_internals import clear_cublas_workspaces

if TYPE_CHECKING:
    from collections.abc import Callable

    import torch


@dataclass(frozen=True, slots=True)
class GpuProperties:
    """``total_memory`` is in bytes; ``driver`` is ``"unknown"`` where NVML does not answer; ``uuid`` names the physical GPU.

    ``capability`` is the compute capability: (9, 0) of an H100.
    """

    name: str
    total_memory: int
    driver: str
    uuid: str
    capability: tuple[int, int]


class CudaRuntime(Protocol):
    """What `CudaDevice` asks of torch.cuda, for the current device."""

    def torch_device(self) -> torch.device: ...
    def properties(self) -> GpuProperties: ...
    def statistics(self) -> dict[str, int]: ...
    def reset_peaks(self) -> None: ...
    def clear_workspaces(self) -> None: ...
    def empty_cache(self) -> None: ...
    def synchronize(self) -> None: ...
    def allocate(self, nbytes: int) -> object: ...
    def time(self, run: Callable[[], None]) -> float: ...


class TorchCuda:
    """torch.cuda itself. Raises `DeviceUnavailable` where it has no GPU."""

    def __init__(self) -> None:
        import torch

        if torch.version.cuda is None and torch.version.hip is None:
            raise DeviceUnavailable(f"no CUDA device: torch {torch.__version__} is built without CUDA")
        with warnings.catch_warnings():
            # A missing or old driver is told by a warning, which a suite may have turned into an error.
            warnings.simplefilter("ignore")
            available = torch.cuda.is_available()
        if not available:
            raise DeviceUnavailable(
                f"no CUDA device: torch {torch.__version__} (CUDA {torch.version.cuda}) sees no GPU"
            )
        try:
            torch.cuda.init()  # type: ignore[no-untyped-call]
        except RuntimeError as error:
            raise DeviceUnavailable(
                f"no CUDA device: torch {torch.__version__} cannot initialise CUDA: {error}"
            ) from None
        self._index = torch.cuda.current_device()

    def torch_device(self) -> torch.device:
        import torch

        return torch.device("cuda", self._index)

    def properties(self) -> GpuProperties:
        import torch

        properties = torch.cuda.get_device_properties(self._index)
        return GpuProperties(
            properties.name,
            properties.total_memory,
            _driver_version(),
            str(properties.uuid),
            (properties.major, properties.minor),
        )

    def statistics(self) -> dict[str, int]:
        import torch

        return dict(torch.cuda.memory_stats(self._index))

    def reset_peaks(self) -> None:
        import torch

        torch.cuda.reset_peak_memory_stats(self._index)

    def clear_workspaces(self) -> None:
        clear_cublas_workspaces()

    def empty_cache(self) -> None:
        import torch

        torch.cuda.empty_cache()

    def synchronize(self) -> None:
        import torch

        torch.cuda.synchronize(self._index)

    def allocate(self, nbytes: int) -> object:
        import torch

        return torch.empty(nbytes, dtype=torch.uint8, device=self.torch_device())

    def time(self, run: Callable[[], None]) -> float:
        import torch

        began, ended = (torch.cuda.Event(enable_timing=True) for _ in range(2))  # type: ignore[no-untyped-call]
        torch.cuda.synchronize(self._index)
        began.record()
        run()
        ended.record()
        ended.synchronize()
        return float(began.elapsed_time(ended)) / 1e3


def _driver_version() -> str:
    try:
        import pynvml

        pynvml.nvmlInit()
    except (ImportError, OSError):
        return "unknown"
    except Exception as error:  # noqa: BLE001 - NVML's own class, whose name needs the import
        return f"unknown ({error})"
    try:
        version = pynvml.nvmlSystemGetDriverVersion()
    except pynvml.NVMLError as error:
        return f"unknown ({error})"
    finally:
        pynvml.nvmlShutdown()
    return version.decode() if isinstance(version, bytes) else str(version)
