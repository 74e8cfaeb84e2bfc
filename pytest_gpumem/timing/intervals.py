"""Confidence intervals of ratios of times: bootstraps over rounds and runs, widened where these are few."""

from __future__ import annotations

import itertools
import math
import random
import statistics
from collections import Counter
from dataclasses import dataclass
from functools import lru_cache
from typing import TYPE_CHECKING

from pytest_gpumem.units import format_ratio

if TYPE_CHECKING:
    from collections.abc import Sequence


MOST_TABULATED = 100
"""The tables grow with the square of the number of values. More of them are resampled one by one."""


def resampled_medians(values: Sequence[float], count: int, rng: random.Random) -> list[float]:
    """Return the medians of ``count`` samples with replacement of ``values``, as many values in each."""
    size = len(values)
    if size > MOST_TABULATED:
        return [statistics.median(rng.choices(values, k=size)) for _ in range(count)]
    pairs, cumulative = _middles(size)
    ordered = sorted(values)
    return rng.choices([(ordered[low] + ordered[high]) / 2 for low, high in pairs], cum_weights=cumulative, k=count)


@lru_cache(maxsize=MOST_TABULATED)
def _middles(size: int) -> tuple[tuple[tuple[int, int], ...], tuple[float, ...]]:
    """Return the pairs of ``size`` ordered values that may be in the middle of a sample, with cumulated probabilities.

    Of an odd number it is one value, twice. By the distribution of order statistics (David and Nagaraja, Order Statistics,
    2.1 and 2.3): that k values of a sample are among the first i of n has the probability of k hits in n trials with i/n.
    """
    half = (size + 1) // 2
    at_most = [_at_least(half, size, number / size) for number in range(size + 1)]
    alone = [after - before for before, after in itertools.pairwise(at_most)]
    if size % 2:
        return tuple((index, index) for index in range(size)), tuple(itertools.accumulate(alone))
    # The sample's lower half ends with one value, and its upper half begins with a later one.
    ways = math.comb(size, half)
    ends = [(index / size) ** half for index in range(size + 1)]
    last = [after - before for before, after in itertools.pairwise(ends)]
    weights = {
        (low, high): ways * last[low] * last[size - 1 - high] for low in range(size) for high in range(low + 1, size)
    }
    for index in range(size):
        apart = ways * last[index] * ends[size - 1 - index]
        weights[index, index] = max(0.0, alone[index] - apart)
    return tuple(weights), tuple(itertools.accumulate(weights.values()))


def _at_least(hits: int, trials: int, share: float) -> float:
    """Return the probability of at least ``hits`` in ``trials``."""
    return sum(
        math.comb(trials, number) * share**number * (1 - share) ** (trials - number)
        for number in range(hits, trials + 1)
    )


LEVEL = 0.95
"""The confidence of an interval. That its lower end is beyond the tolerance is one condition of several."""
RESAMPLES = 1000
PRIOR_SPREAD = 0.01
"""Prior spread of runs of the same code: the standard deviation of the logarithms of their medians."""
UNKNOWN_SPREAD = 0.045
"""The same, of a machine that nothing is known of."""
PRIOR_RUNS = 4
"""The number of runs that the prior counts for."""


@dataclass(frozen=True, slots=True)
class Interval:
    """A ratio of medians, now over then, and the ends of its confidence interval. 1.05 is 5 % longer."""

    ratio: float
    low: float
    high: float

    def __str__(self) -> str:
        return f"{format_ratio(self.ratio - 1)} ({format_ratio(self.low - 1)} to {format_ratio(self.high - 1)})"


# A measurement is judged again after each further sample, partly by the same values.
@lru_cache(maxsize=64)
def ratio_to_runs(rounds: tuple[float, ...], runs: tuple[float, ...]) -> Interval:
    """Return the ratio of this run's median to that of earlier runs, from a bootstrap over rounds and runs.

    Rounds of one run are more alike than runs are, so both sides also vary as runs do: as Student's t, since that spread is
    known from few of them.
    """
    spread = spread_of_runs(runs) * _student(PRIOR_RUNS + len(runs) - 1)
    rng = random.Random(0)  # noqa: S311 - the same samples give the same verdict
    nows, thens = (resampled_medians(side, RESAMPLES, rng) for side in (rounds, runs))
    both = spread * math.sqrt(1 + 1 / len(runs))
    ratios = [math.log(now / then) + rng.gauss(0, both) for now, then in zip(nows, thens, strict=True)]
    return _interval(statistics.median(rounds) / statistics.median(runs), ratios)


def spread_of_runs(runs: Sequence[float]) -> float:
    """Return the standard deviation of the logarithms of runs' medians, drawn towards `PRIOR_SPREAD` where there are few.

    A few say little of it, and are drawn towards more: `UNKNOWN_SPREAD` over their number.
    """
    prior = max(PRIOR_SPREAD, UNKNOWN_SPREAD / len(runs))
    squares = statistics.pvariance(map(math.log, runs)) * len(runs)
    return math.sqrt((PRIOR_RUNS * prior**2 + squares) / (PRIOR_RUNS + len(runs) - 1))


def ratio_of_pairs(pairs: Sequence[tuple[Sequence[float], Sequence[float]]]) -> Interval:
    """Return the ratio of paired runs' medians, the second over the first, from a bootstrap over pairs and their rounds."""
    rng = random.Random(0)  # noqa: S311 - the same samples give the same verdict
    # A bootstrap of n values has (n - 1) / n of their variance.
    widening = _student(len(pairs) - 1) * math.sqrt(len(pairs) / max(1, len(pairs) - 1))
    middle = statistics.fmean(math.log(statistics.median(head) / statistics.median(base)) for base, head in pairs)
    # Each time that a pair is drawn, its rounds are resampled anew.
    drawn = rng.choices(range(len(pairs)), k=len(pairs) * RESAMPLES)
    times = Counter(drawn)
    ratios = []
    for number, (base, head) in enumerate(pairs):
        bases, heads = (resampled_medians(side, times[number], rng) for side in (base, head))
        ratios.append(iter([math.log(after / before) for before, after in zip(bases, heads, strict=True)]))
    logarithms = [next(ratios[number]) for number in drawn]
    means = [sum(logarithms[one : one + len(pairs)]) / len(pairs) for one in range(0, len(drawn), len(pairs))]
    return _interval(math.exp(middle), [middle + (mean - middle) * widening for mean in means])


def _interval(ratio: float, resampled: Sequence[float]) -> Interval:
    """Return the interval of a ratio; ``resampled`` are logarithms of it."""
    logarithms = sorted(resampled)
    lost = math.floor((1 - LEVEL) / 2 * RESAMPLES)
    return Interval(ratio, math.exp(logarithms[lost]), math.exp(logarithms[-1 - lost]))


def _student(freedom: int) -> float:
    """Return the 97.5 % quantile of Student's t over that of the normal distribution (NIST/SEMATECH e-Handbook, 1.3.6.7.2)."""
    table = (12.706, 4.303, 3.182, 2.776, 2.571, 2.447, 2.365, 2.306, 2.262, 2.228, 2.201, 2.179, 2.160, 2.145, 2.131)
    quantile = table[min(max(freedom, 1), len(table)) - 1]
    return quantile / statistics.NormalDist().inv_cdf(0.5 + LEVEL / 2)
