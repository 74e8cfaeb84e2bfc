"""Real ranks: gloo on the CPU, as torchrun starts them. Each rank is measured, the worst one decides, and a lost one is named."""

from __future__ import annotations

import json
import os
import re
import shutil
import socket
from concurrent.futures import ThreadPoolExecutor
from typing import TYPE_CHECKING

import pytest

from tests import preloaded
from tests.support.processes import LEFT_OUT, MOST_SECONDS, Job, hide_what_is_loaded

if TYPE_CHECKING:
    from pathlib import Path

    from tests.conftest import Project

TESTS = """
import os, time
import torch.distributed as dist
from torch.nn.parallel import DistributedDataParallel

RANK = int(os.environ["RANK"])


@pytest.fixture(scope="session", autouse=True)
def group():
    dist.init_process_group("gloo")
    yield
    dist.destroy_process_group()


def begun(model, *shape):
    # In its second step DDP broadcasts how its buckets are ordered. Where a thread of gloo is the last to hold those tensors,
    # this thread's profiler does not see them freed.
    model = DistributedDataParallel(model)
    for _ in range(2):
        model(torch.ones(shape)).sum().backward()
    model.zero_grad()
    return model


def trained(rows, before=lambda: None):
    torch.manual_seed(0)
    model = begun(torch.nn.Linear(256, 256), rows, 256)
    optimizer = torch.optim.AdamW(model.parameters())

    def step():
        before()
        model(torch.ones(rows, 256)).sum().backward()
        optimizer.step()
        optimizer.zero_grad()

    return step
"""
THREE = f"""
{TESTS}

def test_a_grows_on_one_rank(gpumem):
    gpumem.measure(trained(64 + (int(os.environ.get("MORE", 0)) if RANK == 2 else 0)))

def test_b_fails_on_one_rank(gpumem):
    gpumem.measure(trained(32))
    if "RAISE" in os.environ and RANK == 1:
        raise LookupError("no batch for this rank")

def test_c_settles_later_on_one_rank(gpumem):
    sizes = [5, 4, 3, 2] if RANK == 1 else []

    def cache():
        torch.ones(100_000 * (sizes.pop(0) if sizes else 1))

    gpumem.measure(trained(16, cache))

def test_d_is_even(gpumem):
    gpumem.train_step(begun(torch.nn.Linear(64, 64), 8, 64), torch.ones(8, 64), loss=lambda out, _: out.sum())
"""


@pytest.fixture
def three(project: Project) -> Project:
    project.write(THREE)
    return project


def test_each_rank_has_baselines_and_a_regression_of_one_is_found_and_named(three, run_ranks):
    recorded = run_ranks(three.path, 3, "--gpumem-update=new")
    assert recorded.status == 0, recorded.output
    assert "store: 12 baselines written (new)" in recorded.output
    stored = three.stored()
    (text,) = stored.values()
    assert {int(rank) for rank in re.findall(r'\."measure rank (\d) of 3"\]', text)} == {0, 1, 2}

    files = [f"--gpumem-report=report{suffix}" for suffix in (".json", ".md", ".html")]
    red = run_ranks(three.path, 3, "--gpumem-baseline", *files, MORE="512", RAISE="1")
    assert red.status != 0
    assert "measure rank 2 of 3: Memory regressed: peak" in red.output, red.output
    assert "rank 1 of 3 failed by itself in its call: LookupError: no batch for this rank" in red.output
    # The outcome is everybody's, and the report rank 0's.
    assert red.output.count("2 failed, 2 passed") == 3
    assert red.output.count("gpumem: 3 gated, 1 regressed, 1 failed by itself") == 1
    assert (
        "torchrun --nproc-per-node=3 -m pytest test_it.py::test_a_grows_on_one_rank --gpumem-update=all" in red.output
    )
    assert three.stored() == stored
    assert red.left == ()

    report = json.loads((three.path / "report.json").read_text())
    assert [len(result["verdict"]["verdicts"]) for result in report["results"]][2:] == [3, 3]
    uneven, *_, settles, even = report["ranks"]
    assert (settles["imbalance"], even["imbalance"]) == (1, 1)
    assert (uneven["test"], uneven["world"], uneven["largest"]) == ("test_a_grows_on_one_rank", 3, 2)
    peaks = dict(uneven["peaks"])
    assert peaks[0] == peaks[1]
    # At least the input of 512 rows more, of 256 floats of 4 bytes each.
    assert peaks[2] - peaks[0] >= 512 * 256 * 4
    assert uneven["imbalance"] == peaks[2] / min(peaks.values())
    shown = f"{uneven['imbalance']:.2f} (rank 2 over rank {uneven['smallest']})"
    assert shown in red.output
    assert shown in (three.path / "report.md").read_text()
    assert shown in (three.path / "report.html").read_text()


