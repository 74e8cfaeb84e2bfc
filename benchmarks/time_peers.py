"""The rules of pytest-benchmark and asv, on the samples that ours is judged on: their own code, imported."""

from __future__ import annotations

import statistics
from dataclasses import dataclass
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

    from time_file import Series
    from time_rules import Outcome, Trial

INSTALL = "pip install pytest-benchmark asv"
MEAN_LIMIT = "mean:5%"
ASV_FACTOR = 1.1
"""The default of ``asv compare`` and ``asv continuous``."""
MAX_TIME, MIN_ROUNDS = 1.0, 5
"""Defaults of pytest-benchmark: it times rounds of one step for so many seconds, and at least so many rounds."""
ASV_PROCESSES, ASV_REPEATS = 2, 5
"""Defaults of asv: two processes, with five samples of 10 ms or more each."""


def missing() -> str | None:
    """Which peer cannot be imported, as a sentence that says how to install it."""
    lacking = []
    try:
        import pytest_benchmark.utils  # noqa: F401
    except ImportError as error:
        lacking.append(f"pytest-benchmark ({error})")
    try:
        import asv.commands.compare  # noqa: F401
    except ImportError as error:
        lacking.append(f"asv ({error})")
    return f"the peers' rules are missing: {' and '.join(lacking)}; {INSTALL}" if lacking else None


def rounds_of_pytest_benchmark(series: Series) -> Sequence[float]:
    """The rounds that it would have taken with its defaults: as many as fill a second, its calibration left out."""
    wanted, spent = 0, 0.0
    for number, one in enumerate(series.seconds):
        if wanted >= MIN_ROUNDS and spent >= MAX_TIME:
            break
        wanted += 1
        spent += one * (1 if number == 0 else series.steps)
    return series.seconds[:wanted]


def pytest_benchmark_rule() -> Callable[[Trial], Outcome]:
    """``--benchmark-compare --benchmark-compare-fail=mean:5%``, against the latest run."""
    from pytest_benchmark.stats import Stats
    from pytest_benchmark.utils import parse_compare_fail

    check = parse_compare_fail(MEAN_LIMIT)

    def stats_of(series: Series) -> dict[str, float]:
        stats = Stats()
        for one in rounds_of_pytest_benchmark(series):
            stats.update(one)
        return {"mean": stats.mean}

    def rule(trial: Trial) -> Outcome:
        return "fails" if check.fails(stats_of(trial.now), stats_of(trial.baseline[-1])) else "passes"

    return rule


@dataclass(frozen=True, slots=True)
class _AsvResult:
    value: float
    stats: dict[str, float]
    samples: list[float]


def asv_rule() -> Callable[[Trial], Outcome]:
    """``asv compare``, of two processes each: worse by the factor, and significantly so by Mann and Whitney's test.

    What is beyond the factor and not significant it marks with ``~``, and passes.
    """
    from asv.commands.compare import _is_result_better
    from asv_runner.statistics import compute_stats

    def result_of(processes: Sequence[Series]) -> _AsvResult:
        samples = [one for series in processes for one in series.seconds[1 : 1 + ASV_REPEATS]]
        value, stats = compute_stats(samples, processes[0].steps)
        return _AsvResult(value, stats, samples)

    def rule(trial: Trial) -> Outcome:
        before, now = result_of(trial.baseline[-ASV_PROCESSES:]), result_of((trial.now, trial.next))
        worse = _is_result_better(
            before.value, now.value, (before.stats, before.samples), (now.stats, now.samples), ASV_FACTOR
        )
        return "fails" if worse else "passes"

    return rule


def width_of_mean(rounds: Sequence[float]) -> float:
    """Half the 95 % confidence interval of the mean, as a ratio to it; what pytest-benchmark's own precision is."""
    if len(rounds) < 2:
        return float("inf")
    margin = statistics.NormalDist().inv_cdf(0.975) * statistics.stdev(rounds) / len(rounds) ** 0.5
    return margin / statistics.fmean(rounds)
