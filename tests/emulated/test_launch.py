"""Launched jobs on an emulated GPU. `test_launch_in_full` has those that also run on the CPU."""

from __future__ import annotations

import re

READS = """
import torch

x = torch.randn(1000, 1000, device="cuda")
torch.ones(int((x > 0).sum()), device="cuda")
"""


def test_a_job_is_unmeasured_if_a_process_reads_an_uncomputed_integer(processes, tmp_path):
    (tmp_path / "train.py").write_text(READS, encoding="utf-8")
    test = 'import sys\ndef test_job(gpumem):\n    gpumem.launch([sys.executable, "train.py"])\n'
    (tmp_path / "test_it.py").write_text(test, encoding="utf-8")
    done = processes.pytest("--gpumem-update=new")
    assert re.search(r"unmeasured.*train\.py: a value is read that an emulated GPU.*train\.py:5", done.stdout), (
        done.stdout
    )
    assert processes.pytest("--gpumem-baseline").returncode == 1
