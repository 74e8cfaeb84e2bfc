"""Runs in turn until enough is known."""

from __future__ import annotations

import pytest

from pytest_gpumem.ab.compare_revisions import reports_in_turns
from pytest_gpumem.ab.runs import RunFailed
from pytest_gpumem.ab.verdicts import compare_runs
from pytest_gpumem.gate.baseline import Key
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
