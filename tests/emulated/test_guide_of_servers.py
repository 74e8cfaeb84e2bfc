"""The programs in the guide to servers and launched jobs, and the faults that the guide shows."""

from __future__ import annotations

import re

import pytest

from tests.conftest import figures_of
from tests.pages import blocks_of

PAGE = "docs/guide/servers-and-launched-jobs.md"
NAMES = {
    *("call: serve.py", "call: all processes", "measure: serve.py", "measure: all processes"),
    *("call: multiprocessing", "call: multiprocessing 2"),
    *("launch", "launch: train.py rank 0", "launch: train.py rank 1"),
}


@pytest.fixture
def session(processes, tmp_path):
    files = {block.file: block.text for block in blocks_of(PAGE) if block.language == "python"}
    assert files.keys() == {"serve.py", "test_server.py", "train.py", "test_training.py", "test_spawn.py"}
    for name, text in files.items():
        (tmp_path / name).write_text(text, encoding="utf-8")

    def run(*arguments, **variables):
        return processes.pytest("--junitxml=report.xml", *arguments, gpu="h100x2", timeout=600, **variables)

    return run


def test_the_guides_tests_repeat_and_find_the_faults_that_it_shows(session, tmp_path):
    recorded = session("--gpumem-update=new")
    assert recorded.returncode == 0, recorded.stdout
    first = figures_of(tmp_path / "report.xml")
    assert {key.removesuffix(".peak_allocated") for test in first.values() for key in test} >= NAMES
    gated = session("--gpumem-baseline", "-n", "2")
    assert gated.returncode == 0, gated.stdout
    assert figures_of(tmp_path / "report.xml") == first
    faulty = session("--gpumem-baseline", "-vv", SERVER_OPTIONS="--leak", UNEQUAL="1")
    assert "3 failed, 1 passed" in faulty.stdout, faulty.stdout
    printed = {" ".join(line.split()) for line in faulty.stdout.splitlines()}
    # The peak has another release's workspaces.
    for measurement, metrics in {
        "call": ("retained", "kept in"),
        "measure": ("growth per step", "retained", "kept in", "note: the process held"),
    }.items():
        shown = next(block.text for block in blocks_of(PAGE) if block.text.startswith(f"In {measurement}: serve.py"))
        rows = [
            line.split() for line in shown.splitlines() if "serve.py:16" in line or line.strip().startswith(metrics)
        ]
        assert len(rows) == 4 + (measurement == "measure")
        assert printed >= {" ".join(row) for row in rows}, faulty.stdout
    assert re.search(r"imbalance over ranks +1\.00 +1\.\d\d .* regressed", faulty.stdout), faulty.stdout
    assert "train.py rank 1 has the largest peak of all ranks" in faulty.stdout