def test_ranks_that_begin_ddp_differ_at_most_by_what_it_broadcasts_of_its_buckets(project, run_ranks):
    project.write(
        f"""
{TESTS}

@pytest.mark.parametrize("number", range(3))
def test_it(gpumem, number):
    model = DistributedDataParallel(torch.nn.Sequential(torch.nn.Linear(64, 64), torch.nn.Linear(64, 64)))
    gpumem.train_step(model, torch.ones(8, 64), loss=lambda out, _: out.sum())
"""
    )
    job = run_ranks(project.path, 2, "--gpumem-report=report.json")
    assert job.status == 0, job.output
    peaks = [dict(row["peaks"]) for row in json.loads((project.path / "report.json").read_text())["ranks"]]
    lowest = min(min(one.values()) for one in peaks)
    # Two tensors of int32: of a bucket for each of 4 parameters and the number of buckets, and of the size of 1 bucket.
    assert {peak - lowest for one in peaks for peak in one.values()} <= {0, 4, 20, 24}


TIMEOUT = 8
"""Seconds in which a rank that was forked comes from one point to the next, also beside a suite."""
SHORTER_AFTER_A_FAILURE = (
    f"from pytest_gpumem.measuring.ranks import watch\n\nwatch._SECONDS_AFTER_A_FAILURE = {TIMEOUT}\n"
)
TWO = f"""
{TESTS}

def lost():
    if RANK != 1 or lost.steps < 1:
        lost.steps += 1
        return
    how = os.environ.get("LOST")
    if how == "killed":
        os.kill(os.getpid(), 9)
    if how == "sleeps":
        time.sleep(3600)
    if how == "raises":
        raise LookupError("no batch for this rank")

lost.steps = 0

def test_step(gpumem):
    gpumem.measure(trained(64, lost))

def test_after(gpumem):
    gpumem.measure(trained(32))
"""


@pytest.fixture(scope="module")
def recorded(tmp_path_factory, run_ranks):
    """The folder of the tests on two ranks, once their store is recorded."""
    folder = tmp_path_factory.mktemp("recorded")
    (folder / "test_it.py").write_text(f"import pytest\nimport torch\n{TWO}", encoding="utf-8")
    clean = run_ranks(folder, 2, "--gpumem-update=new", "--gpumem-rank-timeout=60")
    assert clean.status == 0, clean.output
    return folder


KILLED = "rank 1 of 2 ended without a message, so it was killed or has crashed"
LOST = {
    "killed": KILLED,
    "sleeps": f"rank 1 of 2 made no progress within {TIMEOUT} s (--gpumem-rank-timeout), and the others wait for it",
    "raises": "rank 1 of 2 failed by itself in its call: LookupError: no batch for this rank",
}


@pytest.fixture(scope="module")
def lost(recorded, run_ranks):
    """The folders and jobs of the ways in which a rank is lost, side by side: they wait for most of their time.

    Where a rank is killed its launcher ends the others; in the other cases they have to end by themselves.
    """

    def run(how: str) -> tuple[Path, Job]:
        folder = recorded.with_name(f"lost-{how}")
        shutil.copytree(recorded, folder)
        (folder / "conftest.py").write_text(SHORTER_AFTER_A_FAILURE, encoding="utf-8")
        seconds = TIMEOUT if how == "sleeps" else 60
        options = ["--gpumem-update=all", "--gpumem-report=report.json", f"--gpumem-rank-timeout={seconds}"]
        return folder, run_ranks(folder, 2, *options, ends_others=how == "killed", LOST=how)

    with ThreadPoolExecutor(len(LOST)) as jobs:
        return dict(zip(LOST, jobs.map(run, LOST), strict=True))


