"""Any program on an emulated GPU, with its peaks at the end."""

from __future__ import annotations

import subprocess
import sys
from typing import TYPE_CHECKING

import pytest

if TYPE_CHECKING:
    from collections.abc import Callable


@pytest.fixture
def emulated(processes, tmp_path) -> Callable[..., subprocess.CompletedProcess[str]]:
    """Run a program as ``train.py``."""

    def run(source: str, **variables: str) -> subprocess.CompletedProcess[str]:
        (tmp_path / "train.py").write_text(source, encoding="utf-8")
        return processes.gpumem("emulate", "l4", "--", sys.executable, "train.py", new=True, **variables)

    return run


def test_any_program_runs_on_one_and_its_peaks_are_told(emulated):
    done = emulated(
        "import torch\n\n\ndef work():\n    kept = torch.empty(10**9, dtype=torch.uint8, device='cuda')\n"
        "    del kept\n\n\nwork()\nprint(torch.cuda.get_device_name())\nraise SystemExit(3)\n",
    )
    assert done.returncode == 3, done.stderr
    assert done.stdout == "NVIDIA L4 (emulated)\n"
    assert "gpumem: NVIDIA L4 (emulated), cuda:0: peak 1.00 GB allocated, " in done.stderr
    assert "1.00 GB      1 x  " in done.stderr
    assert "train.py:5 work" in done.stderr


def test_peaks_are_told_of_the_drivers_own_allocator_too_without_lines(emulated):
    source = (
        "import torch\nlarge = torch.empty(10**9, dtype=torch.uint8, device='cuda')\n"
        "del large\ntorch.cuda.reset_peak_memory_stats()\n"
    )
    done = emulated(source, PYTORCH_CUDA_ALLOC_CONF="backend:cudaMallocAsync")
    assert done.returncode == 0, done.stderr
    assert "gpumem: NVIDIA L4 (emulated), cuda:0: peak 1.00 GB allocated, " in done.stderr
    assert "The live tensors at the peak are unknown: the allocator (cudaMallocAsync) keeps no history" in done.stderr


ALLOCATOR = """
#include <stdlib.h>
void *take(long size, int device, void *stream) { return malloc(size); }
void give(void *at, long size, int device, void *stream) { free(at); }
"""


def test_a_program_with_an_allocator_of_its_own_runs_and_has_no_peaks(emulated, processes, tmp_path):
    (tmp_path / "allocator.c").write_text(ALLOCATOR, encoding="utf-8")
    subprocess.run(["cc", "-shared", "-fPIC", "-o", "allocator.so", "allocator.c"], cwd=tmp_path, check=True)
    source = (
        "import torch\n"
        "own = torch.cuda.memory.CUDAPluggableAllocator('./allocator.so', 'take', 'give')\n"
        "torch.cuda.memory.change_current_allocator(own)\n"
        "kept = torch.empty(1000, dtype=torch.uint8, device='cuda')\n"
    )
    done = emulated(source)
    assert done.returncode == 0, done.stderr
    assert "gpumem: no peaks: the program's allocator (pluggable) keeps no statistics" in done.stderr
    done = processes.gpumem("fit", "--device", "l4", "train.py")
    assert done.returncode == 2, done.stderr
    assert "Error: the program's memory is unknown, because its allocator has no statistics" in done.stderr
