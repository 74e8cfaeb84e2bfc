"""Nothing that grew passes green: regressions planted in default mode, with and without workers, beside their clean twins.

Each scenario is a test file that runs three times: to record baselines, clean against them, and planted. What is planted
reads the environment variable ``PLANTED``, so that the clean twin is the same code.
"""

from __future__ import annotations

import fnmatch
import json
import os
import subprocess
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import pytest

if TYPE_CHECKING:
    from collections.abc import Mapping
    from pathlib import Path

MODEL = """
import os

import pytest
import torch
from torch import nn

PLANTED = "PLANTED" in os.environ


def loss(output, batch):
    return output.square().mean()


def layers(width=64, count=4):
    return nn.Sequential(*(nn.Linear(width, width) for _ in range(count)))
"""


CONFTEST = """
import pytest


def pytest_collection_modifyitems(items):
    for item in items:
        if item.name == "test_marked_by_the_conftest":
            item.add_marker(pytest.mark.gpumem)
"""
SETTINGS = """
[tool.gpumem]
measure = ["*::test_marked_by_pattern"]
time_budget = "1 s"
"""


@dataclass(frozen=True)
class Scenario:
    """A planted regression, and what the failure must tell of it."""

    name: str
    source: str
    told: tuple[str, ...]


SCENARIOS = (
    Scenario(
        "a leak",
        """
class Net(nn.Module):
    def __init__(self):
        super().__init__()
        self.layers, self.seen = layers(512, 8), []

    def forward(self, x):
        x = self.layers(x)
        if PLANTED:
            self.seen.append(x)
        return x


def test_it(gpumem):
    gpumem.train_step(Net, torch.ones(450, 512), loss=loss)
""",
        (
            "Memory regressed: growth per step 921.60 kB, baseline 0 B: +921.60 kB, allowed +1.02 kB",
            "*kept by each step *",
            "*activations * layers.* test_*.py:* addmm * 1 x float32?450, 512?",
            "  kept in: Net.seen?...?",
        ),
    ),
    Scenario(
        "a leak every third step",
        """
def test_it(gpumem):
    kept, calls = [], []

    def step():
        calls.append(1)
        x = torch.ones(64, 1000)
        if PLANTED and len(calls) % 3 == 0:
            kept.append(x)

    gpumem.measure(step)
""",
        ("Memory regressed: growth per step 85.33 kB, baseline 0 B: *",),
    ),
    Scenario(
        "losses kept with their graphs",
        """
def test_it(gpumem):
    model, kept = layers(), []

    def step():
        result = model(torch.ones(256, 64)).square().mean()
        if PLANTED:
            kept.append(result)

    gpumem.measure(step)
""",
        (
            "Memory regressed: growth per step *",
            "*activations * test_*.py:*float32?256, 64?",
            "  kept in: test_it.<locals>.kept?...?",
        ),
    ),
    Scenario(
        "a peak that moves, and whose smallest value grew",
        """
def test_it(gpumem):
    calls = []

    def step():
        calls.append(1)
        torch.ones((5000 if PLANTED else 4000) + len(calls) * 7 % 11, 100).sum()

    gpumem.measure(step)
""",
        ("Memory regressed: peak *",),
    ),
    Scenario(
        "a layer made four times as wide",
        """
def test_it(gpumem):
    gpumem.train_step(layers(256 if PLANTED else 64), torch.ones(32, 256 if PLANTED else 64), loss=loss)
""",
        ("Memory regressed: peak *; another workload: parameters 263.17 k, were 16.64 k; batch *",),
    ),
    Scenario(
        "a batch twice as large",
        """
def test_it(gpumem):
    gpumem.train_step(layers, torch.ones(2048 if PLANTED else 1024, 64), loss=loss)
""",
        ("Memory regressed: peak *; another workload: batch float32?2048, 64?, was float32?1024, 64?",),
    ),
    Scenario(
        "checkpointing dropped from the config",
        """
def test_it(gpumem):
    def make():
        return nn.Sequential(*(nn.Sequential(nn.Linear(64, 256), nn.GELU(), nn.Linear(256, 64)) for _ in range(4)))

    config = "fp32" if PLANTED else "checkpoint=blocks"
    gpumem.train_step(make, torch.ones(2048, 64), config=config, loss=loss)
""",
        ("Memory regressed: peak *; another workload: config fp32, was *checkpoint=blocks",),
    ),
    Scenario(
        "a third more of a small peak",
        """
@pytest.mark.gpumem
def test_it():
    torch.ones(1_000_000 if PLANTED else 750_000)
""",
        ("Memory regressed: peak 4.00 MB, baseline 3.00 MB: +1.00 MB (+33.3 %), allowed +2.1 %",),
    ),
    Scenario(
        "a measurement behind an if",
        """
def test_it(gpumem):
    gpumem.train_step(layers, torch.ones(32, 64), loss=loss)
    if not PLANTED:
        gpumem.infer_step(layers, torch.ones(32, 64), name="eval")
""",
        ("Measurement missing: it has baselines on this device of measurements that it no longer takes: eval",),
    ),
    Scenario(
        "a measurement after an early return",
        """
def test_it(gpumem):
    if PLANTED:
        return
    gpumem.infer_step(layers, torch.ones(32, 64))
""",
        ("Not measured any more: it has the gpumem fixture but measured nothing with it", "*baseline: infer_step, *"),
    ),
    Scenario(
        "a measurement that was renamed",
        """
def test_it(gpumem):
    gpumem.infer_step(layers, torch.ones(512 if PLANTED else 32, 64), name="after" if PLANTED else "before")
""",
        (
            "Measurement missing: * no longer takes: before",
            "  accept:   pytest test_*.py::test_it --gpumem-update=all *",
        ),
    ),
    Scenario(
        "operators that cannot be counted any more",
        """
class Net(nn.Module):
    def __init__(self):
        super().__init__()
        self.layers = layers()

    def forward(self, x):
        if PLANTED and torch.utils._python_dispatch._get_current_dispatch_mode() is not None:
            raise RuntimeError("not under a dispatch mode")
        return self.layers(x)


def test_it(gpumem):
    gpumem.train_step(Net, torch.ones(32, 64), loss=loss)
""",
        ("Measurement missing: * no longer takes: train_step (FLOPs, operators, syncs)",),
    ),
    Scenario(
        "a config that this device cannot run",
        """
def test_it(gpumem):
    gpumem.train_step(layers, torch.ones(32, 64), config="tf32" if PLANTED else "fp32", loss=loss)
""",
        (),
    ),
    Scenario(
        "growth beside a profiler of the test's own",
        """
@pytest.mark.gpumem
def test_it():
    if PLANTED:
        with torch.profiler.profile():
            torch.ones(9_000_000)
    torch.ones(1_000_000)
""",
        ("Not measured any more: *profiler*", "*baseline: call, *"),
    ),
    Scenario(
        "growth in a test that a conftest marks",
        """
def test_marked_by_the_conftest():
    torch.ones(2_000_000 if PLANTED else 1_000_000)
""",
        ("Memory regressed: peak 8.00 MB, baseline 4.00 MB: *",),
    ),
    Scenario(
        "growth in a test that the settings mark",
        """
def test_marked_by_pattern():
    torch.ones(2_000_000 if PLANTED else 1_000_000)
""",
        ("Memory regressed: peak 8.00 MB, baseline 4.00 MB: *",),
    ),
    Scenario(
        "a forgotten no_grad",
        """
def test_it(gpumem):
    student, teacher = layers(), layers(count=3)

    def step():
        with torch.set_grad_enabled(PLANTED):
            target = teacher(torch.ones(512, 64))
        (student(torch.ones(512, 64)) - target).square().mean().backward()
        student.zero_grad()
        teacher.zero_grad()

    gpumem.measure(step)
""",
        ("Memory regressed: peak *", "*activations * grad mode was off here*"),
    ),
    Scenario(
        "a step that moved off the measured device",
        """
@pytest.mark.gpumem
def test_it():
    torch.ones(1_000_000, device="meta" if PLANTED else "cpu")
""",
        ("Not measured any more: call held no tensor on cpu*",),
    ),
)