@pytest.mark.parametrize(("how", "named"), LOST.items())
def test_a_rank_that_is_lost_within_a_step_is_named_and_nothing_is_left(recorded, lost, how, named):
    folder, job = lost[how]
    assert job.status != 0
    assert f"gpumem: {named}" in job.output, job.output
    assert job.left == ()
    assert stored(folder) == stored(recorded)
    report = json.loads((folder / "report.json").read_text())
    assert not report["passed"]
    assert report["ended_early"].startswith(named)
    (result,) = report["results"]
    assert (result["verdict"]["test"], result["failed"]) == ("test_step", True)
    assert named in result["verdict"]["failure"]
    assert report["not_run"] == [["test_it.py", "test_after"]]
    if how == "killed":
        assert "rank 1: last in test_it.py::test_step (call)" in job.output
    if how != "killed":
        # Where both were, and the line at which the lost one is.
        assert "rank 0: in test_it.py::test_step (call), at test_it.py:" in job.output
        assert re.search(r"within (_engine_run_backward|_pre_forward)", job.output)
    if how == "raises":
        # That it failed is known: it is not waited for as long as a rank may take.
        assert f"and no rank made progress within {TIMEOUT} s" in job.output


# In default mode torchrun itself starts ranks of which one raises, in tests/emulated/test_ranks.py; the test above has its signals.
@pytest.mark.thorough
def test_torchrun_ends_the_others_of_a_rank_that_is_killed_and_they_name_it(recorded, tmp_path, run_ranks):
    folder = shutil.copytree(recorded, tmp_path / "copied")
    job = run_ranks(folder, 2, "--gpumem-update=all", torchrun=True, LOST="killed")
    assert job.status != 0
    assert f"gpumem: {KILLED}" in job.output, job.output
    assert job.left == ()


def stored(folder: Path) -> dict[str, str]:
    return {path.name: path.read_text() for path in (folder / "gpumem-baselines").rglob("*.toml")}


def test_ranks_do_not_pack_where_the_settings_ask_for_it(project, run_ranks):
    project.write("def test_it(gpumem):\n    gpumem.measure(lambda: torch.ones(1000))\n")
    project.settings("[tool.gpumem]\npack = true\n")
    result = run_ranks(project.path, 2)
    assert result.status == 0, result.output
    assert "packing: ranks share no GPU, because torchrun gives each rank its own" in result.output


def test_a_test_that_one_rank_measures_and_another_does_not_is_told(project, run_ranks):
    project.write(
        """
import os

def test_a(gpumem):
    gpumem.measure(lambda: torch.ones(1000))

def test_b():
    torch.ones(1000)

if os.environ["RANK"] == "1":
    test_b = pytest.mark.gpumem(test_b)
"""
    )
    job = run_ranks(project.path, 2)
    assert job.status != 0
    said = "ERROR: test_it.py::test_b is measured on rank 1 of 2, but not on rank 0, so it cannot be gated"
    assert job.output.count(said) == 2, job.output


def test_a_rank_that_alone_measures_anything_ends_red_though_nothing_was_typed(project, run_ranks):
    """Each of two ranks in a job of its own, side by side: they wait for most of their time."""

    def run(where: str) -> Job:
        project.write(
            f"""
import os

def test_a():
    torch.ones(1000)

if os.environ["RANK"] == "{where}":
    test_a = pytest.mark.gpumem(test_a)
""",
            f"{where}/test_it.py",
        )
        folder = project.path / where
        (folder / "pyproject.toml").write_text("[tool.gpumem]\nrank_timeout = 3\n", encoding="utf-8")
        project.write(
            "from pytest_gpumem.measuring.ranks import watch\n\nwatch._SECONDS_FOR_THE_FIRST = 1\n",
            f"{where}/conftest.py",
        )
        return run_ranks(folder, 2)

    said = {"0": "rank 1 of 2 made no progress within 3 s", "1": "rank 0 gave no sign of life for"}
    with ThreadPoolExecutor(len(said)) as jobs:
        for job, text in zip(jobs.map(run, said), said.values(), strict=True):
            assert job.status != 0
            assert text in job.output, job.output
            assert job.left == ()


