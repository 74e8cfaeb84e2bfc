"""The order of runs, and when they end."""

from __future__ import annotations

import pytest

from pytest_gpumem.ab.compare_revisions import is_settled, order_of_pair
from pytest_gpumem.gate.baseline import Key
from pytest_gpumem.gate.verdict import Outcome
from pytest_gpumem.reports.comparison import Change, Compared, Row
from pytest_gpumem.timing.intervals import Interval
from tests.ab.values import BASE, HEAD

OUTCOMES = {
    "slower": Outcome.REGRESSED,
    "faster": Outcome.IMPROVED,
    "uncertain": Outcome.UNCERTAIN,
    "not slower": Outcome.OK,
}


def row(number: int, change: Change) -> Row:
    return Row(Key("test_it.py", f"test_{number}", "call"), "toy", f"test_it.py::test_{number}", (change,))


def report(pairs: int, *speeds: tuple[str, float]) -> Compared:
    """A report on tests whose times were judged so; each has the upper end of its interval."""
    rows = tuple(
        row(number, Change("step_time", 1.0, 1.0, OUTCOMES[word], interval=Interval(1.0, 0.99, high)))
        for number, (word, high) in enumerate(speeds)
    )
    assert [one.changes[0].word for one in rows] == [word for word, _ in speeds]
    return Compared(BASE, HEAD, rows, pairs=pairs, tolerance=0.02)


def test_runs_are_mirrored_from_pair_to_pair():
    assert [side for pair in range(4) for side in order_of_pair(pair)] == [
        *("base", "head", "head", "base"),
        *("base", "head", "head", "base"),
    ]


def test_fewer_than_four_pairs_of_timed_runs_are_never_enough():
    settled = [is_settled(report(pairs, ("not slower", 1.0)), None) for pairs in (1, 2, 3, 4)]
    assert settled == [False, False, False, True]


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


def test_without_times_two_pairs_show_that_bytes_repeat():
    rows = (row(0, Change("peak_allocated", 1, 1, Outcome.OK)),)
    reports = [Compared(BASE, HEAD, rows, pairs=pairs, tolerance=0.02) for pairs in (1, 2)]
    assert [is_settled(one, None) for one in reports] == [False, True]


def test_where_nothing_can_be_compared_one_pair_is_enough():
    assert is_settled(report(1), None)
