"""Confidence intervals for ratios between times, from bootstraps over rounds and runs. Few runs widen an interval."""

from __future__ import annotations

import itertools
import math
import random
import statistics
from collections import Counter
from dataclasses import dataclass
from functools import lru_cache
from typing import TYPE_CHECKING

from pytest_gpumem.base.units import format_ratio

if TYPE_CHECKING:
    from collections.abc import Sequence


MOST_TABULATED = 100
"""Up to this many values, medians come from a table with probabilities, which grows quadratically. Above, samples are drawn."""


def resampled_medians(values: Sequence[float], count: int, rng: random.Random) -> list[float]:
    """Draw ``count`` samples with replacement, each with as many values as ``values``, and return the samples' medians."""
    size = len(values)
    if size > MOST_TABULATED:
        return [statistics.median(rng.choices(values, k=size)) for _ in range(count)]
    pairs, cumulative = _middles(size)
    ordered = sorted(values)
    return rng.choices([(ordered[low] + ordered[high]) / 2 for low, high in pairs], cum_weights=cumulative, k=count)


@lru_cache(maxsize=MOST_TABULATED)
def _middles(size: int) -> tuple[tuple[tuple[int, int], ...], tuple[float, ...]]:
    """Return the possible pairs of middle values in a sample, and the cumulative probabilities of these pairs.

    A sample's median is the mean of its middle pair. A pair consists of two indices into the ordered values. If ``size`` is
    odd, both indices are equal. The probabilities follow from order statistics (David and Nagaraja,
    Order Statistics, 2.1 and 2.3): the probability that k sampled values are among the first i of n values equals the
    probability of k successes in n trials that each succeed with probability i/n.
    """
    half = (size + 1) // 2
    at_most = [_probability_of_at_least(half, size, number / size) for number in range(size + 1)]
    alone = [after - before for before, after in itertools.pairwise(at_most)]
    if size % 2:
        return tuple((index, index) for index in range(size)), tuple(itertools.accumulate(alone))
    # The pair consists of the last value in the sample's lower half, and the first value in its upper half.
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


def _probability_of_at_least(hits: int, trials: int, share: float) -> float:
    """Return the probability of at least ``hits`` successes in ``trials`` that each succeed with probability ``share``."""
    return sum(
        math.comb(trials, number) * share**number * (1 - share) ** (trials - number)
        for number in range(hits, trials + 1)
    )


LEVEL = 0.95
"""The confidence level of an interval. A verdict also depends on other conditions, such as interference."""
RESAMPLES = 1000
PRIOR_SPREAD = 0.01
"""The assumed (prior) spread between runs with the same code: the standard deviation of the logarithms of their medians."""
UNKNOWN_SPREAD = 0.045
"""The assumed spread if only a single run is known."""
PRIOR_RUNS = 4
"""The assumed spread has the same weight as this many runs."""


@dataclass(frozen=True, slots=True)
class Interval:
    """A ratio between medians (current / earlier) with its confidence interval. A ratio of 1.05 means 5 % more time."""

    ratio: float
    low: float
    high: float

    def __str__(self) -> str:
        return f"{format_ratio(self.ratio - 1)} ({format_ratio(self.low - 1)} to {format_ratio(self.high - 1)})"


# Results are cached, because a measurement is judged again after each further sample, often with the same rounds and runs.
@lru_cache(maxsize=64)
def ratio_to_runs(rounds: tuple[float, ...], runs: tuple[float, ...]) -> Interval:
    """Return the ratio between this run's median and the earlier runs' median, from a bootstrap over rounds and runs.

    Rounds in the same run differ less than rounds in different runs. So the bootstrap also varies both medians by the spread
    between runs. This spread is widened by Student's t, because it is known from only a few runs.
    """
    spread = spread_of_runs(runs) * _student(PRIOR_RUNS + len(runs) - 1)
    rng = random.Random(0)  # noqa: S311 - a fixed seed, so the same samples give the same verdict
    current_medians, earlier_medians = (resampled_medians(side, RESAMPLES, rng) for side in (rounds, runs))
    deviation = spread * math.sqrt(1 + 1 / len(runs))
    ratios = [
        math.log(current / earlier) + rng.gauss(0, deviation)
        for current, earlier in zip(current_medians, earlier_medians, strict=True)
    ]
    return _interval(statistics.median(rounds) / statistics.median(runs), ratios)


def spread_of_runs(runs: Sequence[float]) -> float:
    """Return the standard deviation of the logarithms of the runs' medians, combined with an assumed spread.

    The assumed spread is `PRIOR_SPREAD`. With up to four runs, it is larger: `UNKNOWN_SPREAD` divided by the number of runs.

    Example:
        A single run has no spread, so the result is the assumed spread: sqrt(4 * 0.045**2 / 4) = 0.045.
    """
    prior = max(PRIOR_SPREAD, UNKNOWN_SPREAD / len(runs))
    squares = statistics.pvariance(map(math.log, runs)) * len(runs)
    return math.sqrt((PRIOR_RUNS * prior**2 + squares) / (PRIOR_RUNS + len(runs) - 1))


def ratio_of_pairs(pairs: Sequence[tuple[Sequence[float], Sequence[float]]]) -> Interval:
    """Return the ratio (second / first) between medians in paired runs, from a bootstrap over pairs and their rounds."""
    rng = random.Random(0)  # noqa: S311 - a fixed seed, so the same samples give the same verdict
    # The means in a bootstrap over n values have only (n - 1) / n of the true variance, so widen them.
    widening = _student(len(pairs) - 1) * math.sqrt(len(pairs) / max(1, len(pairs) - 1))
    middle = statistics.fmean(math.log(statistics.median(head) / statistics.median(base)) for base, head in pairs)
    # A pair may be drawn several times. Its rounds are resampled for each draw.
    drawn = rng.choices(range(len(pairs)), k=len(pairs) * RESAMPLES)
    times = Counter(drawn)
    ratios = []
    for number, (base, head) in enumerate(pairs):
        bases, heads = (resampled_medians(side, times[number], rng) for side in (base, head))
        ratios.append(iter([math.log(after / before) for before, after in zip(bases, heads, strict=True)]))
    logarithms = [next(ratios[number]) for number in drawn]
    means = [sum(logarithms[start : start + len(pairs)]) / len(pairs) for start in range(0, len(drawn), len(pairs))]
    return _interval(math.exp(middle), [middle + (mean - middle) * widening for mean in means])


def _interval(ratio: float, resampled: Sequence[float]) -> Interval:
    """Return a ratio with its confidence interval, from the logarithms of resampled ratios."""
    logarithms = sorted(resampled)
    lost = math.floor((1 - LEVEL) / 2 * RESAMPLES)
    return Interval(ratio, math.exp(logarithms[lost]), math.exp(logarithms[-1 - lost]))


def _student(freedom: int) -> float:
    """Return the 97.5 % quantile of Student's t distribution, divided by the same quantile of the normal distribution.

    ``freedom`` is the number of degrees of freedom. The table comes from the NIST/SEMATECH e-Handbook, 1.3.6.7.2.
    """
    table = (12.706, 4.303, 3.182, 2.776, 2.571, 2.447, 2.365, 2.306, 2.262, 2.228, 2.201, 2.179, 2.160, 2.145, 2.131)
    quantile = table[min(max(freedom, 1), len(table)) - 1]
    return quantile / statistics.NormalDist().inv_cdf(0.5 + LEVEL / 2)
