"""``gpumem compare``: reports and revisions of the store against each other, by the gate's own rule."""

from __future__ import annotations

import json
import math
from dataclasses import replace

import pytest
from click.testing import CliRunner

from pytest_gpumem.facts.measurement import Environment, Workload
from pytest_gpumem.facts.metrics import Tolerance
from pytest_gpumem.facts.values.times import Round, Sample, Times
from pytest_gpumem.judging.gate.baseline import Key
from pytest_gpumem.judging.gate.verdict import Outcome, TestVerdict
from pytest_gpumem.judging.times.comparison import Runs
from pytest_gpumem.plugin.config.settings import DEFAULT_TOLERANCES
from pytest_gpumem.reporting.reports.comparison import (
    NOTHING_COMPARED,
    WORSE,
    Failure,
    compare_sides,
    side_of_report,
    side_of_store,
)
from pytest_gpumem.reporting.reports.comparison_formats import accounting, markdown, remarks
from pytest_gpumem.reporting.reports.comparison_formats import to_json as comparison_json
from pytest_gpumem.reporting.reports.escaping import visible
from pytest_gpumem.reporting.reports.json_report import to_json
from pytest_gpumem.reporting.reports.results import TestResult
from pytest_gpumem.tools.main import main
from tests.git_store import H100, MB, Repository, entry
from tests.hostile import TEXTS
from tests.reports.rendered import read
from tests.reports.test_merging import TEST, measured, shard, skipped

A100 = Environment("a100", "NVIDIA A100", {"torch": "2.11.0"})
KEY = Key("a.py", "test_a", "call")


def stored(**entries):
    return side_of_store("store", [("h100", Key("a.py", test, "call"), one) for test, one in entries.items()])


def judged(old, new):
    return compare_sides(old, new, DEFAULT_TOLERANCES)


def outcomes(found):
    return {row.key.test: row.outcome for row in found.rows}


def on_one_side(found):
    """The measurements that one side has only: what is said of them, their tests and devices."""
    return [
        (one.word, one.stored_key[0].test, one.stored_key[1])
        for one in found.omitted_tests
        if one.stored_key is not None
    ]


# Judging


def test_two_stores_are_judged_by_the_tolerances_of_the_gate():
    old = stored(test_a=entry(100 * MB), test_b=entry(400 * MB), test_c=entry(100 * MB), test_d=entry(100 * MB))
    new = stored(test_a=entry(102 * MB), test_b=entry(401 * MB), test_c=entry(90 * MB), test_d=entry(100 * MB))
    found = judged(old, new)
    assert outcomes(found) == {
        "test_a": Outcome.REGRESSED,
        "test_b": Outcome.OK,
        "test_c": Outcome.IMPROVED,
        "test_d": Outcome.OK,
    }
    assert found.exit_status == WORSE
    assert judged(new, new).exit_status == 0


def test_an_imbalance_is_shown_if_it_differs_and_is_not_compared_if_a_side_lacks_it():
    old, new = (
        stored(**{test: entry(metrics={"imbalance": ratio} if ratio else {}) for test, ratio in ratios.items()})
        for ratios in (
            {"test_a": 1.5, "test_b": 1.0, "test_c": 1.0, "test_d": None},
            {"test_a": 1.5, "test_b": 1.01, "test_c": 1.25, "test_d": 1.5},
        )
    )
    found = judged(old, new)
    equal, near, grown, lacking = (row.changes[1] for row in found.rows)
    assert [change.is_shown for change in (equal, near, grown)] == [False, True, True]
    assert [change.outcome for change in (near, grown, lacking)] == [Outcome.OK, Outcome.REGRESSED, Outcome.NEW]
    assert lacking.reason == "not compared: the old side has no value"
    assert "| imbalance over ranks | 1.00 | 1.25 | +25.0 % | +2.0 % | " in markdown(found, "si")


def test_another_workload_that_did_not_grow_is_stale_and_compares_nothing():
    found = judged(stored(test_a=entry()), stored(test_a=entry(workload=Workload("call", batch="int64[8]"))))
    assert (outcomes(found), found.exit_status) == ({"test_a": Outcome.STALE}, NOTHING_COMPARED)


def test_another_workload_that_grew_is_worse():
    found = judged(stored(test_a=entry()), stored(test_a=entry(99 * MB, workload=Workload("call", batch="int64[8]"))))
    assert (outcomes(found), found.exit_status) == ({"test_a": Outcome.REGRESSED}, WORSE)
    assert found.rows[0].reason == "batch int64[8], was none"


