"""``gpumem history``: every change of a baseline, by whom and why, through renames, merges and disappearances."""

from __future__ import annotations

import pytest
from click.testing import CliRunner

from pytest_gpumem.facts.measurement import Environment, Workload
from pytest_gpumem.reporting.reports.history import plot
from pytest_gpumem.reporting.reports.layout import Screen
from pytest_gpumem.tools.console.streams import InputError
from pytest_gpumem.tools.main import main
from tests.git_store import MB, Repository, entry
from tests.hostile import TEXTS

A100 = Environment("a100", "NVIDIA A100")


@pytest.fixture
def repository(tmp_path, monkeypatch):
    made = Repository(tmp_path / "project")
    monkeypatch.chdir(made.path)
    return made


def history(*arguments):
    return CliRunner().invoke(main, ["history", *arguments])


def rows(result):
    """The cells of the table, without date and commit."""
    assert result.exit_code == 0, result.output
    lines = result.output.split("\n\n")[1].splitlines()
    return [[cell.strip() for cell in line.split("  ") if cell.strip()][2:] for line in lines[1:]]


def test_every_change_is_told_with_author_value_change_reason_and_subject(repository):
    repository.commit("begin", {"test_a": entry(10 * MB)})
    repository.commit("other test", {"test_a": entry(10 * MB), "test_b": entry()})
    repository.commit("wider", {"test_a": entry(15 * MB, reason="twice the width"), "test_b": entry()}, author="Bob")
    last = repository.commit("narrow", {"test_a": entry(12 * MB), "test_b": entry()})
    result = history("a.py::test_a")
    assert rows(result) == [
        ["Ada", "10.00 MB", "new", "begin"],
        ["Bob", "15.00 MB", "+50.0 %", "twice the width", "wider"],
        ["Ada", "12.00 MB", "-20.0 %", "narrow"],
    ]
    assert result.output.startswith("a.py::test_a (call) on h100: peak allocated\n")
    assert last[:9] in result.output
    assert "▔" in result.output


def test_the_packages_that_came_with_a_change_are_told(repository):
    old = Environment("h100", "NVIDIA H100", {"torch": "2.13.0"}, {"transformers": "4.37.2"})
    new = Environment("h100", "NVIDIA H100", {"torch": "2.13.0"}, {"transformers": "4.38.2"})
    repository.commit("begin", {"test_a": entry(10 * MB, device=old)})
    repository.commit("upgrade", {"test_a": entry(15 * MB, device=new)})
    told = "transformers 4.38.2, was 4.37.2"
    assert rows(history("a.py::test_a"))[1] == ["Ada", "15.00 MB", "+50.0 %", told, "upgrade"]


def test_a_renamed_file_is_followed(repository):
    repository.commit("begin", {"test_a": entry(10 * MB)}, file="old.py")
    repository.store({}, "old.py")
    repository.commit("rename", {"test_a": entry(10 * MB)}, file="new.py")
    repository.commit("grow", {"test_a": entry(11 * MB)}, file="new.py")
    told = [row[1:] for row in rows(history("new.py::test_a"))]
    assert told == [["10.00 MB", "new", "begin"], ["11.00 MB", "+10.0 %", "grow"]]


def test_a_file_whose_name_looks_like_a_pattern_has_its_own_history_only(repository):
    repository.commit("the other's", {"test_b": entry(99 * MB)}, file="test_a.py")
    repository.commit("begin", {"test_b": entry(10 * MB)}, file="test_[a].py")
    repository.commit("the other's", {"test_b": entry(98 * MB)}, file="test_a.py")
    assert [row[1:] for row in rows(history("test_[a].py::test_b"))] == [["10.00 MB", "new", "begin"]]


def test_a_baseline_that_vanished_and_came_back_says_so(repository):
    repository.commit("begin", {"test_a": entry(), "test_b": entry()})
    repository.commit("prune", {"test_b": entry()})
    repository.commit("again", {"test_a": entry(12 * MB), "test_b": entry()})
    repository.store({}, "a.py")
    repository.commit("all gone")
    repository.commit("restored", {"test_a": entry(12 * MB)})
    assert [row[1:] for row in rows(history("a.py::test_a"))] == [
        ["10.00 MB", "new", "begin"],
        ["gone", "prune"],
        ["12.00 MB", "back", "again"],
        ["gone", "all gone"],
        ["12.00 MB", "back", "restored"],
    ]


