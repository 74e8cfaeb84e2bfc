"""``gpumem merge``: the reports of a split run, told and written as one, and what it refuses."""

from __future__ import annotations

import json
from dataclasses import replace

import pytest
from click.testing import CliRunner

from pytest_gpumem.facts.values.selection import Selection
from pytest_gpumem.judging.gate.verdict import Outcome
from pytest_gpumem.reporting.reports.json_report import to_json
from pytest_gpumem.reporting.reports.layout import Screen
from pytest_gpumem.reporting.reports.session_report import Terms
from pytest_gpumem.tools.main import main
from tests.hostile import TEXTS
from tests.reports.sessions import everything
from tests.reports.test_merging import A100, H100, measured, of_folder, shard, skipped


@pytest.fixture
def folder(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    monkeypatch.delenv("GITHUB_ACTIONS", raising=False)
    return tmp_path


def write(folder, name, report):
    (folder / name).write_text(to_json(report), encoding="utf-8")
    return name


def merge(*arguments):
    return CliRunner().invoke(main, ["merge", *map(str, arguments)])


@pytest.fixture
def halves(folder):
    write(folder, "a.json", shard(measured(test=("a.py", "test_a"))))
    write(folder, "b.json", shard(measured(Outcome.IMPROVED, ("a.py", "test_b"))))
    return folder


def test_shards_that_passed_are_told_as_one_that_passed(halves):
    result = merge("a.json", "b.json")
    assert result.exit_code == 0
    assert result.output.splitlines()[-2:] == ["gpumem merged: 2 shards", "gpumem: 2 gated, 1 improved"]


def test_a_failure_in_one_shard_makes_the_whole_red_and_is_told(halves):
    write(halves, "c.json", shard(measured(Outcome.REGRESSED, ("c.py", "test_c"), failed=True)))
    result = merge("a.json", "c.json")
    assert result.exit_code == 1
    assert "c.py::test_c" in result.output
    assert "2 gated, 1 regressed" in result.output


def test_every_report_is_written_and_the_same_in_either_order(halves):
    assert merge("a.json", "b.json", "--report", "whole.json", "--report", "new/whole.md").exit_code == 0
    assert merge("b.json", "a.json", "--report", "again.json", "--report", "again.md").exit_code == 0
    assert (halves / "whole.json").read_bytes() == (halves / "again.json").read_bytes()
    assert (halves / "new/whole.md").read_bytes() == (halves / "again.md").read_bytes()
    assert json.loads((halves / "whole.json").read_bytes())["shards"] == 2


def test_a_pattern_is_taken_apart_where_no_shell_did(halves):
    assert "2 shards" in merge("[ab].json").output


def test_what_several_shards_ran_and_what_none_did_is_told(folder):
    part = shard(measured(Outcome.UNCERTAIN))
    write(folder, "a.json", part)
    write(folder, "b.json", shard(measured()))
    assert (
        "merged: 1 test ran in several shards; the worst result counts: a.py::test_a"
        in merge("a.json", "b.json").output
    )


def test_what_stopped_a_shard_is_told(folder):
    write(folder, "a.json", shard(measured(), ended_early="KeyboardInterrupt", not_collected=("b.py",)))
    result = merge("a.json")
    assert result.exit_code == 1
    assert "gpumem: the session ended early: KeyboardInterrupt" in result.output
    assert "gpumem: b.py could not be collected" in result.output


def test_each_test_that_failed_or_did_not_run_is_named_with_why(folder):
    gated = measured(Outcome.REGRESSED, ("a.py", "test_gated"), failed=True)
    results = (
        replace(gated, verdict=replace(gated.verdict, failure="GPU memory regressed: peak\n\n  a table")),
        replace(skipped(("a.py", "test_alone"), "the test itself failed", failed=True), failed_in="call"),
        replace(measured(test=("a.py", "test_torn")), passed=False, failed=True, failed_in="teardown"),
        measured(test=("a.py", "test_well")),
    )
    write(folder, "a.json", shard(*results, not_run=(("b.py", "test_lost"),)))
    result = merge("a.json")
    assert result.exit_code == 1
    assert [line for line in result.output.splitlines() if line.startswith(("FAILED", "NOT RUN"))] == [
        "FAILED a.py::test_alone - The test itself failed",
        "FAILED a.py::test_gated - GPU memory regressed: peak",
        "FAILED a.py::test_torn - Its tear-down failed",
        "NOT RUN b.py::test_lost - The test was selected, but did not finish",
    ]


@pytest.mark.parametrize("name", ["newlines", "command", "surrogates", "nothing", "long"])
def test_whatever_a_test_that_failed_is_called_it_is_named_whole_on_its_line(folder, name):
    test, lost = f"test[{TEXTS[name]}]", f"lost[{TEXTS[name]}]"
    write(folder, "a.json", shard(replace(measured(test=("a.py", test)), failed=True), not_run=(("a.py", lost),)))
    lines = merge("a.json").output.split("\n")
    shows = Screen().legible
    assert lines.count(f"FAILED a.py::{shows(test)} - It failed in its set-up, its tear-down or a subtest") == 1
    assert lines.count(f"NOT RUN a.py::{shows(lost)} - The test was selected, but did not finish") == 1
    assert all(line.isprintable() for line in lines)


def test_a_job_that_was_repeated_does_not_stand_for_one_that_got_lost(folder):
    everything = frozenset(("a.py", f"test_{name}") for name in "abc")

    def part(name, device=H100, **changes):
        test = ("a.py", f"test_{name}")
        return shard(
            measured(test=test, device=device),
            **{"selection": Selection(measured=frozenset({test}), collected=everything), **changes},
        )

    write(folder, "a.json", part("a"))
    write(folder, "again.json", part("a", ended="2026-11-21T17:20:05Z"))
    write(folder, "b.json", part("b"))
    refused = merge("a.json", "again.json", "b.json", "--shards", "3")
    assert refused.exit_code == 2
    said = " ".join(refused.output.split())
    assert "again.json ran the same tests as a.json, and 1 test ran in no shard: a.py::test_c" in said
    assert merge("a.json", "again.json", "b.json").exit_code == 0
    # Every test is in some shard, or what is left out is so on each of several GPUs: nothing seems to be lost.
    write(folder, "c.json", part("c"))
    assert merge("a.json", "again.json", "b.json", "c.json", "--shards", "4").exit_code == 0
    write(folder, "other.json", part("a", A100))
    assert merge("a.json", "other.json", "--shards", "2").exit_code == 0


def test_a_folder_that_ran_twice_does_not_stand_for_one_that_got_lost(folder):
    for name in "abc":
        write(folder, f"{name}.json", of_folder(name))
    write(folder, "again.json", replace(of_folder("a"), ended="2026-11-21T17:20:05Z"))
    refused = merge("a.json", "again.json", "b.json", "--shards", "3")
    assert refused.exit_code == 2
    said = " ".join(refused.output.split())
    assert (
        "again.json ran the same tests as a.json, and 1 test with baselines on these devices is in no shard: "
        "c.py::test_it; add the shard that ran them, remove baselines of deleted tests with `gpumem prune`"
    ) in said
    assert merge("a.json", "b.json", "c.json", "--shards", "3").exit_code == 0
    assert "1 test with baselines" in merge("a.json", "b.json", "--shards", "2").output


def test_a_shard_whose_report_is_missing_is_found_by_their_number(halves):
    result = merge("a.json", "b.json", "--shards", "3")
    assert result.exit_code == 2
    assert "the reports come from 2 shards, expected 3: a.json, b.json" in result.output
    assert merge("a.json", "b.json", "--shards", "2").exit_code == 0


def test_under_github_actions_it_annotates_and_writes_the_summary(folder, monkeypatch):
    monkeypatch.setenv("GITHUB_ACTIONS", "true")
    monkeypatch.setenv("GITHUB_STEP_SUMMARY", str(folder / "summary.md"))
    write(folder, "a.json", shard(measured(Outcome.REGRESSED, failed=True)))
    write(folder, "b.json", shard(measured(test=("b.py", "test_b"))))
    lines = merge("a.json", "b.json").output.splitlines()
    assert [line for line in lines if line.startswith("::error")] != []
    assert "regressed" in (folder / "summary.md").read_text(encoding="utf-8")


@pytest.mark.parametrize(
    ("arguments", "said"),
    [
        (["a.json", "./a.json"], "./a.json is given twice, also as a.json"),
        (["a.json", "*.json"], "a.json is given twice"),
        (["a.json", "copy.json"], "copy.json is the same report as a.json"),
        (["none-*.json"], "none-*.json matches no file"),
        (["none.json"], "there is no file none.json"),
        (["."], ". is a folder"),
        (["text.json"], "text.json: it is not JSON"),
        (["other.json"], "other.json: it is JSON, but not a report of pytest-gpumem"),
        (["latin.json"], "latin.json is not a JSON report of pytest-gpumem, because it is not UTF-8"),
        (["a.json", "terms.json"], "a.json was run with baseline = true, terms.json with baseline = false"),
        (["a.json", "--report", "whole.xml"], "whole.xml has to end with .sarif, .json, .md or .html"),
        (["a.json", "--report", "a.json/whole.json"], "the report cannot be written"),
        ([], "Missing argument"),
    ],
)
def test_wrong_input_is_named_and_ends_with_2(folder, arguments, said):
    write(folder, "a.json", shard(measured()))
    write(folder, "copy.json", shard(measured()))
    write(folder, "terms.json", shard(skipped(), terms=Terms()))
    (folder / "text.json").write_text("no", encoding="utf-8")
    (folder / "other.json").write_text("[]", encoding="utf-8")
    (folder / "latin.json").write_bytes(b"\xe4")
    result = merge(*arguments)
    assert (result.exit_code, said in " ".join(result.output.split())) == (2, True), result.output


def test_two_shards_of_one_file_are_judged_as_a_whole(project):
    """A shard that only skips compared nothing, and by itself is red; the whole compared something, and is green."""
    measure = "@pytest.mark.gpumem\ndef test_{name}():\n    {body}\n\n\n"
    kept = measure.format(name="kept", body="torch.ones(10)") + measure.format(name="skipped", body="pytest.skip('no')")
    project.write(kept + measure.format(name="gone", body="torch.ones(10)"))
    project.run("--gpumem-update=new")
    project.write(kept)
    shards = {"kept": 0, "skipped": 1}
    for name, status in shards.items():
        result = project.run("--gpumem-baseline", f"--gpumem-report={name}.json", "-k", name)
        assert result.ret == status
        result.stdout.no_fnmatch_line("*unused*")
    files = [str(project.path / f"{name}.json") for name in shards]
    whole = merge(*files)
    assert whole.exit_code == 0, whole.output
    assert whole.output.count("unused baseline") == 1
    assert "1 unused baseline: test_it.py::test_gone (call)" in whole.output
    assert "nothing was gated" not in whole.output
    alone = merge(files[1])
    assert alone.exit_code == 1
    assert "nothing was gated: 1 test unmeasured" in alone.output


@pytest.mark.parametrize(
    ("metric", "number", "shown"), [("peak_allocated", 0, "| 0 B |"), ("step_time", 0.0, r"| \- |")]
)
def test_a_matrix_in_a_report_with_a_figure_of_0_is_written_without_ratios_to_it(folder, metric, number, shown):
    # Such reports are other programs'.
    plain = json.loads(to_json(everything("x")))
    for result in plain["results"][:2]:
        for verdict in result["verdict"]["verdicts"]:
            verdict["measurement"]["metrics"][metric] = number
    (folder / "a.json").write_text(json.dumps(plain), encoding="utf-8")
    done = merge("a.json", "--report", "a.md")
    assert done.exit_code == 1, done.output
    assert not isinstance(done.exception, ArithmeticError)
    assert shown in (folder / "a.md").read_text(encoding="utf-8")
