"""Under pytest-xdist: the same figures, the same verdicts and the same exit code as without."""

from __future__ import annotations

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


def test_plain(): ...
"""


@pytest.fixture
def changed(project):
    project.write(SUITE.format(grows=1_000_000, shrinks=2_000_000))
    project.run("--gpumem-update=new", "--no-gpumem-time")
    project.write(SUITE.format(grows=2_000_000, shrinks=1_000_000))
    return project


def test_workers_change_neither_figures_nor_verdicts_nor_the_exit_code(changed):
    alone = changed.run("--gpumem-baseline", "--no-gpumem-time", "--junitxml=report.xml")
    expected = changed.verdicts()
    spread = changed.run("--gpumem-baseline", "--no-gpumem-time", "--junitxml=report.xml", "-n2", separate=True)
    assert spread.ret == alone.ret == pytest.ExitCode.TESTS_FAILED
    assert changed.verdicts() == expected
    accounting = "gpumem: 6 gated, 1 over budget, 1 regressed, 1 improved"
    for result in (alone, spread):
        result.assert_outcomes(passed=5, failed=2)
        result.stdout.fnmatch_lines([accounting])


@pytest.mark.parametrize("mode", ["new", "improved", "all"])
def test_the_controller_writes_what_a_single_process_would(changed, mode):
    before = changed.stored()
    changed.run(f"--gpumem-update={mode}", "--no-gpumem-time")
    alone = changed.stored()
    (path,) = changed.store.rglob("*.toml")
    path.write_text(next(iter(before.values())))
    changed.run(f"--gpumem-update={mode}", "--no-gpumem-time", "-n2", "--dist=loadgroup", separate=True)
    assert changed.stored() == alone


def test_unused_baselines_are_told_by_the_controller(project):
    project.write("@pytest.mark.gpumem\ndef test_gone():\n    torch.ones(10)\n")
    project.run("--gpumem-update=new")
    project.write("@pytest.mark.gpumem\ndef test_here():\n    torch.ones(10)\n")
    result = project.run("--gpumem-baseline", "--gpumem-update=new", "-n2", separate=True)
    result.stdout.fnmatch_lines(["gpumem store: 1 unused baseline: test_it.py::test_gone (call)*"])


def test_with_several_gpus_each_worker_sees_its_own(project, monkeypatch):
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "5,GPU-7")
    project.settings("[tool.gpumem]\n")
    project.write(
        """
import os
import time


@pytest.mark.parametrize("number", range(4))
def test_it(number, worker_id):
    time.sleep(0.2)
    assert os.environ["CUDA_VISIBLE_DEVICES"] == {"gw0": "5", "gw1": "GPU-7"}[worker_id]
"""
    )
    project.run("-n2", device=None, separate=True).assert_outcomes(passed=4)


def test_a_project_that_says_nothing_of_gpumem_keeps_all_its_gpus(project, monkeypatch):
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "5,7")
    project.write("import os\n\n\ndef test_it():\n    assert os.environ['CUDA_VISIBLE_DEVICES'] == '5,7'\n")
    # Without any option of the plugin's.
    project.run("-n2", device=None, separate=True, timed=True).assert_outcomes(passed=1)
