"""That medians are drawn as often as resampling gives them."""

from __future__ import annotations

import itertools
import random
import statistics
from collections import Counter

import pytest

from pytest_gpumem.judging.times.intervals import MOST_TABULATED, resampled_medians


@pytest.mark.parametrize("size", [1, 2, 3, 4, 5, 6])
def test_medians_are_drawn_as_often_as_all_samples_have_them(size: int) -> None:
    # No two pairs of these have the same middle.
    values = [2.0**number for number in range(size)]
    samples = Counter(statistics.median(sample) for sample in itertools.product(values, repeat=size))
    draws = 20_000
    drawn = Counter(resampled_medians(values[::-1], draws, random.Random(0)))
    assert set(drawn) <= set(samples)
    for median, count in samples.items():
        share = count / size**size
        assert drawn[median] / draws == pytest.approx(share, abs=5 * (share * (1 - share) / draws) ** 0.5)


@pytest.mark.parametrize("size", [12, 47, MOST_TABULATED, MOST_TABULATED + 1])
def test_many_values_have_medians_that_spread_as_those_of_samples(size: int) -> None:
    chance = random.Random(size)
    values = [chance.lognormvariate(0, 0.1) for _ in range(size)]
    drawn = resampled_medians(values, 2000, chance)
    sampled = [statistics.median(chance.choices(values, k=size)) for _ in range(2000)]
    assert statistics.fmean(drawn) == pytest.approx(statistics.fmean(sampled), abs=0.1 * statistics.stdev(sampled))
    assert statistics.stdev(drawn) == pytest.approx(statistics.stdev(sampled), rel=0.1)


def test_the_same_chance_draws_the_same() -> None:
    assert len({tuple(resampled_medians([3.0, 1.0, 2.0, 5.0], 10, random.Random(7))) for _ in range(2)}) == 1