SLOWER = """
import time

X = torch.ones(256, 256)


def step(planted=PLANTED):
    X @ X
    sum(range(2_000_000 if planted else 100_000))


def test_it(gpumem):
    gpumem.measure(step)


def test_seconds():
    def seconds():
        started = time.perf_counter()
        step(planted=False)
        return time.perf_counter() - started

    with open("seconds", "w") as file:
        file.write(str(min(seconds() for _ in range(100))))
"""


@dataclass(frozen=True)
class Runs:
    """Sessions of one project that has a file a scenario: clean, and with everything planted. Reports are JSON."""

    clean: Mapping[str, Any]
    planted: Mapping[str, Any]
    statuses: tuple[int, int]


@dataclass(frozen=True)
class Folder:
    """A project that pytest runs in, in processes of its own."""

    path: Path
    python: str
    options: tuple[str, ...]

    def run(self, *arguments: str, **environment: str) -> int:
        command = [self.python, "-m", "pytest", "-q", "-p", "no:randomly", "-p", "no:cacheprovider"]
        command += ["--gpumem-device=cpu", *self.options, *arguments]
        outside = {name: value for name, value in os.environ.items() if not name.startswith(("PYTEST_", "PLANTED"))}
        return subprocess.run(
            command, cwd=self.path, env={**outside, **environment}, capture_output=True, check=False
        ).returncode

    def report(self, name: str) -> Mapping[str, Any]:
        return json.loads((self.path / name).read_text(encoding="utf-8"))