def test_a_store_of_before_growth_was_measured_had_none():
    found = judged(stored(test_a=entry()), stored(test_a=entry(metrics={"growth": 10**6})))
    assert (outcomes(found), found.exit_status) == ({"test_a": Outcome.REGRESSED}, WORSE)


def test_what_one_side_has_only_is_new_or_gone_and_not_worse():
    found = judged(stored(test_a=entry(), test_b=entry()), stored(test_b=entry(), test_c=entry()))
    assert on_one_side(found) == [("new", "test_c", "h100"), ("gone", "test_a", "h100")]
    assert found.exit_status == 0


def test_a_device_is_compared_with_itself_only():
    here = side_of_store("here", [("h100", KEY, entry())])
    there = side_of_store("there", [("a100", KEY, entry(99 * MB, device=A100))])
    report = side_of_report("report", shard(measured(peak=99 * MB, device=A100)))
    for found in (judged(here, there), judged(here, report)):
        assert (found.rows, found.exit_status) == ((), NOTHING_COMPARED)


def test_an_emulated_gpu_is_compared_with_a_real_one_by_what_it_can_be_held_to():
    emulated = Environment("emulated-h100-80gb", "NVIDIA H100 (emulated)", {"torch": "2.11.0"})
    old = side_of_store("old", [("h100", KEY, entry(100 * MB, metrics={"launches": 7}))])

    def against(peak, *more):
        one = entry(peak, device=emulated, metrics={"launches": 9})
        new = side_of_store("new", [("emulated-h100-80gb", KEY, one), *more])
        return compare_sides(old, new, {**DEFAULT_TOLERANCES, "peak_allocated": Tolerance(0.0)})

    within, beyond = against(100 * MB + MB // 2), against(100 * MB + MB // 2 + 1)
    assert (outcomes(within), outcomes(beyond)) == ({"test_a": Outcome.OK}, {"test_a": Outcome.REGRESSED})
    assert (within.rows[0].old_slug, within.rows[0].slug) == ("h100", "emulated-h100-80gb")
    assert remarks(within)[0] == "devices: h100 and emulated-h100-80gb; one of the two devices is emulated"
    assert json.loads(comparison_json(within))["tests"][0]["old_slug"] == "h100"
    # What the new side has of the real one is nearer.
    both = against(100 * MB, ("h100", KEY, entry(100 * MB)))
    assert [(row.old_slug, row.slug) for row in both.rows] == [(None, "h100")]
    assert on_one_side(both) == [("new", "test_a", "emulated-h100-80gb")]


def test_a_report_is_judged_against_a_store_and_against_a_report():
    report = side_of_report("new", shard(measured(peak=20 * MB)))
    assert outcomes(judged(stored(test_a=entry(10 * MB)), report)) == {"test_a": Outcome.REGRESSED}
    assert outcomes(judged(report, stored(test_a=entry(10 * MB)))) == {"test_a": Outcome.IMPROVED}
    assert outcomes(judged(side_of_report("old", shard(measured(peak=20 * MB))), report)) == {"test_a": Outcome.OK}


@pytest.mark.parametrize(
    ("result", "not_run", "word", "status"),
    [
        (skipped(why="it failed by itself", failed=True), (), "failed", WORSE),
        (skipped(), (), "unmeasured", 0),
        (None, (("a.py", "test_a"),), "failed", WORSE),
    ],
)
def test_a_test_that_gave_no_figures_is_gone_with_the_reason_and_worse_if_it_failed(result, not_run, word, status):
    new = side_of_report("new", shard(*([result] if result else []), not_run=not_run))
    found = judged(stored(test_a=entry(), test_b=entry()), replace(new, figures=stored(test_b=entry()).figures))
    (gone,) = found.omitted_tests
    assert gone.reason is not None
    assert (gone.word, found.exit_status) == (word, status)


OVER_BUDGET = measured(Outcome.OVER_BUDGET, failed=True)
TORN = measured(failed=True)
TORN = replace(TORN, verdict=replace(TORN.verdict, failure=None), failed_in="teardown")
RELATIONS = TestResult(
    TestVerdict("a.py", "test_r", failure="GPU memory: a relation does not hold\n\n  more"), False, True
)
FINE = shard(measured(), measured(test=("a.py", "test_b")))


def after(*results, **changes):
    """What comes of a session with these results in which test_b is as before, after `FINE`."""
    new = shard(*results, measured(test=("a.py", "test_b")), **changes)
    return judged(side_of_report("old", FINE), side_of_report("new", new))


@pytest.mark.parametrize(
    ("found", "told"),
    [
        (after(not_run=(TEST,)), ("a.py", "test_a", "The test was selected, but did not finish")),
        (after(replace(OVER_BUDGET, verdict=replace(OVER_BUDGET.verdict, failure="over\nx"))), (*TEST, "over")),
        (after(TORN), (*TEST, "Its tear-down failed")),
        (after(replace(TORN, failed_in="call")), (*TEST, "The test itself failed")),
        (after(measured(), RELATIONS), ("a.py", "test_r", "GPU memory: a relation does not hold")),
    ],
    ids=["not run", "over budget", "tear-down", "by itself", "relations"],
)
def test_a_test_that_failed_in_the_new_report_only_is_worse_whatever_its_figures_say(found, told):
    assert found.exit_status == WORSE
    assert [(one.file, one.test, one.why) for one in found.failed] == [told]
    id_ = f"{told[0]}::{told[1]}"
    assert [said for said in remarks(found) if id_ in said and said.startswith("failed: ") and told[2] in said]
    assert ", 1 failed;" in accounting(found)
    page = read(markdown(found, "si"))
    assert [row[-1] for row in page.rows if row[0].startswith(id_)] == ["failed"]
    plain = json.loads(comparison_json(found))
    assert plain["failed"] == [{"file": told[0], "test": told[1], "reason": told[2]}]


def test_what_failed_on_both_sides_is_not_worse():
    old = shard(OVER_BUDGET, RELATIONS, not_run=(("a.py", "test_n"),))
    found = judged(side_of_report("old", old), side_of_report("new", old))
    assert (found.failed, found.exit_status, remarks(found)) == ((), 0, [])


def test_what_failed_on_another_device_before_has_failed_on_this_one_only_now():
    both = [measured(device=H100), measured(device=A100)]
    failed = [measured(failed=True, device=H100), measured(failed=True, device=A100)]
    old = side_of_report("old", shard(failed[0], both[1]))
    assert judged(old, side_of_report("new", shard(*failed))).exit_status == WORSE
    assert judged(old, side_of_report("new", shard(failed[0], both[1]))).exit_status == 0


def test_a_test_whose_file_could_not_be_collected_is_gone_for_that_and_worse():
    found = after(not_collected=("a.py",))
    assert {(one.word, one.reason) for one in found.omitted_tests} == {
        ("failed", "the test's file could not be collected")
    }
    assert found.exit_status == WORSE


def test_a_regression_is_told_once():
    found = after(measured(peak=20 * MB, failed=True))
    assert "1 regressed" in accounting(found)
    assert "failed" not in accounting(found)
    assert [one.test for one in found.failed] == ["test_a"]


def test_a_tolerance_that_a_hook_made_infinite_can_be_told_of_a_baseline_of_zero():
    old, new = (stored(test_a=entry(metrics={"retained": bytes_})) for bytes_ in (0, 5))
    found = compare_sides(old, new, {**DEFAULT_TOLERANCES, "retained": Tolerance(0.0, math.inf)})
    assert read(markdown(found, "si")).rows[1][-2:] == ["+inf", "ok"]


@pytest.mark.parametrize(
    ("metric", "number"), [("throughput", math.inf), ("throughput", -math.inf), ("step_time", math.nan)]
)
def test_a_figure_that_is_no_finite_number_is_told_as_the_report_tells_it(tmp_path, monkeypatch, metric, number):
    monkeypatch.chdir(tmp_path)
    for name, value in (("old", 0.5), ("new", number)):
        one = measured(peak=10 * MB)
        verdict = one.verdict.verdicts[0]
        figures = {"peak_allocated": 10 * MB, metric: value}
        verdict = replace(verdict, measurement=replace(verdict.measurement, metrics=figures))
        report = shard(replace(one, verdict=replace(one.verdict, verdicts=(verdict,))))
        (tmp_path / f"{name}.json").write_text(to_json(report), encoding="utf-8")
    for form in ([], ["--format", "markdown"], ["--format", "json"]):
        result = compare("old.json", "new.json", *form)
        assert (result.exit_code, result.exception is None or isinstance(result.exception, SystemExit)) == (0, True)
    written = json.loads(result.output, parse_constant=lambda text: pytest.fail(f"{text} is not JSON"))
    (told,) = [one for one in written["tests"][0]["metrics"] if one["metric"] == metric]
    assert told["new"] == {"inf": "Infinity", "-inf": "-Infinity", "nan": "NaN"}[repr(number)]


def times(seconds: float) -> Times:
    return Times((Sample(tuple(Round(seconds, 1e9) for _ in range(10))),) * 2)


def test_step_times_are_judged_by_rounds_of_the_new_side_and_medians_are_told():
    machine = replace(H100, details={"machine": "one"})
    slow = measured(peak=10 * MB)
    measurement = replace(
        slow.verdict.verdicts[0].measurement,
        environment=machine,
        metrics={"peak_allocated": 10 * MB, "step_time": 0.02},
        times=times(0.02),
    )
    verdict = replace(slow.verdict, verdicts=(replace(slow.verdict.verdicts[0], measurement=measurement),))
    runs = Runs((0.01, 0.01, 0.01), (1e7, 1e7, 1e7))
    old = stored(test_a=entry(device=machine, metrics={"step_time": 0.01}, runs=runs))
    found = judged(old, side_of_report("new", shard(replace(slow, verdict=verdict))))
    assert outcomes(found) == {"test_a": Outcome.REGRESSED}
    medians = stored(test_a=entry(device=machine, metrics={"step_time": 0.02}, runs=Runs((0.02,), (2e7,))))
    (row,) = judged(old, medians).rows
    (time,) = (change for change in row.changes if change.metric == "step_time")
    assert (row.outcome, time.outcome, time.is_shown) == (Outcome.OK, Outcome.RECORDED, True)


@pytest.mark.parametrize(
    "text",
    [*(TEXTS[name] for name in ("tags", "pipes", "backticks", "blocks", "surrogates", "nothing")), "a|<b>x</b>|`@bob"],
    ids=["tags", "pipes", "backticks", "blocks", "surrogates", "nothing", "all at once"],
)
def test_whatever_a_test_is_called_markdown_keeps_its_table(text):
    places = [("h100", Key("a.py", f"{text}{name}", "call")) for name in "rnd"]
    old = side_of_store(text, [(*places[0], entry(10 * MB)), (*places[1], entry())])
    new = side_of_store(text, [(*places[0], entry(20 * MB)), (*places[2], entry())])
    found = judged(old, replace(new, failures=(Failure("a.py", f"{text}f", text),)))
    page = read(markdown(found, "si"))
    assert [len(row) for row in page.rows] == [7] * 5
    told = [visible(str(key)) for _, key in sorted(places, key=lambda backend: "rdn".index(backend[1].test[-1]))]
    assert [row[0] for row in page.rows[1:]] == [*told, visible(f"a.py::{text}f")]
    assert set(page.tags) <= {"h3", "p", "table", "thead", "tbody", "tr", "th", "td", "code", "ul", "li"}


# The command


@pytest.fixture
def repository(tmp_path, monkeypatch):
    made = Repository(tmp_path / "project")
    monkeypatch.chdir(made.path)
    made.commit("first", {"test_a": entry(10 * MB), "test_b": entry(20 * MB)})
    made.git("tag", "v1")
    made.commit("second", {"test_a": entry(15 * MB), "test_c": entry(5 * MB)})
    return made


def compare(*arguments):
    return CliRunner().invoke(main, ["compare", *map(str, arguments)])


def test_two_revisions_of_the_store_are_compared(repository):
    result = compare("v1", "HEAD")
    assert result.exit_code == 1
    table, _, last = result.output.rpartition("\n\n")
    assert [" ".join(line.split()) for line in table.splitlines()[1:]] == [
        "a.py::test_a (call) peak allocated 10.00 MB 15.00 MB +50.0 % +0.6 % regressed",
        "a.py::test_c (call) peak allocated 5.00 MB new",
        "a.py::test_b (call) peak allocated 20.00 MB gone",
    ]
    assert last.startswith("gpumem compare: 1 compared, 1 regressed, 1 new, 1 gone; old v1 (")


def test_a_revision_is_compared_with_the_store_as_it_lies_here(repository):
    repository.store({"test_a": entry(15 * MB), "test_c": entry(4 * MB)})
    assert "1 unchanged" in compare("HEAD").output
    assert compare("v1").exit_code == 1


def test_devices_of_the_store_are_compared_by_their_folders(repository):
    emulated = Environment("emulated-h100-80gb", "NVIDIA H100 (emulated)", {"torch": "2.11.0"})
    repository.store({"test_a": entry(10 * MB, device=emulated)}, slug="emulated-h100-80gb")
    result = compare("h100", "emulated-h100-80gb")
    assert (result.exit_code, "improved" in result.output, "1 gone" in result.output) == (0, True, True)
    assert compare("h10", "emulated-h100-80gb").exit_code == 2


def test_the_store_is_found_where_the_settings_say_in_every_revision(repository, monkeypatch):
    (repository.path / "gpumem-baselines").rename(repository.path / "kept")
    (repository.path / "pyproject.toml").write_text('[tool.gpumem]\nstore = "kept"\n', encoding="utf-8")
    repository.commit("moved")
    assert compare("HEAD").exit_code == 0
    assert compare("HEAD", "v1").exit_code == 2


def test_reports_are_compared_with_each_other_and_with_a_revision(repository):
    for name, peak in (("old", 10 * MB), ("new", 20 * MB)):
        (repository.path / f"{name}.json").write_text(to_json(shard(measured(peak=peak))), encoding="utf-8")
    assert compare("old.json", "new.json").exit_code == 1
    assert compare("new.json", "old.json").exit_code == 0
    assert compare("v1", "old.json").exit_code == 0


@pytest.mark.parametrize("form", [(), ("--format", "json"), ("--format", "markdown")], ids=str)
def test_the_stores_password_is_not_told(tmp_path, monkeypatch, form):
    monkeypatch.chdir(tmp_path)
    (tmp_path / "old.json").write_text(to_json(shard(measured(peak=10 * MB))), encoding="utf-8")
    result = compare("old.json", "--store", "s3://me:hunter2secret@host/compared", *form)
    assert result.exit_code == 2, result.output
    assert "s3://***@host/compared" in result.output
    assert "hunter2secret" not in result.output


def test_a_failure_of_the_new_report_is_in_the_exit_status_and_in_the_output(repository):
    for name, results in (("old", [measured()]), ("new", [OVER_BUDGET])):
        (repository.path / f"{name}.json").write_text(to_json(shard(*results)), encoding="utf-8")
    result = compare("old.json", "new.json")
    assert result.exit_code == 1
    assert "failed: a.py::test_a: why" in result.output.splitlines()
    assert compare("new.json", "new.json").exit_code == 0


def test_tolerances_are_those_of_the_settings(repository):
    settings = '[tool.gpumem.tolerance]\npeak_allocated = "60 %"\n'
    (repository.path / "pyproject.toml").write_text(settings, encoding="utf-8")
    assert compare("v1", "HEAD").exit_code == 0


def test_programs_and_comments_get_the_same(repository):
    found = json.loads(compare("v1", "HEAD", "--format", "json").output)
    assert (found["exit_status"], found["tests"][0]["outcome"]) == (1, "regressed")
    assert [found["added"][0]["test"], found["gone"][0]["test"]] == ["test_c", "test_b"]
    text = compare("v1", "HEAD", "--format", "markdown").output
    assert "| `a.py::test_a (call)` | peak allocated | 10.00 MB | 15.00 MB | +50.0 % | +0.6 % | regressed |" in text


@pytest.mark.parametrize(
    ("arguments", "said"),
    [
        (["v1", "nothing"], "there is no revision 'nothing'"),
        (["none.json", "v1"], "there is no file none.json"),
        (["v1", "pyproject.toml"], "pyproject.toml: it is not JSON"),
        (["v1", "HEAD", "--store", "s3://x"], "is not a folder"),
        (["v1", "HEAD", "--store", "elsewhere"], "is not in a git repository, so it has no history"),
        (["HEAD", "HEAD", "--store", "empty"], "nothing could be compared"),
    ],
)
def test_what_cannot_be_compared_is_said_and_ends_with_2(repository, tmp_path, arguments, said):
    (tmp_path / "elsewhere").mkdir()
    (repository.path / "empty").mkdir()
    arguments = [str(tmp_path / "elsewhere") if word == "elsewhere" else word for word in arguments]
    result = compare(*arguments)
    assert (result.exit_code, said in result.output) == (2, True), result.output


def test_a_broken_file_of_a_revision_is_named_with_it(repository):
    (repository.path / "gpumem-baselines/h100/a.py.toml").write_text("format = 99\n", encoding="utf-8")
    repository.commit("broken")
    result = compare("v1", "HEAD")
    assert result.exit_code == 2
    assert "HEAD:gpumem-baselines/h100/a.py.toml: format is 99" in result.output
