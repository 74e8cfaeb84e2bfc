"""Plan convolutions for an emulated GPU with the real cuDNN, if it is installed. Planning does not need a GPU.

A plan is cuDNN's choice of a kernel for a convolution, with the bytes of the kernel's workspace.
"""

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
"""The oldest cuDNN release that can plan convolutions without a GPU, from the GPU's description."""


WHY_RECURRENT = (
    "recurrent layers keep as many bytes for backward as on an H100 with cuDNN 9.19, and their workspaces count less than on "
    "an H100 (0 bytes on GPUs other than Hopper's), because cuDNN reports both only on a real GPU"
)
"""The reason why peaks may be too low if recurrent layers run."""


_UNPLANNED = ctypes.CFUNCTYPE(None, ctypes.c_int64)


class Cudnn:
    """The stand-in for libcudnn, which lets the real cuDNN plan convolutions if it is installed.

    Args:
        stand_in: The loaded stand-in for libcudnn. torch must not be loaded yet.
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
        """The largest estimate for the workspace of a convolution without a plan, in bytes."""
        self._reaching: dict[int, dict[str, int]] = {}
        """The results of `reaching`, by GPU index and allocator statistic."""

    def convolutions(self) -> int:
        """Return how many convolutions have run in this process, forward and backward."""
        return int(self._stand_in.gpumem_convolutions())

    def release(self) -> str:
        """Load the real cuDNN if necessary, and return its release (``"9.20.0"``); `NO_CUDNN` if it cannot be used."""
        number = int(self._stand_in.gpumem_cudnn_release())
        return f"{number // 10000}.{number // 100 % 100}.{number % 100}" if number else NO_CUDNN

    def reaching(self, gpu: int, statistic: str) -> int:
        """Return an upper bound for the live bytes during convolutions without a plan, since the last `forget_reaching`.

        For each of these convolutions, the live bytes and the estimated workspace are added. The largest of these sums is
        returned. For example, a convolution with 100 MB live and an estimated workspace of 50 MB has the sum 150 MB.

        Args:
            gpu: Index of the GPU.
            statistic: The allocator's statistic for live bytes: ``"requested_bytes"`` or ``"allocated_bytes"``.

        Returns:
            The upper bound in bytes; 0 if all convolutions had a plan.
        """
        return self._reaching.get(gpu, {}).get(statistic, 0)

    def forget_reaching(self, gpu: int) -> None:
        """Reset the result of `reaching` for a GPU to 0."""
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
        """Return how often recurrent layers have run in this process, forward and backward."""
        return int(self._stand_in.gpumem_recurrent())

    def lacking(self, peaks: Mapping[int, int] | None = None) -> str | None:
        """Return the reasons why this process's peaks may be too low; ``None`` if there are none.

        Args:
            peaks: GPU -> this process's peak of allocated bytes, if known.
        """
        return "; ".join(filter(None, (self.lacking_of_convolutions(peaks), self.lacking_of_recurrent()))) or None

    def lacking_of_convolutions(self, peaks: Mapping[int, int] | None = None) -> str | None:
        """Return a reason and an upper bound if peaks are too low because of convolutions; ``None`` if they are not.

        A workspace is freed after its convolution, so a small workspace may not change the peak. For example, if 100 MB are
        live during a convolution with a workspace of 50 MB, a peak of 180 MB is correct.

        Args:
            peaks: GPU -> this process's peak of allocated bytes, if known.
        """
        missing = self._most
        if peaks is not None:
            missing = max((self.reaching(gpu, "allocated_bytes") - peak for gpu, peak in peaks.items()), default=0)
        return f"{self.why_zero()}; a peak is too low by at most {format_bytes(missing)}" if missing > 0 else None

    def lacking_of_recurrent(self) -> str | None:
        """Return why peaks may be too low because of recurrent layers; ``None`` if no recurrent layer has run."""
        if not self.recurrent():
            return None
        most = ctypes.c_int64()
        self._stand_in.gpumem_tell_most_kept(ctypes.byref(most))
        return f"{WHY_RECURRENT}; one run of a layer keeps at most {format_bytes(most.value)}"

    def why_zero(self) -> str:
        """Return why the workspaces of convolutions count as 0 bytes, and what to do about it."""
        if self._torch.cudnn < _OLDEST:
            release, oldest = (".".join(map(str, version)) for version in (self._torch.cudnn, _OLDEST))
            why = (
                f"torch {self._torch.version} has cuDNN {release}, and only cuDNN {oldest} or newer plans without a GPU"
            )
        elif self._installed is None:
            why = f"no cuDNN is installed (pip install {self._torch.cudnn_wheel})"
        else:
            why = f"the cuDNN in {self._installed} cannot be used"
        return f"workspaces of convolutions count as 0 bytes, because {why}"


def installed_cudnn(torch: TorchBuild) -> Path | None:
    """Return the path of the cuDNN in NVIDIA's packages, which torch would load; ``None`` if it cannot be used.

    The packages are searched in torch's folder and in ``sys.path``. The result is also ``None`` if cuBLASLt is missing, because
    cuDNN would end the process.
    """
    for folder in (torch.libraries.parents[1], *map(Path, sys.path)):
        library = folder / "nvidia" / "cudnn" / "lib" / f"libcudnn.so.{torch.cudnn[0]}"
        if library.exists():
            return library if _has_cublaslt(library.parents[2], torch.cuda[0]) else None
    return None


def _has_cublaslt(packages: Path, cuda: int) -> bool:
    """Return whether cuBLASLt is in a folder in which cuDNN searches for it. The folder has a different name since CUDA 13."""
    return any((packages / folder / "lib" / f"libcublasLt.so.{cuda}").exists() for folder in ("cublas", f"cu{cuda}"))