ALONE, WORKERS = pytest.param((), id="alone"), pytest.param(("-n", "2"), id="workers")


@pytest.fixture(scope="module", params=[ALONE, WORKERS])
def folder(request, tmp_path_factory, warm_python) -> Folder:
    path = tmp_path_factory.mktemp("scenarios")
    (path / "pyproject.toml").write_text(SETTINGS, encoding="utf-8")
    (path / "conftest.py").write_text(CONFTEST, encoding="utf-8")
    for number, scenario in enumerate(SCENARIOS):
        (path / f"test_{number}.py").write_text(MODEL + scenario.source, encoding="utf-8")
    (path / "timed").mkdir()
    (path / "timed/test_slow.py").write_text(MODEL + SLOWER, encoding="utf-8")
    return Folder(path, warm_python(), request.param)


@pytest.fixture(scope="module")
def runs(folder) -> Runs:
    untimed = ("--gpumem-no-time", "--ignore=timed")
    assert folder.run("--gpumem-update=new", *untimed) == 0
    clean = folder.run("--gpumem-baseline", "--gpumem-report=clean.json", *untimed)
    planted = folder.run("--gpumem-baseline", "--gpumem-report=planted.json", *untimed, PLANTED="1")
    return Runs(folder.report("clean.json"), folder.report("planted.json"), (clean, planted))


def of(report: Mapping[str, Any], scenario: Scenario) -> Mapping[str, Any]:
    """The result of a scenario's test."""
    file = f"test_{SCENARIOS.index(scenario)}.py"
    (result,) = [result for result in report["results"] if result["verdict"]["file"] == file]
    return result


def test_the_clean_session_is_green_and_the_planted_one_red(runs):
    assert runs.statuses == (pytest.ExitCode.OK, pytest.ExitCode.TESTS_FAILED)


@pytest.mark.parametrize("scenario", SCENARIOS, ids=lambda scenario: scenario.name)
def test_the_clean_twin_is_gated_and_green(runs, scenario):
    result = of(runs.clean, scenario)
    assert result["passed"]
    assert {one["outcome"] for verdict in result["verdict"]["verdicts"] for one in verdict["metrics"]} <= {
        "ok",
        "recorded",
    }
    assert any(one["allowed"] is not None for one in result["verdict"]["verdicts"][0]["metrics"])


@pytest.mark.parametrize("scenario", SCENARIOS, ids=lambda scenario: scenario.name)
def test_what_is_planted_is_red_and_told(runs, scenario):
    result = of(runs.planted, scenario)
    assert result["failed"]
    lines = (result["verdict"]["failure"] or "").splitlines()
    for expected in scenario.told:
        assert fnmatch.filter(lines, expected), f"{expected!r} is not in\n{result['verdict']['failure']}"


# One test is one worker's, whichever that is.
@pytest.mark.parametrize("folder", [ALONE], indirect=True)
def test_a_step_that_takes_twenty_times_as_long_is_red_and_its_clean_twin_green_whatever_else_is_at_work(folder):
    assert folder.run("timed", "--gpumem-update=all", "--gpumem-no-time") == 0
    # As if recorded when nothing was at work, which nobody can wait for: of a step that took half as long again.
    seconds = 1.5 * float((folder.path / "seconds").read_text(encoding="utf-8"))
    (file,) = folder.path.glob("gpumem-baselines/*/timed/test_slow.py.toml")
    text = file.read_text(encoding="utf-8")
    assert text.count("\ncomposition = ") == 1
    times = f"step_time = {seconds}\nstep_times = [{seconds}, {seconds}]\n"
    file.write_text(text.replace("\ncomposition = ", f"\n{times}composition = "), encoding="utf-8")

    assert folder.run("timed", "--gpumem-baseline", "--gpumem-report=clean.json") == 0
    assert folder.report("clean.json")["results"][0]["passed"]
    assert folder.run("timed", "--gpumem-baseline", "--gpumem-report=slow.json", PLANTED="1") == 1
    (result,) = folder.report("slow.json")["results"]
    assert result["verdict"]["failure"].startswith("Time regressed: step time ")
