"""Judges a trial as the gate does, and scores it over many."""

from __future__ import annotations

import math
from dataclasses import dataclass
from functools import lru_cache
from typing import TYPE_CHECKING, Literal, cast

from time_replay import Timed

from pytest_gpumem.base.git import Revision
from pytest_gpumem.base.units import parse_ratio
from pytest_gpumem.facts.measurement import Environment, Measurement, Workload
from pytest_gpumem.facts.metrics import METRICS
from pytest_gpumem.facts.values.times import Times
from pytest_gpumem.judging.gate.verdict import TestVerdict, Verdict
from pytest_gpumem.judging.times.comparison import SLOWER_RUN, Runs, compare, is_undecided, run_of, slower_machine
from pytest_gpumem.tools.ab.command import ab
from pytest_gpumem.tools.ab.compare_variants import order_of_pair, reports_in_turns
from pytest_gpumem.tools.ab.runs import Run as AbRun
from pytest_gpumem.tools.ab.verdicts import compare_runs
from pytest_gpumem.tools.checkout import BASE

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Sequence

    from time_recorded import Series

    from pytest_gpumem.facts.values.times import Sample
    from pytest_gpumem.reporting.reports.comparison import ComparisonReport
    from pytest_gpumem.tools.checkout import Side

Outcome = Literal["fails", "passes", "uncertain"]
_OUTCOMES: dict[str, Outcome] = {
    "slower": "fails",
    "not slower": "passes",
    "faster": "passes",
    "uncertain": "uncertain",
}
"""By the words of the gate and of `gpumem ab`."""


@dataclass(frozen=True, slots=True)
class Trial:
    """A comparison: runs of a step that are the ``baseline``, the latest last, and the run that is judged, ``now``."""

    baseline: tuple[Series, ...]
    now: Series
    cores: int


@dataclass(frozen=True, slots=True)
class PairedTrial:
    """Two versions of a step that run in turns: pairs (base, head) of neighbouring runs, as many as may be taken."""

    pairs: tuple[tuple[Series, Series], ...]
    cores: int


def in_order(number: int, runs: tuple[Series, Series]) -> tuple[Series, Series]:
    """The pair (base, head) of two ``runs`` that followed one another; pairs count from 0, and every other one is mirrored."""
    first, second = runs
    return (first, second) if order_of_pair(number)[0] == BASE else (second, first)


def tolerance() -> float:
    """The gate's default for a step's time, as a ratio."""
    judged = METRICS["step_time"].tolerance
    assert judged is not None, "a step's time is gated"
    return judged.relative


def tolerance_in_turns() -> float:
    """The default of `gpumem ab --max-slowdown`, as a ratio."""
    (default,) = (option.default for option in ab.params if option.name == "max_slowdown")
    return parse_ratio(cast("str", default))


@lru_cache(maxsize=4096)
def _first(series: Series, cores: int) -> Timed:
    return Timed(series, cores)


def _recorded(series: Series, cores: int) -> Times:
    """The times of a run that is to be accepted: measured again where something disturbed it."""
    timed = _first(series, cores)
    return Times((timed.first,) if timed.first.invalid is None else (timed.first, timed.again))


def runs_of(baseline: Sequence[Series], cores: int) -> Runs | None:
    """Return the accepted runs that the store keeps: those that are a measure; ``None`` when there are none."""
    kept: Runs | None = None
    for series in baseline:
        run = run_of(_recorded(series, cores))
        if run is not None and (kept is None or slower_machine(run, kept.pace, SLOWER_RUN) is None):
            kept = run if kept is None else kept.extended_by(run)
    return kept


def ours(trial: Trial) -> Outcome:
    """Our gate against a stored baseline: a first sample and, where that is doubted, re-measurements of it.

    Without a baseline to go by it is uncertain.
    """
    runs = runs_of(trial.baseline, trial.cores)
    if runs is None:
        return "uncertain"
    timed = _first(trial.now, trial.cores)
    samples = [timed.first]
    comparison = compare(samples, runs, tolerance())
    if comparison.outcome != "not slower":
        samples.append(timed.again)
        if is_undecided(samples, runs, tolerance()) and timed.once_more is not None:
            samples.append(timed.once_more)
        comparison = compare(samples, runs, tolerance())
    return _OUTCOMES[comparison.outcome]


def ours_in_turns(trial: PairedTrial, tolerated: float) -> Outcome:
    """`gpumem ab`: it looks after each pair, and takes no more of them than it needs."""
    (figure,) = compared_in_turns(trial, tolerated).speeds.values()
    return _OUTCOMES[figure.word]


def compared_in_turns(trial: PairedTrial, tolerated: float) -> ComparisonReport:
    """The report with which `gpumem ab` ends, of at most the trial's pairs."""

    def take(side: Side, number: int) -> AbRun:
        base, head = trial.pairs[(number - 1) // 2]
        return _run_of_pytest(_first(base if side == BASE else head, trial.cores).first)

    def compare_so_far(pairs: Sequence[tuple[AbRun, AbRun]]) -> ComparisonReport:
        return compare_runs(pairs, _NOWHERE, _NOWHERE, tolerated, {})

    *_, last = reports_in_turns(take, compare_so_far, len(trial.pairs))
    return last


_NOWHERE = Revision("HEAD", "0" * 40)


def _run_of_pytest(sample: Sample) -> AbRun:
    """A run with one test, which timed one step."""
    measurement = Measurement("step", Workload("call"), Environment("cpu", "CPU"), {}, times=Times((sample,)))
    return AbRun({("test", "step"): TestVerdict("test", "step", (Verdict(measurement, ()),))}, root="")


@dataclass(frozen=True, slots=True)
class Score:
    """Number of trials in which the gate failed, and could not tell."""

    fails: int
    uncertain: int
    trials: int

    @property
    def share(self) -> float:
        """Of trials that failed."""
        return self.fails / self.trials

    def interval(self) -> tuple[float, float]:
        """The exact 95 % confidence interval of the share (Clopper and Pearson, 1934)."""
        return exact_interval(self.fails, self.trials)


def counted(outcomes: Iterable[Outcome]) -> Score:
    """The score of outcomes."""
    all_of_them = list(outcomes)
    return Score(all_of_them.count("fails"), all_of_them.count("uncertain"), len(all_of_them))


def exact_interval(hits: int, trials: int, level: float = 0.95) -> tuple[float, float]:
    """The shares with which ``hits`` or more, and ``hits`` or fewer, of ``trials`` are not too unlikely."""
    tail = (1 - level) / 2
    low = 0.0 if hits == 0 else _share_where(lambda share: 1 - _at_most(hits - 1, trials, share) > tail)
    high = 1.0 if hits == trials else _share_where(lambda share: _at_most(hits, trials, share) < tail)
    return low, high


def _share_where(true_above: Callable[[float], bool]) -> float:
    low, high = 0.0, 1.0
    for _ in range(50):
        middle = (low + high) / 2
        low, high = (low, middle) if true_above(middle) else (middle, high)
    return (low + high) / 2


def _at_most(hits: int, trials: int, share: float) -> float:
    """The probability of at most ``hits`` in ``trials``."""
    if not 0 < share < 1:
        return 1.0 if share <= 0 else float(hits >= trials)
    logarithms = (
        math.lgamma(trials + 1)
        - math.lgamma(number + 1)
        - math.lgamma(trials - number + 1)
        + number * math.log(share)
        + (trials - number) * math.log1p(-share)
        for number in range(hits + 1)
    )
    return sum(map(math.exp, logarithms))