@pytest.mark.parametrize("atomic_file", [True, False])
def test_a_baseline_that_is_gone_by_now_is_found_by_its_id(repository, atomic_file):
    repository.commit("begin", {"test_a": entry(), "test_b": entry()})
    repository.commit("prune", {} if atomic_file else {"test_b": entry()})
    assert [row[1:] for row in rows(history("a.py::test_a"))] == [["10.00 MB", "new", "begin"], ["gone", "prune"]]
    assert rows(history("a.py::test_a (call)")) == rows(history("a.py::test_a"))
    assert history("a.py::test_a (other)").exit_code == 2


def test_two_branches_are_no_back_and_forth(repository):
    repository.commit("begin", {"test_a": entry(10 * MB), "test_b": entry(1 * MB)})
    repository.git("checkout", "--quiet", "-b", "side")
    # Apart from each other in the file, so that git merges both by itself.
    both = {"test_a": entry(10 * MB), **{f"test_{name}": entry(1 * MB) for name in "bcdef"}}
    repository.commit("begin more", both)
    repository.git("checkout", "--quiet", "-b", "other")
    repository.commit("grow f", {**both, "test_f": entry(2 * MB)})
    repository.git("checkout", "--quiet", "side")
    repository.commit("grow a", {**both, "test_a": entry(12 * MB)})
    repository.git("merge", "--quiet", "other", "--message", "merge")
    assert [row[1:] for row in rows(history("a.py::test_a"))] == [
        ["10.00 MB", "new", "begin"],
        ["12.00 MB", "+20.0 %", "grow a"],
    ]
    # The merge has it from its second parent.
    assert [row[1:] for row in rows(history("a.py::test_f"))] == [
        ["1.00 MB", "new", "begin more"],
        ["2.00 MB", "+100.0 %", "grow f"],
    ]


def test_a_merge_that_decides_otherwise_than_both_sides_is_told(repository):
    repository.commit("begin", {"test_a": entry(10 * MB)})
    repository.git("checkout", "--quiet", "-b", "side")
    repository.commit("theirs", {"test_a": entry(12 * MB)})
    repository.git("checkout", "--quiet", "main")
    repository.commit("ours", {"test_a": entry(11 * MB)})
    with pytest.raises(Exception, match="merge"):
        repository.git("merge", "--quiet", "side")
    repository.commit("resolved", {"test_a": entry(13 * MB)})
    assert ["Ada", "13.00 MB", "+18.2 %", "resolved"] in rows(history("test_a"))


def test_a_change_that_is_not_committed_yet_comes_last(repository):
    repository.commit("begin", {"test_a": entry(10 * MB)})
    repository.store({"test_a": entry(11 * MB)})
    assert "11.00 MB  +10.0 %  (not committed)" in history("test_a").output


def test_another_metric_can_be_followed_and_what_left_it_alone_is_counted(repository):
    repository.commit("begin", {"test_a": entry(metrics={"flops": 100})})
    repository.commit("count", {"test_a": entry(metrics={"flops": 110})})
    result = history("test_a", "--metric", "flops")
    assert rows(result)[1][2] == "+10.0 %"
    assert "1 other change did not affect peak allocated" in history("test_a").output


def test_another_workload_is_told_as_the_reason(repository):
    repository.commit("begin", {"test_a": entry(10 * MB)})
    repository.commit("batch", {"test_a": entry(20 * MB, workload=Workload("call", batch="int64[8]"))})
    assert rows(history("test_a"))[1][2] == "+100.0 % (other work)"


def test_each_device_and_measurement_has_a_history_of_its_own(repository):
    repository.store({"test_a (plain)": entry(), "test_a (ckpt)": entry()})
    repository.store({"test_a (plain)": entry(device=A100)}, slug="a100")
    repository.commit("begin")
    titles = ["(ckpt) on h100", "(plain) on a100", "(plain) on h100"]
    assert [title for title in titles if f"a.py::test_a {title}:" in history("test_a").output] == titles
    assert history("test_a (ckpt)").output.count("a.py::test_a") == 1
    assert history("test_a", "--slug", "a100").output.count("a.py::test_a") == 1


def test_a_text_that_was_no_store_is_told_and_passed_over(repository):
    repository.commit("begin", {"test_a": entry(10 * MB)})
    (repository.path / "gpumem-baselines/h100/a.py.toml").write_text("<<<<<<< ours\n", encoding="utf-8")
    repository.commit("oops")
    repository.commit("mended", {"test_a": entry(11 * MB)})
    told = rows(history("test_a"))
    assert told[1][1] == "unreadable"
    assert told[2][1] == "11.00 MB"


