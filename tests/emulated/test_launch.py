"""Launched jobs on an emulated GPU. `test_launch_in_full` has those that also run on the CPU."""

from __future__ import annotations

import re

READS = """
import torch

x = torch.randn(1000, 1000, device="cuda")
torch.ones(int((x > 0).sum()), device="cuda")
"""


WITHOUT_CACHE = """
import os
import subprocess
import sys

import pytest
import torch

PROGRAM = [sys.executable, "-c", "import torch; torch.ones(1 << 22, device='cuda')"]
CHANGE = {"PYTORCH_NO_CUDA_MEMORY_CACHING": "1"}


@pytest.mark.gpumem(max_memory="1 MB")
def test_call():
    kept = torch.ones(10, device="cuda")
    subprocess.run(PROGRAM, env={**os.environ, **CHANGE}, check=True)


def test_job(gpumem):
    gpumem.launch(PROGRAM, env=CHANGE)
"""


def test_a_process_whose_allocator_counts_nothing_is_not_green(processes, tmp_path):
    (tmp_path / "test_it.py").write_text(WITHOUT_CACHE, encoding="utf-8")
    done = processes.pytest()
    assert "1 failed, 1 passed" in done.stdout, done.stdout
    assert "gpumem: 0 gated, 1 unmeasured (" in done.stdout, done.stdout
    assert done.stdout.count("` has an allocator without statistics (its own, or torch's with ") >= 2, done.stdout
    assert "2 failed" in processes.pytest("--gpumem-strict").stdout


def test_a_job_is_unmeasured_if_a_process_reads_an_uncomputed_integer(processes, tmp_path):
    (tmp_path / "train.py").write_text(READS, encoding="utf-8")
    test = 'import sys\ndef test_job(gpumem):\n    gpumem.launch([sys.executable, "train.py"])\n'
    (tmp_path / "test_it.py").write_text(test, encoding="utf-8")
    done = processes.pytest("--gpumem-update=new")
    assert re.search(r"unmeasured.*train\.py: a value is read that an emulated GPU.*train\.py:5", done.stdout), (
        done.stdout
    )
    assert processes.pytest("--gpumem-baseline").returncode == 1
