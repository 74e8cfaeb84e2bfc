"""Runs of two revisions in turn: their order, and when enough is known."""

from __future__ import annotations

import pytest

from pytest_gpumem.base.errors import RunFailed
from pytest_gpumem.judging.gate.baseline import Key
from pytest_gpumem.judging.gate.verdict import Outcome
from pytest_gpumem.judging.times.intervals import Interval
from pytest_gpumem.reporting.reports.comparison import ComparedChange, ComparedRow, ComparisonReport
from pytest_gpumem.tools.ab.compare_variants import is_emulated, is_settled, reports_in_turns
from pytest_gpumem.tools.ab.verdicts import compare_runs
from pytest_gpumem.tools.checkout import Checkout
from tests.ab.values import BASE, HEAD, measured, measurement, run

KEY = Key("test_it.py", "test_a", "train_step")


def experiment(base, head, most=8, failing_at=None):
    """Reports on steps that take so many seconds (a function of the run's number), and the sides that were run."""
    ran = []

    def take(side, number):
        ran.append(side)
        if number == failing_at:
            raise RunFailed("planted")
        seconds = (base if side == "base" else head)(number)
        return run(side, measured("test_a", measurement(seconds=seconds)))

    return reports_in_turns(take, lambda pairs: compare_runs(pairs, BASE, HEAD, 0.02, {}), most), ran


def test_equal_revisions_are_run_four_times_each():
    trial, ran = experiment(lambda _: 0.1, lambda _: 0.1)
    *_, last = trial
    assert ran == ["base", "head", "head", "base"] * 2
    assert last.speeds[KEY].word == "not slower"


def test_a_clear_slowdown_is_confirmed_by_one_more_pair():
    trial, ran = experiment(lambda _: 0.1, lambda _: 0.12)
    *_, last = trial
    assert len(ran) == 10
    assert last.exit_status == 1


def test_what_stays_uncertain_is_run_as_often_as_allowed():
    trial, ran = experiment(lambda _: 0.1, lambda number: 0.08 if number % 4 == 2 else 0.13, most=6)
    *_, last = trial
    assert len(ran) == 12
    assert last.pairs == 6


def test_base_and_head_are_not_confused_in_mirrored_pairs():
    trial, _ = experiment(lambda number: 0.1 + number / 1000, lambda number: 0.1 + number / 1000)
    *_, last = trial
    # What only drifts upwards is on either side in turn.
    assert last.speeds[KEY].interval.ratio == pytest.approx(1, abs=0.01)


def test_when_a_run_fails_what_was_known_before_it_is_kept():
    trial, ran = experiment(lambda _: 0.1, lambda _: 0.1, failing_at=6)
    known = []
    with pytest.raises(RunFailed):
        known.extend(trial)
    assert (len(ran), [report.pairs for report in known]) == (6, [1, 2])


# The order of runs, and when they end


OUTCOMES = {
    "slower": Outcome.REGRESSED,
    "faster": Outcome.IMPROVED,
    "uncertain": Outcome.UNCERTAIN,
    "not slower": Outcome.OK,
}


def row(number: int, change: ComparedChange) -> ComparedRow:
    return ComparedRow(Key("test_it.py", f"test_{number}", "call"), "toy", f"test_it.py::test_{number}", (change,))


def report(pairs: int, *speeds: tuple[str, float]) -> ComparisonReport:
    """A report on tests whose times were judged so; each has the upper end of its interval."""
    rows = tuple(
        row(number, ComparedChange("step_time", 1.0, 1.0, OUTCOMES[word], interval=Interval(1.0, 0.99, high)))
        for number, (word, high) in enumerate(speeds)
    )
    assert [one.changes[0].word for one in rows] == [word for word, _ in speeds]
    return ComparisonReport(BASE, HEAD, rows, pairs=pairs, tolerance=0.02)


def test_a_slowdown_that_is_not_excluded_yet_needs_more_pairs():
    assert is_settled(report(4, ("not slower", 1.02)), None)
    assert not is_settled(report(4, ("not slower", 1.021)), None)


def test_one_uncertain_test_of_many_needs_more_pairs():
    sure = ("not slower", 1.0)
    assert not is_settled(report(6, sure, ("uncertain", 1.05), sure), report(5, sure, ("uncertain", 1.05), sure))


@pytest.mark.parametrize("word", ["slower", "faster"])
def test_what_differs_has_to_be_seen_twice(word):
    now = report(5, (word, 1.1))
    assert not is_settled(now, report(4, ("uncertain", 1.1)))
    assert not is_settled(now, None)
    assert is_settled(now, report(4, (word, 1.1)))


def test_without_times_each_side_runs_once():
    rows = (row(0, ComparedChange("peak_allocated", 1, 1, Outcome.OK)),)
    assert is_settled(ComparisonReport(BASE, HEAD, rows, pairs=1, tolerance=0.02), None)


def test_where_nothing_can_be_compared_one_pair_is_enough():
    assert is_settled(report(1), None)


@pytest.mark.parametrize(
    ("arguments", "settings", "emulated"),
    [
        (["--gpumem-device=emulated:h100"], "", True),
        (["--gpumem-device", "emulated:h100", "-q"], "", True),
        (["--gpumem-device=cpu"], "", False),
        ([], 'device = "emulated:l4"', True),
        ([], 'device = "cpu"', False),
        ([], "", False),
        (["--gpumem-device=cpu"], 'device = "emulated:l4"', False),
        (["--gpumem-device=emulated:l4", "--gpumem-device=cpu"], "", False),
    ],
)
def test_whether_runs_are_emulated_is_said_by_the_last_argument_or_else_the_settings(
    tmp_path, arguments, settings, emulated
):
    (tmp_path / "pyproject.toml").write_text(f"[tool.gpumem]\n{settings}\n", encoding="utf-8")
    assert is_emulated(arguments, Checkout.as_it_is(tmp_path)) is emulated
