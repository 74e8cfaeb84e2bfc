"""Nothing that grew passes green: regressions planted in default mode, with and without workers, beside their clean twins.

Each scenario is a test file that runs to record baselines, clean against them, and planted, and some also in workers.
What is planted reads the environment variable ``PLANTED``, so that the clean twin is the same code.
"""

from __future__ import annotations

import fnmatch
import json
import os
import shutil
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import pytest

from tests import preloaded
from tests.support.processes import hide_what_is_loaded

if TYPE_CHECKING:
    from collections.abc import Mapping
    from pathlib import Path

MODEL = """
import contextlib
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
import os

import pytest

from pytest_gpumem.measuring.devices.cpu import CpuDevice
from pytest_gpumem.facts.measurement import Environment


class SecondDevice(CpuDevice):
    name = "second"

    def environment(self):
        return Environment("second-1", "Second 1", {})


def pytest_gpumem_devices(config):
    return {"second": SecondDevice}


def pytest_collection_modifyitems(items):
    for item in items:
        if item.name == "test_marked_by_the_conftest":
            item.add_marker(pytest.mark.gpumem)
        if item.name == "test_marked_until_then" and "PLANTED" not in os.environ:
            item.add_marker(pytest.mark.gpumem)
"""
SETTINGS = """
[tool.gpumem]
mark = ["*::test_marked_by_pattern"]
time_budget = "1 s"
"""


@dataclass(frozen=True)
class Scenario:
    """A planted regression, and what the failure must tell of it."""

    name: str
    source: str
    told: tuple[str, ...]


