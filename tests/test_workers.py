"""Under pytest-xdist: the same figures, the same verdicts and the same exit code as without."""

from __future__ import annotations

import json
import re

import pytest

SUITE = """
@pytest.mark.gpumem
def test_grows():
    torch.ones({grows})


@pytest.mark.gpumem
def test_shrinks():
    torch.ones({shrinks})


@pytest.mark.gpumem(max_memory="1 MB")
def test_over_budget():
    torch.ones(500_000)


@pytest.mark.xdist_group("together")
@pytest.mark.parametrize("way", ["a", "b@home"])
@pytest.mark.gpumem
def test_grouped(way):
    torch.ones(1_000_000)


def test_steps(gpumem):
    gpumem.infer_step(lambda: torch.nn.Linear(64, 64), torch.ones(8, 64))
    gpumem.measure(lambda: torch.ones({grows} // 10).exp())


def test_load(gpumem):
    gpumem.load(lambda: (torch.nn.Linear(64, 64), torch.ones({grows}))[0])


@pytest.mark.gpumem
def test_{last}():
    torch.ones(10)


def test_plain(): ...
"""


def test_workers_change_neither_figures_nor_verdicts_nor_reports_nor_the_exit_code(project):
    project.write(SUITE.format(grows=1_000_000, shrinks=2_000_000, last="gone"))
    project.run("--gpumem-update=new")
    project.write(SUITE.format(grows=2_000_000, shrinks=1_000_000, last="new"))
    reports = "--junitxml=report.xml", "--gpumem-report=report.json"
    told = []
    for workers in ([], ["-n2", "--dist=loadgroup"]):
        result = project.run("--gpumem-baseline", *reports, *workers, separate=bool(workers))
        assert result.ret == pytest.ExitCode.TESTS_FAILED
        result.assert_outcomes(passed=5, failed=4)
        result.stdout.fnmatch_lines(["gpumem: 7 gated, 1 over budget, 3 regressed, 1 improved, 1 new"])
        report = json.loads((project.path / "report.json").read_text())
        results = sorted(report["results"], key=lambda result: str(result["verdict"]["test"]))
        # When what happened in a recorded step is not the same twice.
        texts = (json.dumps(one, sort_keys=True) for one in (project.verdicts(), results, report["causes"]))
        told.append([re.sub(r'"(begin|end|time_ns)": (\d+|\[[\d, ]*\])', "", text) for text in texts])
    assert told[1] == told[0]


def test_unused_baselines_are_told_by_the_controller(project):
    project.write("@pytest.mark.gpumem\ndef test_gone():\n    torch.ones(10)\n")
    project.run("--gpumem-update=new")
    project.write("@pytest.mark.gpumem\ndef test_here():\n    torch.ones(10)\n")
    result = project.run("--gpumem-baseline", "--gpumem-update=new", "-n1", separate=True)
    result.stdout.fnmatch_lines(["gpumem store: 1 unused baseline: test_it.py::test_gone (call)*"])


def test_with_several_gpus_each_worker_sees_its_own(project, monkeypatch):
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "5,GPU-7")
    project.settings("[tool.gpumem]\n")
    (project.path / "test_it.py").write_text(
        """
import os
import time

import pytest


@pytest.mark.parametrize("number", range(4))
def test_it(number, worker_id):
    time.sleep(0.2)
    assert os.environ["CUDA_VISIBLE_DEVICES"] == {"gw0": "5", "gw1": "GPU-7"}[worker_id]
"""
    )
    project.run("-n2", device=None, separate=True).assert_outcomes(passed=4)


def test_a_project_that_says_nothing_of_gpumem_keeps_all_its_gpus(project, monkeypatch):
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "5,7")
    source = "import os\n\n\ndef test_it():\n    assert os.environ['CUDA_VISIBLE_DEVICES'] == '5,7'\n"
    (project.path / "test_it.py").write_text(source)
    # Without any option of the plugin's.
    project.run("-n1", device=None, separate=True, timed=True).assert_outcomes(passed=1)
