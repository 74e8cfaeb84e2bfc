"""What TensorBoard is given, as its own reader of event folders sees it."""

from __future__ import annotations

import builtins
import os
import subprocess

import pytest
from tensorboard.backend.event_processing.event_accumulator import EventAccumulator
from tensorboard.util import tensor_util

from pytest_gpumem.base.errors import ExportError
from pytest_gpumem.reporting.exports.figures import figures_of
from pytest_gpumem.reporting.exports.tensorboard import commits, seconds, tag, write_scalars
from tests.exports.values import CPU, H100, PEAK, called, figure, from_utf8, report, result
from tests.hostile import TEXTS

ENDED = 1795278005
"""2026-11-21T16:20:05Z."""


def points(folder):
    """The points of each tag as (step, time, value)."""
    accumulator = EventAccumulator(str(folder))
    accumulator.Reload()
    return {
        tag: [
            (event.step, event.wall_time, tensor_util.make_ndarray(event.tensor_proto).item())
            for event in accumulator.Tensors(tag)
        ]
        for tag in accumulator.Tags()["tensors"]
    }


def figures(*reports):
    return figures_of({str(number): one for number, one in enumerate(reports)}, over_time=True).figures


def test_each_device_is_a_run_and_each_report_a_point_with_every_digit(tmp_path):
    first = report(result("test_a", called(H100)), result("test_b", called(CPU)))
    later = report(result("test_a", called(H100, PEAK + 1)), ended="2026-11-21T16:20:06Z")
    write_scalars(figures(first, later), tmp_path, seconds)
    assert sorted(path.name for path in tmp_path.iterdir()) == ["cpu-x86_64", "nvidia-h100-80gb-hbm3"]
    assert points(tmp_path / H100.slug) == {
        "peak_allocated/tests/test_a.py::test_a (call)": [(ENDED, ENDED, PEAK), (ENDED + 1, ENDED + 1, PEAK + 1)]
    }
    assert list(points(tmp_path / CPU.slug)) == ["peak_allocated/tests/test_a.py::test_b (call)"]


def test_a_later_export_is_added(tmp_path):
    for ended in ("2026-11-21T16:20:05Z", "2026-11-21T16:20:06Z"):
        write_scalars(figures(report(result("test_a", called(H100)), ended=ended)), tmp_path, seconds)
    (found,) = points(tmp_path / H100.slug).values()
    assert [step for step, _, _ in found] == [ENDED, ENDED + 1]


def test_hostile_test_ids_come_back(tmp_path):
    write_scalars([figure(text) for text in TEXTS.values()], tmp_path, seconds)
    assert {from_utf8(name) for name in points(tmp_path / H100.slug)} == {
        f"peak_allocated/{text} (call)" for text in TEXTS.values()
    }


def test_a_device_that_leads_out_of_the_folder_is_refused_before_anything_is_written(tmp_path):
    outside = type(H100)("../evil", "evil")
    with pytest.raises(ExportError, match=r"test_a was measured on the device '\.\./evil', which cannot be a folder"):
        write_scalars(figures(report(result("test_a", called(outside)))), tmp_path / "in", seconds)
    assert not list(tmp_path.iterdir())


@pytest.mark.skipif(os.name != "posix", reason="links need permissions on other systems")
def test_a_devices_folder_that_is_a_link_is_refused(tmp_path):
    (tmp_path / "outside").mkdir()
    (tmp_path / "in").mkdir()
    (tmp_path / "in" / H100.slug).symlink_to(tmp_path / "outside")
    with pytest.raises(OSError, match="is a symbolic link, which is not followed"):
        write_scalars(figures(report(result("test_a", called(H100)))), tmp_path / "in", seconds)
    assert list((tmp_path / "outside").iterdir()) == []


def test_without_tensorboard_it_says_what_to_install(tmp_path, monkeypatch):
    real = builtins.__import__

    def without(name, *arguments):
        if name == "torch.utils.tensorboard":
            raise ModuleNotFoundError("No module named 'tensorboard'")
        return real(name, *arguments)

    monkeypatch.setattr(builtins, "__import__", without)
    with pytest.raises(ExportError, match=r"No module named 'tensorboard'\): pip install tensorboard$"):
        write_scalars([figure("a")], tmp_path, seconds)


def test_a_time_that_is_none_is_refused():
    with pytest.raises(ExportError, match="ended at 'yesterday', expected a time like"):
        seconds(figures(report(result("test_a", called()), ended="yesterday"))[0])


@pytest.fixture
def repository(tmp_path):
    """A repository with three commits, and the hash of the second one."""

    def git(*arguments):
        command = ["git", "-c", "user.name=a", "-c", "user.email=a@example.com", *arguments]
        return subprocess.run(command, cwd=tmp_path, check=True, capture_output=True, text=True).stdout.strip()

    git("init", "-q")
    hashes = []
    for number in range(3):
        git("commit", "-q", "--allow-empty", "-m", str(number))
        hashes.append(git("rev-parse", "--short=9", "HEAD"))
    return tmp_path, hashes[1]


def at(commit):
    return figures(report(result("test_a", called()), commit=commit))[0]


def test_a_step_may_be_the_number_of_commits_up_to_the_reports_one(repository):
    folder, second = repository
    assert commits(folder)(at(second)) == 2


@pytest.mark.parametrize(
    ("commit", "said"),
    [
        (None, "does not name a commit: use --step=time instead"),
        ("--output=x", "names the commit '--output=x', which is not a hash"),
        ("abcdef123", "the commits up to abcdef123 cannot be counted: "),
    ],
)
def test_commits_that_cannot_be_counted_are_an_error(repository, commit, said):
    with pytest.raises(ExportError) as refused:
        commits(repository[0])(at(commit))
    assert said in str(refused.value)


def test_a_shallow_clone_is_refused_since_it_counts_too_few(repository, tmp_path_factory):
    folder, second = repository
    clone = tmp_path_factory.mktemp("clone")
    subprocess.run(["git", "clone", "-q", "--depth=1", f"file://{folder}", str(clone)], check=True)
    with pytest.raises(ExportError, match="shallow clone"):
        commits(clone)(at(second))


def test_a_tag_begins_with_what_tensorboard_groups_by():
    assert tag(figure("tests/test_a.py::test_b")) == "peak_allocated/tests/test_a.py::test_b (call)"
