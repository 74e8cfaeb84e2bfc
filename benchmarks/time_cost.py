"""How long timing takes until there is a verdict, and how well the time of a step is known then."""

from __future__ import annotations

import statistics
from dataclasses import dataclass
from typing import TYPE_CHECKING

from time_peers import rounds_of_pytest_benchmark, width_of_mean
from time_replay import Timed
from time_rules import judged

from pytest_gpumem.values.times import interval_of_median

if TYPE_CHECKING:
    from collections.abc import Sequence

    from time_file import Series
    from time_rules import Trial

FEWEST = 6
"""Rounds from which on the interval of a median is one of 95 %."""


@dataclass(frozen=True, slots=True)
class Cost:
    """Of one run of a step: seconds, and half the width of the 95 % interval as a ratio. ``None``: never in this series."""

    ours: float
    """Until the verdict: rounds, readings, and the pause and the re-measurement where one was asked for."""
    theirs: float
    our_width: float
    their_width: float
    ours_to_their_width: float | None
    theirs_to_our_width: float | None


def cost_of(trial: Trial) -> Cost:
    """What the run that is judged costs ours, and pytest-benchmark with its defaults."""
    series = trial.now
    timed = Timed(series, trial.cores)
    _, samples = judged(trial)
    if len(samples) > 1:
        _ = timed.again
    rounds = rounds_of_pytest_benchmark(series)
    our_width, their_width = width_of_median(timed.first.seconds), width_of_mean(rounds)
    return Cost(
        timed.seconds,
        _seconds(series, len(rounds)),
        our_width,
        their_width,
        _until(series, lambda seconds: width_of_median(seconds) <= their_width),
        _until(series, lambda seconds: width_of_mean(seconds) <= our_width),
    )


def width_of_median(rounds: Sequence[float]) -> float:
    """Half the 95 % confidence interval of the median, as a ratio to it."""
    if len(rounds) < FEWEST:
        return float("inf")
    low, high = interval_of_median(rounds, 0.95)
    return (high - low) / 2 / statistics.median(rounds)


def _until(series: Series, known) -> float | None:  # type: ignore[no-untyped-def] # noqa: ANN001
    for count in range(FEWEST, len(series.seconds) + 1):
        if known(series.seconds[:count]):
            return _seconds(series, count)
    return None


def _seconds(series: Series, rounds: int) -> float:
    return sum(one * (1 if number == 0 else series.steps) for number, one in enumerate(series.seconds[:rounds]))
