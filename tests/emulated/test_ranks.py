"""Ranks on emulated GPUs: a GPU for each, and torch's own ProcessGroupNCCL."""

from __future__ import annotations

import json
import os
from typing import TYPE_CHECKING

import pytest

from pytest_gpumem.base.variables import EMULATED
from pytest_gpumem.emulating.emulated_process.start import STARTUP
from tests.emulated.processes import REPOSITORY, emulate
from tests.support.processes import Job, run_job

if TYPE_CHECKING:
    from collections.abc import Callable

RANKS, WIDTH = 2, 1024
STARTS = """
import subprocess
import sys
import torch
import torch.distributed as dist

dist.init_process_group("gloo")
subprocess.run([sys.executable, "-c", "import torch; torch.ones(1 << 20, device='cuda')"], check=True)
weight = torch.nn.Parameter(torch.ones(1 << 18, device="cuda"))
optimizer = torch.optim.SGD([weight])
for _ in range(8):
    (weight * 2).sum().backward()
    optimizer.step()
    optimizer.zero_grad()
"""
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


@pytest.fixture
def job(tmp_path) -> Callable[..., Job]:
    """Run a job of ranks with a GPU each."""

    def run(*arguments: str, gpu: str = "h100x8", torchrun: bool = False, **variables: str) -> Job:
        device = f"emulated:{gpu}"
        # torchrun loads torch, too, which here cannot be loaded without the stand-ins for CUDA's libraries.
        environment = {"PYTHONPATH": os.pathsep.join([str(STARTUP), str(REPOSITORY)]), EMULATED: device, **variables}
        how = {"torchrun": torchrun, "device": device, "before": emulate}
        return run_job(tmp_path, RANKS, *arguments, **how, **environment)

    return run


def test_each_rank_has_a_gpu_and_baselines_and_what_one_of_them_needs_more_is_named(job, tmp_path):
    (tmp_path / "test_it.py").write_text(TESTS)
    recorded = job("--gpumem-update=new", "--gpumem-baseline", "--gpumem-report=clean.json")
    assert recorded.status == 0, recorded.output
    clean = json.loads((tmp_path / "clean.json").read_text())
    (store,) = (tmp_path / "gpumem-baselines").glob("emulated-*/*.toml")
    before = store.read_bytes()
    assert len(clean["ranks"]) == 2
    # Weights, gradients and the gradients' bucket.
    assert all(peak >= 3 * WIDTH * WIDTH * 4 for _, peak in clean["ranks"][1]["peaks"])

    red = job("--gpumem-baseline", "--gpumem-report=red.json", torchrun=True, MORE="4096", RAISE="1")
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


KINDS = ("ddp", "zero1", "zero2", "zero3", "tp:2")
HELD = f"""
import json
import os
import pytest
import torch

TOGETHER = "RANK" in os.environ


class Block(torch.nn.Module):
    def __init__(self):
        super().__init__()
        self.up, self.down = torch.nn.Linear(1024, 2048), torch.nn.Linear(2048, 1024)

    def forward(self, x):
        return x + self.down(torch.relu(self.up(x)))


class Net(torch.nn.Module):
    tp_plan = {{"layers.*.up": "colwise", "layers.*.down": "rowwise"}}

    def __init__(self):
        super().__init__()
        self.layers = torch.nn.ModuleList(Block() for _ in range(4))

    def forward(self, x):
        for layer in self.layers:
            x = layer(x)
        return x


@pytest.mark.parametrize("kind", {KINDS})
def test_held(gpumem, kind):
    for rank in [int(os.environ["RANK"])] if TOGETHER else [0, 1]:
        config = f"fp32,shard={{kind}}" + ("" if TOGETHER else f",world=2,rank={{rank}}")
        estimate = gpumem.estimate(Net, torch.ones(256, 1024), config, loss=lambda output, _: output.square().mean())
        shares = (estimate.state.parameters, estimate.state.gradients, estimate.state.optimizer_state)
        held = [*(share.measured for share in shares), estimate.measurement.peak_allocated]
        with open(f"{{'together' if TOGETHER else 'alone'}}-{{kind}}-{{rank}}.json", "w") as file:
            json.dump(held, file)
"""


def test_a_rank_alone_holds_on_its_gpu_what_it_holds_beside_the_other(job, processes, tmp_path):
    (tmp_path / "test_it.py").write_text(HELD)
    together = job(gpu="h100x2")
    assert together.status == 0, together.output
    alone = processes.pytest("-q")
    assert alone.returncode == 0, alone.stdout
    for kind in KINDS:
        for rank in range(RANKS):
            *there, peak_there = json.loads((tmp_path / f"together-{kind}-{rank}.json").read_text())
            *here, peak_here = json.loads((tmp_path / f"alone-{kind}-{rank}.json").read_text())
            assert here == there, (kind, rank)
            assert peak_here == pytest.approx(peak_there, rel=0.01), (kind, rank)


def test_a_process_that_a_rank_starts_is_named_by_its_program_and_the_rank(job, tmp_path):
    (tmp_path / "train.py").write_text(STARTS)
    program = ("pytest_gpumem.tools.main", "run", "train.py")
    done = job("--gpumem-report=report.json", gpu="h100x2", program=program)
    assert done.status == 0, done.output
    (result,) = json.loads((tmp_path / "report.json").read_text())["results"]
    measured = [verdict["measurement"] for verdict in result["verdict"]["verdicts"]]
    peaks = {measurement["name"]: measurement["by_device"] or measurement["metrics"] for measurement in measured}
    for rank in range(RANKS):
        own = peaks[f"loop rank {rank} of 2"]
        own = own.get(f"cuda:{rank}", own)["peak_allocated"]
        assert peaks[f"loop: python -c rank {rank} of 2"]["peak_allocated"] == 4 << 20
        together = peaks[f"loop: all processes rank {rank} of 2"]
        # Both processes of rank 0 use the first GPU.
        by_gpu = {gpu: metrics["peak_allocated"] for gpu, metrics in together.items()} if rank else together
        alone = {"peak_allocated": own + (4 << 20), "growth": 0}
        assert by_gpu == ({"cuda:0": 4 << 20, "cuda:1": own} if rank else alone)