def test_a_shallow_clone_says_what_it_does_not_know(repository, tmp_path, monkeypatch):
    repository.commit("begin", {"test_a": entry(10 * MB)})
    repository.commit("grow", {"test_a": entry(11 * MB)})
    repository.commit("more", {"test_a": entry(12 * MB)})
    repository.git("clone", "--quiet", "--depth", "2", f"file://{repository.path}", str(tmp_path / "shallow"))
    monkeypatch.chdir(tmp_path / "shallow")
    result = history("test_a")
    assert rows(result) == [
        ["11.00 MB", "new", "(or earlier: this clone is shallow)"],
        ["Ada", "12.00 MB", "+9.1 %", "more"],
    ]
    assert "fetch-depth: 0" in result.output


@pytest.mark.parametrize("name", ["controls", "newlines"])
def test_whatever_a_test_a_reason_and_a_subject_are_called_each_change_is_one_line(repository, name):
    text = TEXTS[name]
    repository.commit("begin", {f"test[{text}]": entry()}, file="odd [a] name.py")
    repository.commit(text, {f"test[{text}]": entry(11 * MB, reason=text)}, file="odd [a] name.py", author="A\x1b[1mda")
    output = history("odd [a] name.py").output
    assert all(line.isprintable() for line in output.split("\n"))
    assert len(output.split("\n\n")[1].splitlines()) == 3


@pytest.mark.parametrize(
    ("arguments", "said"),
    [
        (["test_"], "'test_' matches 2 tests; choose one of them:\n  a.py::test_a\n  a.py::test_b\n"),
        (["a.py::test_aa"], "no commit ever contained a baseline of 'a.py::test_aa'; there is a.py::test_a"),
        (["test_a", "--metric", "flops"], "ever had flops"),
        (["test_a", "--slug", "a10"], "--slug a10"),
        (["test_a", "--store", "s3://x"], "is not a folder"),
        (["test_a", "--store", "fresh"], "is in no commit yet: run `git add fresh/h100/a.py.toml`"),
        (["test_a", "--store", "OUTSIDE"], "is not in a git repository, so it has no history"),
    ],
)
def test_where_there_is_no_history_it_says_why_and_ends_with_2(repository, tmp_path, arguments, said):
    repository.commit("begin", {"test_a": entry(), "test_b": entry()})
    store = repository.path / "gpumem-baselines"
    text = (store / "h100/a.py.toml").read_text(encoding="utf-8")
    for other in (repository.path / "fresh", tmp_path / "outside"):
        (other / "h100").mkdir(parents=True)
        (other / "h100/a.py.toml").write_text(text, encoding="utf-8")
    if "fresh" in arguments:
        (repository.path / "fresh/h100/a.py.toml").write_text(text.replace("test_b", "test_c"), encoding="utf-8")
    result = history(*(str(tmp_path / "outside") if word == "OUTSIDE" else word for word in arguments))
    assert (result.exit_code, said in result.output) == (2, True), result.output


# The plot


def label(value: float) -> str:
    return f"{value:g} GB"


def test_the_last_value_stands_at_the_right_and_nothing_is_filled_beneath_a_mark():
    assert plot([1, 3, 2], label, Screen(40), height=2) == [
        " 3 GB         ▔▔▔▔▔▔▔",
        " 1 GB ▁▁▁▁▁▁▁         ▔▔▔▔▔▔▔",
        "     (the axis begins at 1 GB, not at 0)",
    ]


def test_an_axis_that_begins_at_nothing_needs_no_words():
    assert not any("axis" in line for line in plot([0, 3], label, Screen(40)))


def test_a_stream_without_blocks_gets_ascii():
    lines = plot([1, 3, 2], label, Screen(40, "ascii"), height=2)
    assert all(line.isascii() for line in lines)
    assert len(lines) == 3


def test_a_gap_is_no_value():
    lowest = plot([1, None, 3], label, Screen(40), height=2)[1]
    assert lowest == " 1 GB ▁▁▁▁▁▁▁"


def test_no_line_is_wider_than_the_screen_and_the_latest_are_kept():
    lines = plot([1] * 100 + [2], label, Screen(40))
    assert max(map(len, lines)) <= 40
    assert lines[0].endswith("▔")


@pytest.mark.parametrize("values", [[], [5], [5, None, 5]])
def test_what_does_not_vary_is_not_plotted(values):
    assert plot(values, label, Screen()) == []


def test_no_id_in_an_error_begins_a_line_of_its_own():
    said = InputError("say which one:", "  a.py::test_a[\n::error::x\x1b[31m]").message
    assert said == "say which one:\n  a.py::test_a[\\n::error::x\\x1b[31m]"
