"""Medians of resampled values (the bootstrap), drawn from their own distribution instead of from samples. Pure."""

from __future__ import annotations

import itertools
import math
import statistics
from functools import lru_cache
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    import random
    from collections.abc import Sequence

MOST_TABULATED = 100
"""The tables grow with the square of the number of values. More of them are resampled one by one."""


def resampled_medians(values: Sequence[float], count: int, chance: random.Random) -> list[float]:
    """Return the medians of ``count`` samples with replacement of ``values``, as many values in each."""
    size = len(values)
    if size > MOST_TABULATED:
        return [statistics.median(chance.choices(values, k=size)) for _ in range(count)]
    places, cumulative = _middles(size)
    ordered = sorted(values)
    return chance.choices([(ordered[low] + ordered[high]) / 2 for low, high in places], cum_weights=cumulative, k=count)


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
        return tuple((place, place) for place in range(size)), tuple(itertools.accumulate(alone))
    # The sample's lower half ends with one value, and its upper half begins with a later one.
    ways = math.comb(size, half)
    ends = [(place / size) ** half for place in range(size + 1)]
    last = [after - before for before, after in itertools.pairwise(ends)]
    weights = {
        (low, high): ways * last[low] * last[size - 1 - high] for low in range(size) for high in range(low + 1, size)
    }
    for place in range(size):
        apart = ways * last[place] * ends[size - 1 - place]
        weights[place, place] = max(0.0, alone[place] - apart)
    return tuple(weights), tuple(itertools.accumulate(weights.values()))


def _at_least(hits: int, trials: int, share: float) -> float:
    """Return the probability of at least ``hits`` in ``trials``."""
    return sum(
        math.comb(trials, number) * share**number * (1 - share) ** (trials - number)
        for number in range(hits, trials + 1)
    )
