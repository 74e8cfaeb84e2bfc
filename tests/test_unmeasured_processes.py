"""A test whose process was not seen says so, is counted, and fails strict mode."""

from __future__ import annotations

import json
import sys

import pytest

from tests.jobs.mapped import maps_torch

pytestmark = pytest.mark.skipif(sys.platform != "linux", reason="other systems do not list the libraries of a process")

CONFTEST = """
from pathlib import Path

from pytest_gpumem.measuring.jobs.processes import JobProcesses

look = JobProcesses.look


def look_and_tell(processes):
    look(processes)
    for pid, process in processes._processes.items():
        if process.has_gpu_library and process.looks > 1:
            Path(f"{pid}.looked").touch()


JobProcesses.look = look_and_tell
"""
UNTIL_LOOKED = """import os, time
for _ in range(6000):
    if os.path.exists(f'{os.getpid()}.looked'):
        break
    time.sleep(0.01)
"""
TEST = f"""
import os
import subprocess
import sys

CODE = {maps_torch(UNTIL_LOOKED)!r}


def start(*options, **more):
    subprocess.run([sys.executable, *options, "-c", CODE], check=True, **more)


@pytest.mark.gpumem(max_gb=1)
def test_with_tensors():
    kept = torch.ones(5)
    start(env={{**os.environ, "PYTHONPATH": "src"}})


@pytest.mark.gpumem
def test_without_tensors():
    start("-I")


def test_step(gpumem):
    gpumem.assert_no_growth(lambda: torch.ones(5), steps=2)
    started = []

    def step():
        if not started:
            started.append(start(env={{}}))
        return torch.ones(5)

    gpumem.assert_no_growth(step, steps=2)


@pytest.mark.gpumem(max_gb=1)
def test_alone():
    kept = torch.ones(5)
"""
REPLACED = 'because its PYTHONPATH was replaced (add os.environ["PYTHONPATH"] to it)'
CLEARED = "because its environment has no PYTHONPATH (start it with env={**os.environ, ...})"
HELD_NOTHING = "call held no tensor on cpu"
WITH_PROCESSES = "3 with processes that were not measured (see the notes)"
ISOLATED = "because it runs with python -I (start it without -I)"


@pytest.fixture
def session(project):
    project.write(CONFTEST, "conftest.py")
    project.write(TEST)
    return lambda *arguments: project.run("--gpumem-report=report.json", *arguments, separate=True)


def test_a_test_with_a_process_that_was_not_seen_is_counted_and_the_cause_is_named(project, session):
    result = session("-q", "--junitxml=report.xml", "--gpumem-report=report.md", "--gpumem-report=report.html")
    result.assert_outcomes(passed=4)
    assert result.outlines[-2] == f"gpumem: 3 gated, 1 unmeasured ({HELD_NOTHING}), {WITH_PROCESSES}"
    verdicts = project.verdicts()
    processes = {test: verdict["unmeasured_processes"] for test, verdict in verdicts.items()}
    assert [len(clauses) for clauses in processes.values()] == [1, 1, 1, 0]
    for test, cause in (("test_with_tensors", REPLACED), ("test_without_tensors", ISOLATED), ("test_step", CLEARED)):
        assert processes[test][0].startswith("not seen: `")
        assert processes[test][0].endswith(f"loads torch or CUDA, and does not report its memory, {cause}")
    unmeasured = verdicts["test_without_tensors"]["unmeasured"]
    assert unmeasured == f"{HELD_NOTHING}; {processes['test_without_tensors'][0]}"
    results = json.loads((project.path / "report.json").read_text(encoding="utf-8"))["results"]
    assert {each["verdict"]["test"]: each["verdict"]["unmeasured_processes"] for each in results} == processes
    for report in ("report.md", "report.html"):
        text = (project.path / report).read_text(encoding="utf-8")
        assert "its PYTHONPATH was replaced" in text, report
        assert WITH_PROCESSES in text, report


def test_each_process_that_was_not_seen_is_a_note_below_the_table(session):
    result = session()
    notes = [line for line in result.outlines if line.startswith("note: ")]
    for test, cause in (("test_with_tensors", REPLACED), ("test_without_tensors", ISOLATED), ("test_step", CLEARED)):
        (note,) = [note for note in notes if cause in note]
        assert f"::{test}: not seen: `" in note


def test_strict_mode_fails_each_test_with_a_process_that_was_not_seen(session):
    result = session("--gpumem-strict")
    result.assert_outcomes(failed=3, passed=1)
    headlines = [line for line in result.outlines if "(required by --gpumem-strict): " in line[:60]]
    not_certain = "Not certain (required by --gpumem-strict): not all of the test's processes were measured"
    not_measured = f"Not measured (required by --gpumem-strict): {HELD_NOTHING}; not seen: `"
    shown = [line for line in headlines if not line.startswith("FAILED")]
    assert (shown[0], shown[2]) == (not_certain, not_certain)
    assert shown[1].startswith(not_measured)
    notes = [line for line in result.outlines if "note: " in line]
    assert len(notes) == 2, "a failure has its processes, so the table has no note of its own"


def test_a_step_without_tensors_says_so_before_it_names_an_unseen_process(project, session):
    project.write(f"{TEST}\n\ndef test_elsewhere(gpumem):\n    gpumem.assert_no_growth(lambda: start('-I'), steps=2)\n")
    result = session("-k", "elsewhere")
    result.assert_outcomes(failed=1)
    result.stdout.fnmatch_lines(
        ["E *MeasuringError: the step held no tensor on cpu; not seen: `*", f"E *loads torch or CUDA, * {ISOLATED}"]
    )
