"""Errors that say that a GPU lacks something, told from those of a program that is wrong anywhere."""

from __future__ import annotations

import pytest

from pytest_gpumem.measuring.devices.capability import lacking, lacking_in

T4, L4 = (7, 5), (8, 9)
IMAGE = "AcceleratorError: CUDA error: no kernel image is available for execution on the device"


@pytest.mark.parametrize(
    "error",
    [
        "RuntimeError: FlashAttention only supports Ampere GPUs or newer.",
        "RuntimeError: Flash attention only supports gpu architectures in the range [sm80, sm121].",
        "RuntimeError: torch._scaled_mm is only supported on CUDA devices with compute capability >= 9.0 or 8.9",
        "RuntimeError: sparse_mm: CUDA BFloat16 requires compute capability >= 80 (current: 75)",
        "ValueError: Bfloat16 is only supported on GPUs with compute capability of at least 8.0. Your Tesla T4 has 7.5.",
        "GPUTooOldForTriton: Found Tesla P100, and Triton only supports devices of CUDA Capability >= 7.0",
        "PTXASError: Feature '.bf16' requires .target sm_80 or higher",
        IMAGE,
    ],
)
def test_words_of_a_lack_are_told_as_they_are(error):
    assert lacking(error, T4) == error.rstrip(".")
    output = f"warning: x\nTraceback (most recent call last):\n  File ...\n[rank0]: torch.{error}\nW0000 child failed\n"
    assert lacking_in(output, T4) == error.rstrip(".")


def test_attention_without_a_kernel_is_a_lack_where_the_gpu_has_no_flash_attention():
    error = "RuntimeError: No available kernel.  Aborting execution."
    assert lacking(error, T4) == (
        "RuntimeError: No available kernel. Aborting execution (flash attention needs compute capability 8.0, and this GPU "
        "has 7.5)"
    )
    assert lacking(error, L4) is None


@pytest.mark.parametrize(
    "output",
    [
        "ValueError: no data",
        "torch.OutOfMemoryError: CUDA out of memory",
        f"caught {IMAGE}, going on\nValueError: no data",
        "UserWarning found a GPU of compute capability (CC) 7.0\nKeyError: 'x'",
        "",
    ],
)
def test_other_errors_and_words_of_warnings_are_not(output):
    assert lacking_in(output, T4) is None
