"""Processes that a test starts, on the CPU, where their memory is not measured; and what a session changes for them."""

from __future__ import annotations

import pytest

STATE = """
import os
import subprocess
import sys


def state():
    return dict(os.environ), list(sys.path), subprocess.Popen.__init__


def ours():
    return {name for name in os.environ if name.startswith("GPUMEM_USAGE")}
"""
CONFTEST = """
import state

BEFORE = []


def without_current_test(state):
    environment, *others = state
    return [{name: value for name, value in environment.items() if name != "PYTEST_CURRENT_TEST"}, *others]


def pytest_sessionstart(session):
    BEFORE.append(without_current_test(state.state()))
    session.config.add_cleanup(lambda: print("as before:", without_current_test(state.state()) == BEFORE[0]))
"""


@pytest.fixture
def states(project):
    (project.path / "state.py").write_text(STATE, encoding="utf-8")
    (project.path / "conftest.py").write_text(CONFTEST, encoding="utf-8")
    return project


def test_a_session_that_measures_nothing_leaves_the_environment_alone(states):
    states.write("import state\n\n\ndef test_it():\n    assert state.ours() == set()\n")
    result = states.run(separate=True)
    result.assert_outcomes(passed=1)
    result.stdout.fnmatch_lines(["as before: True"])


@pytest.mark.parametrize("outcome", ["torch.ones(5)", "raise KeyboardInterrupt", "assert 0"])
def test_the_environment_is_as_before_after_a_session_that_measures(states, outcome):
    states.write(f"""
import state


@pytest.mark.gpumem
def test_measured():
    assert state.ours() == {{"GPUMEM_USAGE", "GPUMEM_USAGE_LIVE"}}
    kept = torch.ones(5)
    {outcome}
""")
    result = states.run(separate=True)
    result.stdout.fnmatch_lines(["as before: True"])
    result.assert_outcomes(passed=outcome == "torch.ones(5)", failed=outcome == "assert 0")


def test_a_variable_that_a_test_changed_stays_changed(states):
    states.write("""
import os
import state


@pytest.mark.gpumem
def test_measured():
    kept = torch.ones(5)
    os.environ["PYTHONPATH"] += os.pathsep + "/mine"
    os.environ["GPUMEM_USAGE"] = "/other"
""")
    (states.path / "conftest.py").write_text(
        "import os\n\n\ndef pytest_configure(config):\n"
        "    config.add_cleanup(lambda: print('left:', os.environ['PYTHONPATH'], os.environ.get('GPUMEM_USAGE')))\n",
        encoding="utf-8",
    )
    result = states.run(separate=True)
    result.assert_outcomes(passed=1)
    (line,) = [line for line in result.outlines if line.startswith("left:")]
    assert line.endswith("/mine /other")


def test_a_child_with_torch_is_noted_as_not_counted(project):
    project.write("""
import subprocess
import sys


@pytest.mark.gpumem
@pytest.mark.parametrize("code", ["import torch", "import json"])
def test_it(code):
    kept = torch.ones(5)
    subprocess.run([sys.executable, "-c", code], check=True)
""")
    project.run("--junitxml=report.xml", separate=True).assert_outcomes(passed=2)
    notes = {name: verdict["verdicts"][0]["measurement"]["notes"] for name, verdict in project.verdicts().items()}
    assert notes["test_it[import json]"] == []
    (note,) = notes["test_it[import torch]"]
    assert note.startswith("not counted: `")
    assert note.endswith(
        "-c import torch` loads torch, and only the GPU memory of other processes is measured, and this is a CPU"
    )
