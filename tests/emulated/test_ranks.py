"""Ranks on emulated GPUs, started by torchrun: a GPU for each, and torch's own ProcessGroupNCCL."""

from __future__ import annotations

import json
import os
import sys

from pytest_gpumem.emulation.load import STARTUP, VARIABLE
from tests.emulated.conftest import REPOSITORY
from tests.jobs import Job, run_job

RANKS, WIDTH = 2, 1024
TESTS = f"""
import os
import pytest
import torch
import torch.distributed as dist
from torch.nn.parallel import DistributedDataParallel

RANK = int(os.environ["RANK"])


@pytest.fixture(scope="session", autouse=True)
def group():
    dist.init_process_group("nccl")
    yield
    dist.destroy_process_group()


def test_step(gpumem):
    assert gpumem.device.index == RANK
    model = DistributedDataParallel(torch.nn.Linear({WIDTH}, {WIDTH}, bias=False).to(gpumem.device))
    rows = 8 + (int(os.environ.get("MORE", 0)) if RANK == 1 else 0)
    gpumem.train_step(model, torch.ones(rows, {WIDTH}), loss=lambda output, _: output.sum())


def test_failing(gpumem):
    if "RAISE" in os.environ and RANK == 1:
        raise LookupError("no batch for this rank")
    gpumem.measure(lambda: torch.ones(100_000, device=gpumem.device) * 2)
"""


def job(folder, *arguments: str, ranks: int = RANKS, device: str = "emulated:h100x8", **variables: str) -> Job:
    # torchrun loads torch, too, which here cannot be loaded without the stand-ins for CUDA's libraries.
    paths = os.pathsep.join([str(STARTUP), str(REPOSITORY)])
    return run_job(
        folder,
        ranks,
        *arguments,
        python=sys.executable,
        rank_python=sys.executable,
        device=device,
        **{"PYTHONPATH": paths, VARIABLE: device, **variables},
    )


def test_each_rank_has_a_gpu_and_baselines_and_what_one_of_them_needs_more_is_named(tmp_path):
    (tmp_path / "test_it.py").write_text(TESTS)
    recorded = job(tmp_path, "--gpumem-update=new", "--gpumem-baseline", "--gpumem-report=clean.json")
    assert recorded.status == 0, recorded.output
    clean = json.loads((tmp_path / "clean.json").read_text())
    (store,) = (tmp_path / "gpumem-baselines").glob("emulated-*/*.toml")
    before = store.read_bytes()
    assert len(clean["ranks"]) == 2
    # Weights, gradients and the gradients' bucket.
    assert all(peak >= 3 * WIDTH * WIDTH * 4 for _, peak in clean["ranks"][1]["peaks"])

    red = job(tmp_path, "--gpumem-baseline", "--gpumem-report=red.json", MORE="4096", RAISE="1")
    assert red.status != 0
    assert "train_step rank 1 of 2: Emulated GPU memory regressed: peak" in red.output, red.output
    assert "rank 1 of 2 failed by itself in its call: LookupError: no batch for this rank" in red.output
    assert red.left == ()
    assert store.read_bytes() == before
    step = next(row for row in json.loads((tmp_path / "red.json").read_text())["ranks"] if row["test"] == "test_step")
    peaks = dict(step["peaks"])
    assert step["largest"] == 1
    # At least the input of 4096 rows more.
    assert peaks[1] - peaks[0] >= 4096 * WIDTH * 4
