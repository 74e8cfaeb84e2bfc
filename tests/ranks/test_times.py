"""Times of real ranks: taken together, judged rank by rank. On devices whose clock, or whose disturbances, are made up."""

from __future__ import annotations

import json
from typing import TYPE_CHECKING, Any

import pytest

if TYPE_CHECKING:
    from tests.conftest import Project

DEVICE = """
import contextlib, json, os, pathlib, time

import steps
from pytest_gpumem.facts.values.interference import Conditions
from pytest_gpumem.measuring.devices.cpu import CpuDevice

RANK = int(os.environ["RANK"])
SCRIPT = {"seconds": [0.01], "moves": 0.0, **json.loads(os.environ["SCRIPT"])[RANK]}


class Quiet(CpuDevice):
    '''The CPU, with nothing else at work as far as it can tell.'''

    name = "quiet"
    seconds_between_readings = 0.0

    def conditions(self):
        return Conditions(time.perf_counter())

    def pace(self):
        return 1e9


class Scripted(Quiet):
    '''Steps take the script's seconds: of each sample, of which the last holds from then on, every other round longer.'''

    name = "scripted"

    def __init__(self):
        super().__init__()
        self.samples = self.rounds = 0

    @contextlib.contextmanager
    def exclusive(self):
        self.samples += 1
        yield None

    def time(self, run):
        before = steps.steps
        run()
        seconds = SCRIPT["seconds"]
        self.rounds += 1
        longer = 1 + SCRIPT["moves"] * (self.rounds % 2)
        return (steps.steps - before) * seconds[min(self.samples, len(seconds)) - 1] * longer


def pytest_gpumem_devices(config):
    return {"scripted": Scripted, "quiet": Quiet}


def pytest_sessionfinish():
    pathlib.Path(f"steps-{RANK}").write_text(str(steps.steps))
"""
STEPS = """
import os, time
import torch
import torch.distributed as dist

steps = 0


def step():
    global steps
    steps += 1
    ones = torch.ones(1000)
    dist.all_reduce(ones)
    return ones


def busy(seconds):
    until = time.thread_time() + seconds
    while time.thread_time() < until:
        pass


def apart():
    "A step that waits for no other rank."
    busy(0.004 + float(os.environ.get("MORE", 0)) * (os.environ["RANK"] == "1"))
    return torch.ones(1000)
"""
TEST = """
from steps import apart, step
import torch.distributed as dist


@pytest.fixture(scope="session", autouse=True)
def group():
    dist.init_process_group("gloo")
    yield
    dist.destroy_process_group()
"""
TOGETHER = f"{TEST}\ndef test_it(gpumem):\n    gpumem.measure(step, items=100)\n"
APART = f'{TEST}\n@pytest.mark.gpumem(max_slowdown="500 %")\ndef test_it(gpumem):\n    gpumem.measure(apart)\n'
AT_REST: dict[str, Any] = {}


@pytest.fixture
def ranks(project: Project, run_ranks):
    """Run two ranks, each on its script; what is returned has their steps and the report as well."""
    project.write(STEPS, "steps.py")
    project.write(DEVICE, "conftest.py")

    def run(source: str, *arguments: str, scripts=(AT_REST, AT_REST), device: str = "scripted", **variables: str):
        project.write(source)
        report = project.path / "report.json"
        report.unlink(missing_ok=True)
        job = run_ranks(
            project.path,
            2,
            f"--gpumem-device={device}",
            "--gpumem-report=report.json",
            *arguments,
            timed=True,
            SCRIPT=json.dumps(scripts),
            **variables,
        )
        steps = [(project.path / f"steps-{rank}").read_text() for rank in range(2)]
        (result,) = json.loads(report.read_text())["results"]
        verdicts = result["verdict"]["verdicts"]
        return job, steps, {one["measurement"]["name"]: one for one in verdicts}

    return run


