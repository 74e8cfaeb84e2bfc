"""Plan convolutions on an emulated GPU with the real cuDNN, if it is installed. Planning needs no GPU."""

from __future__ import annotations

import ctypes
import sys
from pathlib import Path
from typing import TYPE_CHECKING

from pytest_gpumem.base.units import format_bytes
from pytest_gpumem.facts.values.option_words import NO_CUDNN

if TYPE_CHECKING:
    from collections.abc import Mapping

    from pytest_gpumem.emulating.emulation.torch_build import TorchBuild

_OLDEST = (9, 8)
"""The oldest release that can plan for a GPU from its description."""


WHY_RECURRENT = (
    "the bytes that recurrent layers keep for backward are those of an H100 with cuDNN 9.19, and their workspaces are taken as "
    "smaller than on an H100 (as 0 on GPUs other than Hopper's), because cuDNN reports both only on a GPU"
)
"""The reason why peaks may be too low with recurrent layers, as a clause."""


_UNPLANNED = ctypes.CFUNCTYPE(None, ctypes.c_int64)


class Cudnn:
    """The stand-in for libcudnn, and the real library behind it.

    Args:
        stand_in: The loaded stand-in. torch must not be loaded yet.
        torch: The installed torch.
    """

    def __init__(self, stand_in: ctypes.CDLL, torch: TorchBuild) -> None:
        self._stand_in = stand_in
        self._torch = torch
        self._installed = installed_cudnn(torch) if torch.cudnn >= _OLDEST else None
        if self._installed is not None:
            stand_in.gpumem_use_cudnn(str(self._installed).encode())
        self._unplanned = _UNPLANNED(self._take_unplanned)
        stand_in.gpumem_tell_unplanned(self._unplanned)
        self._most = 0
        """The largest estimate for a workspace without a plan, in bytes."""
        self._reaching: dict[int, dict[str, int]] = {}
        """The maximum of live bytes plus the estimated workspace at a convolution, by GPU and allocator statistic."""

    def convolutions(self) -> int:
        """Return the number of convolutions run in this process, forward and backward."""
        return int(self._stand_in.gpumem_convolutions())

    def release(self) -> str:
        """Return the cuDNN release that plans convolutions (``"9.20.0"``), or `NO_CUDNN`. Load cuDNN if necessary."""
        number = int(self._stand_in.gpumem_cudnn_release())
        return f"{number // 10000}.{number // 100 % 100}.{number % 100}" if number else NO_CUDNN

    def reaching(self, gpu: int, statistic: str) -> int:
        """Return the maximum of live bytes since `forget_reaching`, with estimated workspaces for convolutions without a plan.

        Args:
            gpu: Index of the GPU.
            statistic: The allocator's statistic, ``"requested_bytes"`` or ``"allocated_bytes"``.

        Returns:
            Bytes; 0 if every convolution had a plan.
        """
        return self._reaching.get(gpu, {}).get(statistic, 0)

    def forget_reaching(self, gpu: int) -> None:
        """Reset `reaching` for a GPU."""
        self._reaching.pop(gpu, None)

    def _take_unplanned(self, most: int) -> None:
        import torch

        self._most = max(self._most, most)
        gpu = torch.cuda.current_device()
        reaching = self._reaching.setdefault(gpu, {})
        for statistic, live in torch.cuda.memory_stats_as_nested_dict(gpu).items():
            if statistic in ("requested_bytes", "allocated_bytes"):
                reaching[statistic] = max(reaching.get(statistic, 0), live["all"]["current"] + most)

    def recurrent(self) -> int:
        """Return the number of passes through recurrent layers in this process, forward and backward."""
        return int(self._stand_in.gpumem_recurrent())

    def lacking(self, peaks: Mapping[int, int] | None = None) -> str | None:
        """Return why peaks of this process may be too low, as a clause; ``None`` if they are not.

        Args:
            peaks: The process's peak of allocated bytes by GPU, if known.
        """
        return "; ".join(filter(None, (self.lacking_of_convolutions(peaks), self.lacking_of_recurrent()))) or None

    def lacking_of_convolutions(self, peaks: Mapping[int, int] | None = None) -> str | None:
        """Return why peaks may be too low because of convolutions, as a clause; ``None`` if they are not.

        A workspace is freed after its convolution, so only the highest convolution can exceed the peak. For example, 100 MB
        live and a workspace of 50 MB do not change a peak of 180 MB.

        Args:
            peaks: The process's peak of allocated bytes by GPU, if known.
        """
        missing = self._most
        if peaks is not None:
            missing = max((self.reaching(gpu, "allocated_bytes") - peak for gpu, peak in peaks.items()), default=0)
        return f"{self.why_zero()}; a peak lacks at most {format_bytes(missing)}" if missing > 0 else None

    def lacking_of_recurrent(self) -> str | None:
        """Return why peaks may be too low because of recurrent layers, as a clause; ``None`` if no such layer ran."""
        if not self.recurrent():
            return None
        most = ctypes.c_int64()
        self._stand_in.gpumem_tell_most_kept(ctypes.byref(most))
        return f"{WHY_RECURRENT}; the largest is {format_bytes(most.value)}"

    def why_zero(self) -> str:
        """Return a clause with the reason why convolution workspaces count as 0 bytes, and with the remedy."""
        if self._torch.cudnn < _OLDEST:
            release, oldest = (".".join(map(str, version)) for version in (self._torch.cudnn, _OLDEST))
            why = f"torch {self._torch.version} has cuDNN {release}, and only {oldest} and newer plan without a GPU"
        elif self._installed is None:
            why = f"no cuDNN is installed (pip install {self._torch.cudnn_wheel})"
        else:
            why = f"the cuDNN in {self._installed} cannot be used"
        return f"workspaces of convolutions are taken as 0, since {why}"


def installed_cudnn(torch: TorchBuild) -> Path | None:
    """Return the cuDNN that torch would load from NVIDIA's packages, beside torch or in another folder of ``sys.path``.

    cuDNN ends the process if it does not find cuBLASLt. Therefore the function returns ``None`` if cuBLASLt is missing.
    """
    for folder in (torch.libraries.parents[1], *map(Path, sys.path)):
        library = folder / "nvidia" / "cudnn" / "lib" / f"libcudnn.so.{torch.cudnn[0]}"
        if library.exists():
            return library if _has_cublaslt(library.parents[2], torch.cuda[0]) else None
    return None


def _has_cublaslt(packages: Path, cuda: int) -> bool:
    """Return whether cuBLASLt is in one of cuDNN's search folders. The package uses another folder since CUDA 13."""
    return any((packages / folder / "lib" / f"libcublasLt.so.{cuda}").exists() for folder in ("cublas", f"cu{cuda}"))