def test_ranks_that_select_other_tests_are_told_also_what_one_cannot_collect(project, run_ranks):
    project.write("def test_a(gpumem):\n    gpumem.measure(lambda: torch.ones(1000))\n")
    project.write(
        """
import os

if os.environ["RANK"] == "1":
    raise LookupError("no data here")

def test_b(gpumem):
    gpumem.measure(lambda: torch.ones(1000))
""",
        "test_other.py",
    )
    job = run_ranks(project.path, 2, "--gpumem-baseline", "--gpumem-report=report.json")
    assert job.status != 0
    said = "rank 1 of 2 selected other tests than rank 0: it lacks test_other.py::test_b; it could not collect test_other.py."
    assert job.output.count(f"ERROR: {said}") == 2, job.output
    assert not json.loads((project.path / "report.json").read_text())["passed"]
    assert job.left == ()


def test_a_rank_that_breaks_before_its_first_test_does_not_keep_the_others_waiting(project, run_ranks):
    project.write("def test_it(gpumem):\n    gpumem.measure(lambda: torch.ones(1000))\n")
    project.write(
        """
@pytest.hookimpl(trylast=True)
def pytest_collection_finish():
    import os

    if os.environ["RANK"] == "1":
        raise pytest.UsageError("this rank has no data")
""",
        "conftest.py",
    )
    result = run_ranks(project.path, 2)
    assert result.status != 0
    assert "ERROR: this rank has no data" in result.output
    assert "rank 1 of 2 runs no more tests" in result.output


def test_what_fails_on_another_rank_beside_measuring_makes_rank_0_red(project, run_ranks):
    project.write(
        """
import os

RANK = os.environ["RANK"]

def test_a(gpumem, request):
    gpumem.measure(lambda: torch.ones(1000))

def test_b():
    assert RANK == "0", "only there"

@pytest.fixture
def broken():
    yield
    if RANK == "1":
        raise LookupError("not given back")

def test_c(gpumem, broken):
    gpumem.measure(lambda: torch.ones(1000))

def test_d(gpumem):
    if RANK == "1":
        pytest.skip("not for this rank")
    gpumem.measure(lambda: torch.ones(1000))
"""
    )
    job = run_ranks(project.path, 2, "--gpumem-report=report.json", "--gpumem-rank-timeout=60")
    assert job.status != 0
    report = json.loads((project.path / "report.json").read_text())
    first, second = report["errors"]
    assert first.startswith("rank 1 of 2: test_it.py::test_b failed in its call: AssertionError: only there")
    assert second.startswith("rank 1 of 2: test_it.py::test_c failed in its tear-down: LookupError: not given back")
    (failed,) = (result["verdict"] for result in report["results"] if result["failed"])
    assert failed["failure"].startswith("rank 1 of 2 skipped the test, and the others ran it: not for this rank")


def test_ranks_of_another_launcher_need_no_store_but_that_of_rank_0(recorded, tmp_path):
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    common = {
        **os.environ,
        "WORLD_SIZE": "2",
        "MASTER_ADDR": "127.0.0.1",
        "MASTER_PORT": str(port),
        "TMPDIR": str(tmp_path),
    }
    command = ["-m", "pytest", *LEFT_OUT, "--gpumem-device=cpu", "--gpumem-baseline", "--no-gpumem-time"]
    ranks = [
        preloaded.start(
            *command,
            env={**common, "RANK": number, "LOCAL_RANK": number},
            cwd=recorded,
            before=hide_what_is_loaded,
        )
        for number in "10"
    ]
    said = [rank.communicate(timeout=MOST_SECONDS)[0] for rank in ranks]
    assert [rank.returncode for rank in ranks] == [0, 0], said
    assert ["gpumem: 2 gated" in text for text in said] == [False, True]