LOOP = """
@pytest.mark.gpumem(max_memory="8 MB")
def test_it(gpumem):
    model, held = layers(), []
    optimizer = torch.optim.AdamW(model.parameters())
    with gpumem.loop():
        for n, length in enumerate(LENGTHS):
            x = torch.ones(length, 64)
            if PLANTED and LEAKS:
                held.append(torch.ones(100_000))
            model(x).square().mean().backward()
            optimizer.step()
            optimizer.zero_grad()
"""
SCENARIOS = (
    Scenario(
        "a leak",
        """
class Net(nn.Module):
    def __init__(self):
        super().__init__()
        self.layers, self.seen = layers(128, 4), []

    def forward(self, x):
        x = self.layers(x)
        if PLANTED:
            self.seen.append(x)
        return x


def test_it(gpumem):
    gpumem.train_step(Net, torch.ones(450, 128), loss=loss)
""",
        (
            "Memory regressed: growth per step 230.40 kB, baseline 0 B: +230.40 kB, allowed +1.02 kB",
            "*kept by each step *",
            "*activations * layers.* test_*.py:* addmm * 1 x float32?450, 128?",
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
            "  kept in: the autograd graph of test_it.<locals>.kept?...?",
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
        "twenty times the work of a step whose peak does not settle",
        """
def test_it(gpumem):
    kept, x = [], torch.ones(64, 64)

    def step():
        kept.append(torch.ones(125))
        for _ in range(20 if PLANTED else 1):
            torch.mm(x, x)

    gpumem.measure(step)
""",
        (
            "Work regressed: FLOPs 10.49 MFLOP, baseline 524.29 kFLOP: +9.96 MFLOP (+1900.0 %), allowed +0.0 %",
            "*more FLOPs * change * line*",
            "*mm * +9.96 MFLOP * test_*.py:*",
        ),
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
    gpumem.train_step(make, torch.ones(512, 64), config=config, loss=loss)
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
        ("Measurement missing: it has baselines on this device for measurements that it no longer takes: eval",),
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
        "a marker that went",
        """
def test_it(n=1_000_000):
    torch.ones(n)


if not PLANTED:
    test_it = pytest.mark.gpumem(test_it)
""",
        (
            "Not measured any more: it no longer has the marker *",
            "*baseline: call, *",
            "*accept:   gpumem prune test_*.py::test_it *",
        ),
    ),
    Scenario(
        "a marker that went and named another device than that of the session",
        """
def test_it(n=1_000_000):
    torch.ones(n)


if not PLANTED:
    test_it = pytest.mark.gpumem(device="second")(test_it)
""",
        ("Not measured any more: it no longer has the marker *", "*baseline: call, *"),
    ),
    Scenario(
        "a fixture that a test does not ask for any more",
        """
if PLANTED:
    def test_it():
        layers()(torch.ones(32, 64))
else:
    def test_it(gpumem):
        gpumem.infer_step(layers, torch.ones(32, 64), name="eval")
""",
        ("Not measured any more: it no longer has the marker *", "*baseline: eval, *"),
    ),
    Scenario(
        "a marker that a conftest does not give any more",
        """
def test_marked_until_then():
    torch.ones(1_000_000)
""",
        ("Not measured any more: it no longer has the marker *",),
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
        ("Memory regressed: peak *", "*Grad mode was off in * calls of `Sequential` (called at *", "*what grew *"),
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
    Scenario(
        "a spike in every second call",
        """
def test_it(gpumem):
    calls = []

    def step():
        calls.append(1)
        torch.ones(1_300_000 if PLANTED and len(calls) % 2 == 0 else 1_000_000)

    gpumem.measure(step)
""",
        (
            "Memory regressed: peak 5.20 MB, baseline 4.00 MB: +1.20 MB (+30.0 %), *",
            "  what grew *",
            "*note: peak allocated: peaks differ from step to step: between 4.00 MB and 5.20 MB in 9 steps, *; in the baseline all steps have the same peak",
        ),
    ),
    Scenario(
        "a spike in every fourth training step",
        """
def test_it(gpumem):
    calls = []

    def spiking(output, batch):
        calls.append(1)
        extra = torch.ones(500_000) if PLANTED and len(calls) % 4 == 0 else None
        return output.square().mean()

    gpumem.train_step(layers, torch.ones(512, 64), loss=spiking)
""",
        ("Memory regressed: peak *", "*test_*.py:* ones * 1 x float32?500000?*"),
    ),
    Scenario(
        "a first step that is over its budget",
        """
@pytest.mark.gpumem(max_memory="30 MB")
def test_it(gpumem):
    calls = []

    def step():
        calls.append(1)
        torch.ones(11_250_000 if PLANTED and len(calls) == 2 else 1_000_000)

    gpumem.measure(step)
""",
        (
            "Memory over budget: peak 45.00 MB, budget 30.00 MB: +15.00 MB (+50.0 %)",
            "*note: step 2 of 8 needed 45.00 MB: *",
        ),
    ),
    Scenario(
        "a loop that needs more in its third step than its budget",
        LOOP.replace("LEAKS", "False").replace(
            "LENGTHS", "[400 + 10 * (n * 7 % 19) + (4_750 if PLANTED and n == 2 else 0) for n in range(99)]"
        ),
        (
            "Memory over budget: peak 1?.?? MB, budget 8.00 MB: *",
            "  note: peaks differ from step to step: between *",
            "  note: the table shows a step with * has not come again in 20 more steps; let batches repeat *",
        ),
    ),
    Scenario(
        "a loop of which one step in ten needs more",
        LOOP.replace("LEAKS", "False").replace(
            "LENGTHS", "[800 if PLANTED and n % 10 == 4 else 400 for n in range(99)]"
        ),
        (
            "Memory regressed: peak *",
            "*; in the baseline all steps have the same peak",
            "*activations *4 x float32?800, 64? *",
        ),
    ),
    Scenario(
        "a loop with batches of different sizes, each of which needs more",
        LOOP.replace("LEAKS", "False")
        .replace("LENGTHS", "[400 + 200 * (n * n % 5 + n % 3) for n in range(99)]")
        .replace("model(x).", "(model(x) + (model(x).exp() if PLANTED else 0))."),
        ("Memory regressed: peak *", "*; in the baseline between *", "*test_*.py:* exp *1 x float32?1600, 64?*"),
    ),
    Scenario(
        "a leak in every tenth step of a loop",
        LOOP.replace("LENGTHS", "[400] * 99").replace("LEAKS", "n % 10 == 4"),
        (
            "Memory regressed: growth per step 33.33 kB, baseline 0 B: *",
            "*kept by each step *",
            "*activations *400.00 kB * ones * 1 x float32?100000?",
        ),
    ),
    Scenario(
        "a measurement within another",
        """
def test_it(gpumem):
    def step():
        torch.ones(1_000_000)
        if PLANTED:
            gpumem.measure(lambda: torch.ones(7_000_000))

    gpumem.measure(step)
""",
        (),
    ),
    Scenario(
        "steps within steps, in a loop that catches each exception",
        """
def test_it(gpumem):
    def train(each):
        with gpumem.loop() as steps:
            while not steps.step_ended():
                torch.ones(1_000_000)
                with contextlib.suppress(Exception):
                    each()

    train(lambda: train(list) if PLANTED else None)
""",
        (),
    ),
)


SLOWER = """
import time

X = torch.ones(256, 256)


def step(planted=PLANTED):
    X @ X
    sum(range(5_000_000 if planted else 25_000))


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
ENDING = """
def test_it(gpumem):
    gpumem.infer_step(layers, torch.ones(32, 64))
    if PLANTED:
        os._exit(0)
"""


UNTIMED = ("--no-gpumem-time",)


@dataclass(frozen=True)
class Folder:
    """A project that pytest runs in, in processes of its own."""

    path: Path

    def run(self, *arguments: str, **environment: str) -> int:
        command = ["-m", "pytest", "-q", "-p", "no:cacheprovider", "--gpumem-device=cpu"]
        command += ["-p", "no:randomly"] if "-n" in arguments else []
        command += arguments
        outside = {name: value for name, value in os.environ.items() if not name.startswith(("PYTEST_", "PLANTED"))}
        outside |= {} if "-n" in arguments else preloaded.ALONE
        return preloaded.run(
            *command, cwd=self.path, env={**outside, **environment}, before=hide_what_is_loaded
        ).returncode

    def report(self, name: str) -> Mapping[str, Any]:
        return json.loads((self.path / name).read_text(encoding="utf-8"))


@pytest.fixture(scope="module")
def folder(tmp_path_factory) -> Folder:
    """The project of all scenarios, and its baselines."""
    path = tmp_path_factory.mktemp("scenarios")
    (path / "ending").mkdir()
    (path / "pyproject.toml").write_text(SETTINGS, encoding="utf-8")
    (path / "conftest.py").write_text(CONFTEST, encoding="utf-8")
    for scenario in SCENARIOS:
        (path / file_of(scenario)).write_text(MODEL + scenario.source, encoding="utf-8")
    (path / "ending/test_ends.py").write_text(MODEL + ENDING, encoding="utf-8")
    folder = Folder(path)
    assert folder.run("--gpumem-update=new", *UNTIMED) == 0
    return folder


def by_file(report: Mapping[str, Any]) -> dict[str, Any]:
    """The results of a report, of which each file has one."""
    return {result["verdict"]["file"]: result for result in report["results"]}


def of(report: Mapping[str, Any], scenario: Scenario) -> Mapping[str, Any]:
    """The result of a scenario's test."""
    return by_file(report)[file_of(scenario)]


def file_of(scenario: Scenario) -> str:
    return f"test_{SCENARIOS.index(scenario)}.py"


def test_every_clean_twin_is_gated_and_green(folder):
    assert folder.run("--gpumem-baseline", "--gpumem-report=clean.json", *UNTIMED) == pytest.ExitCode.OK
    results = by_file(folder.report("clean.json"))
    assert len(results) == len(SCENARIOS) + 1
    for file, result in results.items():
        assert result["passed"], file
        metrics = [one for verdict in result["verdict"]["verdicts"] for one in verdict["metrics"]]
        assert {one["outcome"] for one in metrics} <= {"ok", "recorded"}, file
        assert any(one["allowed"] is not None for one in metrics), file


def test_everything_that_is_planted_is_red_and_told(folder):
    planted = ("--gpumem-baseline", "--gpumem-report=planted.json", *UNTIMED, "--ignore=ending")
    assert folder.run(*planted, PLANTED="1") == pytest.ExitCode.TESTS_FAILED
    report = folder.report("planted.json")
    assert [scenario.name for scenario in SCENARIOS if not of(report, scenario)["failed"]] == []
    failures = {scenario.name: of(report, scenario)["verdict"]["failure"] or "" for scenario in SCENARIOS}
    not_told = [
        f"{scenario.name}: {expected!r} is not in\n{failures[scenario.name]}"
        for scenario in SCENARIOS
        for expected in scenario.told
        if not fnmatch.filter(failures[scenario.name].splitlines(), expected)
    ]
    assert not_told == []
    # It would end this session, too.
    assert folder.run("ending", "--gpumem-baseline", *UNTIMED, PLANTED="1") == 1


OTHERWISE_IN_WORKERS = (
    "a leak",
    "a measurement behind an if",
    "a measurement after an early return",
    "a marker that went and named another device than that of the session",
    "a marker that a conftest does not give any more",
    "a config that this device cannot run",
    "growth beside a profiler of the test's own",
    "a step that moved off the measured device",
    "a first step that is over its budget",
)
"""Scenarios that fail each for another reason, of which some are seen where no test runs."""


# What a failure tells is made by the worker as it is without workers.
@pytest.mark.parametrize("every", [False, pytest.param(True, marks=pytest.mark.thorough)])
def test_what_is_planted_is_red_in_workers(folder, tmp_path, every):
    chosen = [scenario for scenario in SCENARIOS if every or scenario.name in OTHERWISE_IN_WORKERS]
    assert every or len(chosen) == len(OTHERWISE_IN_WORKERS)
    copied = Folder(shutil.copytree(folder.path, tmp_path / "copied"))
    planted = ("-n", "2" if every else "1", "--gpumem-baseline", "--gpumem-report=workers.json", *UNTIMED)
    files = [] if every else map(file_of, chosen)
    assert copied.run(*planted, *files, PLANTED="1") == pytest.ExitCode.TESTS_FAILED
    report = copied.report("workers.json")
    assert [scenario.name for scenario in chosen if not of(report, scenario)["failed"]] == []
    assert not report["passed"]
    # Its worker ended before it could tell of it.
    assert report["not_run"] == ([["ending/test_ends.py", "test_it"]] if every else [])


def test_a_much_longer_step_is_red_and_its_clean_twin_green_on_a_busy_machine(tmp_path):
    (tmp_path / "pyproject.toml").write_text(SETTINGS, encoding="utf-8")
    (tmp_path / "test_slow.py").write_text(MODEL + SLOWER, encoding="utf-8")
    folder = Folder(tmp_path)
    assert folder.run("--gpumem-update=all", "--no-gpumem-time") == 0
    # As if recorded when nothing was at work, which nobody can wait for: of a step that took half as long again.
    seconds = 1.5 * float((folder.path / "seconds").read_text(encoding="utf-8"))
    (file,) = folder.path.glob("gpumem-baselines/*/test_slow.py.toml")
    text = file.read_text(encoding="utf-8")
    assert text.count("\ncomposition = ") == 1
    times = f"step_time = {seconds}\nstep_times = [{seconds}, {seconds}]\n"
    file.write_text(text.replace("\ncomposition = ", f"\n{times}composition = "), encoding="utf-8")

    assert folder.run("--gpumem-baseline", "--gpumem-report=clean.json") == 0
    assert folder.report("clean.json")["results"][0]["passed"]
    assert folder.run("--gpumem-baseline", "--gpumem-report=slow.json", PLANTED="1") == 1
    (result,) = folder.report("slow.json")["results"]
    assert result["verdict"]["failure"].startswith("Time regressed: step time ")
