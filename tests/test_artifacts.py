"""``--gpumem-artifacts``: the timeline of each step that is explained, as a file."""

from __future__ import annotations

import json
from typing import TYPE_CHECKING, Any

import pytest

if TYPE_CHECKING:
    from pathlib import Path

    from tests.conftest import Project

TESTS = """
class Model(torch.nn.Module):
    def __init__(self):
        super().__init__()
        self.layers = torch.nn.Sequential(*(torch.nn.Linear(100, 100) for _ in range(3)))

    def forward(self, x):
        return self.layers(x).sum()


def test_steps(gpumem):
    gpumem.train_step(Model, torch.ones(50, 100))
    gpumem.infer_step(Model, torch.ones(50, 100))


@pytest.fixture
def hidden():
    held = [torch.ones(5000)]
    yield


@pytest.mark.gpumem
def test_call():
    torch.ones(1000).exp().sum()
"""
ALWAYS = ("--no-gpumem-time", "--gpumem-explain=always")
OUT_OF_MEMORY = """
class Model(torch.nn.Module):
    def __init__(self):
        super().__init__()
        self.first = torch.nn.Linear(1000, 1000)

    def forward(self, x):
        return self.first(x).sum() + torch.empty(1 << 45).sum()


def test_step(gpumem):
    gpumem.train_step(Model, torch.ones(500, 1000))


@pytest.mark.gpumem
def test_call():
    Model()(torch.ones(500, 1000))
"""


def timelines(folder: Path) -> list[dict[str, Any]]:
    """What is in the files of a folder, in the order of their names."""
    return [json.loads(path.read_text(encoding="utf-8")) for path in sorted(folder.glob("*.timeline.json"))]


def test_a_timeline_of_every_explained_step_adds_up_and_peaks_as_measured(project):
    # What a fixture's frame holds is the test's, and cannot be found.
    project.write(TESTS.replace("test_call()", "test_call(hidden)"))
    figures = project.figures(*ALWAYS, "--gpumem-artifacts=kept")
    found = timelines(project.path / "kept")
    assert [one["test"] for one in found] == ["test_it.py::test_call", *2 * ["test_it.py::test_steps"]]
    steps = figures["test_steps"]
    assert [max(one["total"]) for one in found] == [
        figures["test_call"]["call.peak_allocated"],
        steps["train_step.peak_allocated"],
        steps["infer_step.peak_allocated"],
    ]
    for one in found:
        times, total = one["time_ns"], one["total"]
        assert one["format"] == 1
        assert total[one["peak"]] == max(total)
        assert times == sorted(times)
        assert len(times) == len(total)
        assert [sum(moment) for moment in zip(*one["categories"].values(), strict=True)] == total
        assert all(nbytes >= 0 for series in one["categories"].values() for nbytes in series)
    assert set(found[0]["categories"]["unattributed"]) == {20_000}
    assert [phase["name"] for phase in found[1]["phases"]] == ["forward", "backward", "optimizer"]
    ends = [moment for phase in found[1]["phases"] for moment in (phase["begin"], phase["end"])]
    assert ends == sorted(ends)
    assert ends[0] <= found[1]["time_ns"][found[1]["peak"]] <= ends[-1]


def test_nothing_is_written_when_nothing_is_explained(project):
    project.write(TESTS)
    project.run("--no-gpumem-time", "--gpumem-artifacts=kept").assert_outcomes(passed=2)
    project.run("--no-gpumem-time", "--gpumem-artifacts=kept", "--gpumem-explain=never").assert_outcomes(passed=2)
    assert not (project.path / "kept").exists()


def test_a_failure_leaves_the_timeline_of_the_step_that_failed(project):
    project.write(TESTS.replace("@pytest.mark.gpumem", "@pytest.mark.gpumem(max_gb=0)"))
    project.run("--no-gpumem-time", "--gpumem-artifacts=kept").assert_outcomes(passed=1, failed=1)
    assert [one["test"] for one in timelines(project.path / "kept")] == ["test_it.py::test_call"]


