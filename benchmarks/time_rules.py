"""What our gate says of a trial, and how a rule is scored over many."""

from __future__ import annotations

import math
from dataclasses import dataclass
from functools import lru_cache
from typing import TYPE_CHECKING, Literal

from time_replay import Timed

from pytest_gpumem.metrics import METRICS
from pytest_gpumem.timing.comparison import MOST_RUNS, Comparison, Runs, compare, compare_pairs

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Sequence

    from time_file import Series

    from pytest_gpumem.timing.samples import Sample

Outcome = Literal["fails", "passes", "uncertain"]


@dataclass(frozen=True, slots=True)
class Trial:
    """A comparison: runs of a step that are the ``baseline``, the latest last, and the run that is judged.

    ``next`` is another one like ``now``, for a rule that wants two processes.
    """

    baseline: tuple[Series, ...]
    now: Series
    next: Series
    cores: int


@dataclass(frozen=True, slots=True)
class PairedTrial:
    """Two versions of a step that ran in turns: pairs (base, head) of neighbouring runs."""

    pairs: tuple[tuple[Series, Series], ...]
    cores: int


def tolerance() -> float:
    """The gate's default for a step's time, as a ratio."""
    judged = METRICS["step_time"].tolerance
    assert judged is not None, "a step's time is gated"
    return judged.relative


@lru_cache(maxsize=4096)
def _first(series: Series, cores: int) -> Timed:
    return Timed(series, cores)


def runs_of(baseline: Sequence[Series], cores: int) -> Runs | None:
    """What the store keeps of accepted runs: the medians of those that nothing disturbed; ``None`` when there are none."""
    samples = [_first(series, cores).first for series in baseline]
    valid = [sample for sample in samples if sample.invalid is None][-MOST_RUNS:]
    if not valid:
        return None
    cycles = tuple(sample.cycles for sample in valid if sample.cycles is not None)
    return Runs(tuple(sample.median for sample in valid), cycles if len(cycles) == len(valid) else ())


def judged(trial: Trial) -> tuple[Comparison | None, Sequence[Sample]]:
    """What our gate says: of a first sample and, if that one is doubted, of a re-measurement; ``None`` without a baseline."""
    runs = runs_of(trial.baseline, trial.cores)
    timed = _first(trial.now, trial.cores)
    if runs is None:
        return None, (timed.first,)
    comparison = compare([timed.first], runs, tolerance())
    if comparison.outcome not in ("slower", "uncertain"):
        return comparison, (timed.first,)
    samples = (timed.first, timed.again)
    return compare(samples, runs, tolerance()), samples


def ours(trial: Trial) -> Outcome:
    """Our gate against a stored baseline. Without a baseline to go by it is uncertain."""
    comparison, _ = judged(trial)
    return "uncertain" if comparison is None else _outcome(comparison)


def ours_in_turns(trial: PairedTrial, tolerated: float) -> Outcome:
    """`gpumem ab` over the pairs, all of them."""
    pairs = [(_first(base, trial.cores).first, _first(head, trial.cores).first) for base, head in trial.pairs]
    return _outcome(compare_pairs(pairs, tolerated))


def _outcome(comparison: Comparison) -> Outcome:
    if comparison.outcome == "slower":
        return "fails"
    return "uncertain" if comparison.outcome == "uncertain" else "passes"


@dataclass(frozen=True, slots=True)
class Score:
    """How often a rule failed, and could not tell, over all trials."""

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


def score(rule: Callable[[Trial], Outcome], trials: Iterable[Trial]) -> Score:
    """Judge every trial by ``rule``."""
    return counted(rule(trial) for trial in trials)


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