def outcomes_of(verdicts: dict[str, Any]) -> dict[str, str]:
    return {
        name: metric["outcome"]
        for name, one in verdicts.items()
        for metric in one["metrics"]
        if metric["metric"] == "step_time"
    }


def test_each_rank_has_times_and_one_that_needs_more_samples_takes_the_others_along(ranks):
    job, steps, verdicts = ranks(
        TOGETHER, "--gpumem-update=new", scripts=[{"seconds": [0.01]}, {"seconds": [0.02], "moves": 0.2}]
    )
    assert job.status == 0, job.output
    assert steps[0] == steps[1]
    first, second = (one["measurement"] for one in verdicts.values())
    assert (first["metrics"]["step_time"], second["metrics"]["step_time"]) == pytest.approx((0.01, 0.022), rel=0.1)
    assert first["metrics"]["throughput"] == pytest.approx(100 / 0.01)
    assert second["metrics"]["throughput"] == pytest.approx(100 / second["metrics"]["step_time"])
    (one,), (other,) = first["times"]["samples"], second["times"]["samples"]
    assert len(one["seconds"]) == len(other["seconds"]) > 20  # of which rank 0 alone would take 12


def test_a_rank_that_is_slower_is_timed_again_with_the_other_and_named(ranks):
    assert ranks(TOGETHER, "--gpumem-update=new")[0].status == 0
    red, steps, verdicts = ranks(TOGETHER, "--gpumem-baseline", scripts=[AT_REST, {"seconds": [0.02]}])
    assert red.status != 0
    assert "measure rank 1 of 2: Time regressed: step time 20.00 ms, baseline 10.00 ms" in red.output, red.output
    assert "measure rank 0 of 2: Time regressed" not in red.output
    assert outcomes_of(verdicts) == {"measure rank 0 of 2": "ok", "measure rank 1 of 2": "regressed"}
    assert [len(one["measurement"]["times"]["samples"]) for one in verdicts.values()] == [2, 2]
    assert steps[0] == steps[1]

    # A slowdown that a second sample does not show.
    clean, steps, verdicts = ranks(TOGETHER, "--gpumem-baseline", scripts=[AT_REST, {"seconds": [0.02, 0.01]}])
    assert clean.status == 0, clean.output
    assert outcomes_of(verdicts) == {"measure rank 0 of 2": "ok", "measure rank 1 of 2": "ok"}
    assert [len(one["measurement"]["times"]["samples"]) for one in verdicts.values()] == [2, 2]
    assert steps[0] == steps[1]


LOOPS = """
import os


def test_it(gpumem):
    model = torch.nn.Linear(8, 8)
    optimizer = torch.optim.SGD(model.parameters())
    with gpumem.loop():
        for _ in range(12 if os.environ["RANK"] == "1" else 1000):
            model(torch.ones(8, 8)).sum().backward()
            optimizer.step()
"""


def test_a_loop_that_ends_before_on_one_rank_is_timed_on_none(ranks):
    job, _, verdicts = ranks(LOOPS)
    assert job.status == 0, job.output
    notes = [" ".join(one["measurement"]["notes"]) for one in verdicts.values()]
    assert "the loop of another rank ended before 20 steps: nothing was counted or timed" in notes[0]
    assert "the loop ended after 12 of 20 steps: nothing was counted or timed" in notes[1]


@pytest.mark.thorough
def test_a_busy_loop_on_one_rank_is_found_by_the_real_clock(ranks):
    assert ranks(APART, "--gpumem-update=new", device="quiet")[0].status == 0
    clean, *_ = ranks(APART, "--gpumem-baseline", device="quiet")
    assert clean.status == 0, clean.output
    red, _, verdicts = ranks(APART, "--gpumem-baseline", device="quiet", MORE="0.2")
    assert red.status != 0, verdicts
    assert "measure rank 1 of 2: Time regressed" in red.output, red.output
    assert outcomes_of(verdicts)["measure rank 1 of 2"] == "regressed"
    assert outcomes_of(verdicts)["measure rank 0 of 2"] != "regressed"