def test_running_out_of_memory_leaves_the_timeline_up_to_then(project):
    project.write(OUT_OF_MEMORY)
    project.run("--no-gpumem-time", "--gpumem-artifacts=kept").assert_outcomes(failed=2)
    call, step = timelines(project.path / "kept")
    assert (call["test"], step["test"]) == ("test_it.py::test_call", "test_it.py::test_step")
    # Parameters, the batch and what the first layer gave.
    assert call["total"][call["peak"]] // 1_000_000 == step["total"][step["peak"]] // 1_000_000 == 8


@pytest.mark.parametrize(
    ("typed", "folder"), [([], "in-table"), (["--gpumem-artifacts=typed"], "below/typed")], ids=["table", "typed"]
)
def test_a_folder_counts_from_the_root_in_the_table_and_from_where_it_was_typed(project, monkeypatch, typed, folder):
    project.write(TESTS)
    project.settings("[tool.gpumem]\nartifacts = 'in-table'\n")
    (project.path / "below").mkdir()
    monkeypatch.chdir(project.path / "below")
    project.run(*ALWAYS, *typed, "--rootdir=..", "..", "-k", "call").assert_outcomes(passed=1, deselected=1)
    assert len(timelines(project.path / folder)) == 1
    assert len(list(project.path.rglob("*.timeline.json"))) == 1


def test_a_second_session_replaces_the_files_of_the_first(project):
    project.write(TESTS)
    for _ in range(2):
        project.run(*ALWAYS, "--gpumem-artifacts=kept")
        assert len(timelines(project.path / "kept")) == 3


@pytest.fixture
def blocked(project: Project) -> Project:
    """A project in which ``kept`` cannot be a folder any more when tests run."""
    project.write(
        "from pathlib import Path\n\n\ndef pytest_collection_finish():\n    Path('kept').write_text('a file')\n\n\n"
        "def pytest_unconfigure():\n    Path('kept').unlink()\n",
        "conftest.py",
    )
    return project


CANNOT = "*kept: cannot write the recording (--gpumem-artifacts): *"


def test_a_folder_that_cannot_be_written_is_told_and_a_regression_stays_one(blocked):
    blocked.write(TESTS)
    blocked.run("--no-gpumem-time", "--gpumem-update=new")
    blocked.write(TESTS.replace("1000", "1_000_000"))
    blocked.settings("[[tool.gpumem.budget]]\ntests = '*::test_steps'\nmax_gb = 0\n")
    result = blocked.run("--no-gpumem-time", "--gpumem-baseline", "--gpumem-artifacts=kept")
    result.assert_outcomes(failed=2)
    result.stdout.fnmatch_lines(["*Memory over budget: *", CANNOT, "Memory regressed: *", "  what grew *", CANNOT])
    result.stdout.fnmatch_lines(["gpumem: 2 gated, 1 over budget, 1 regressed"])


def test_a_folder_that_cannot_be_written_fails_no_test_that_passes(blocked):
    blocked.write(TESTS)
    result = blocked.run(*ALWAYS, "--gpumem-artifacts=kept", "--junitxml=report.xml")
    result.assert_outcomes(passed=2)
    result.stdout.fnmatch_lines([CANNOT])
    assert all(
        verdict["measurement"]["explanation"] is not None
        for test in blocked.verdicts().values()
        for verdict in test["verdicts"]
    )


def test_a_folder_that_cannot_be_written_leaves_a_test_its_own_out_of_memory_error(blocked):
    blocked.write(OUT_OF_MEMORY)
    result = blocked.run("--no-gpumem-time", "--gpumem-artifacts=kept")
    result.assert_outcomes(failed=2)
    result.stdout.fnmatch_lines(2 * ["E *DefaultCPUAllocator: *", "memory ran out when 140.74 TB more*", CANNOT])
    result.stdout.fnmatch_lines(["gpumem: 0 gated, 2 failed by themselves"])
