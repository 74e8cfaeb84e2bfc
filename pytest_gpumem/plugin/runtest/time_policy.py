"""Decide which steps in a test are timed, and how often."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

from pytest_gpumem.facts.metrics import METRICS
from pytest_gpumem.judging.gate.baseline import Baseline
from pytest_gpumem.judging.gate.verdict import Outcome
from pytest_gpumem.judging.times.comparison import is_undecided
from pytest_gpumem.torch_support.static_access import reads_any

if TYPE_CHECKING:
    from pytest_gpumem.measuring.timing.sampling import TimeBudget
    from pytest_gpumem.plugin.runtest.judging import JudgedMeasurement, Judging

NOT_TIMED = (
    "it was not timed: its baseline has no time to compare with; --gpumem-update=new adds one, --gpumem-time shows it"
)
_TIMES = frozenset({*(name for name, metric in METRICS.items() if metric.is_timed), "times", "costs", "roi"})
"""The attributes and methods of a `Measurement` for times, or for values computed from times."""


@dataclass(frozen=True, slots=True)
class TimePolicy:
    """The rules for timing steps in a test. They implement ``--gpumem-time``.

    Example:
        A test's baseline has a step time of 10 ms, and the first sample shows 12 ms. So `should_time_again`
        asks for a second sample.
    """

    judging: Judging

    def should_time(self) -> bool:
        """Return whether the steps of the test are timed.

        A gate times no steps if the test's baselines have no times. There are exceptions: a budget limits the time, the
        code of the test or of its fixtures reads times, a hook receives all measurements, or strict mode fails tests
        without a comparison. A baseline has no times if it was recorded without timing, or on a machine that was too busy.
        Ranks time every step, because all ranks have to time the same steps although their baselines may differ.
        """
        judging = self.judging
        settings, budget = judging.settings, judging.measured.budget
        if settings.time is not None:
            return settings.time
        stored = judging.baselines()
        return (
            not settings.baseline
            or settings.strict
            or settings.update is not None
            or judging.ranks.rank is not None
            or bool(judging.config.hook.pytest_gpumem_measurement.get_hookimpls())
            or budget.max_slowdown is not None
            or budget.min_throughput is not None
            or not stored
            or any(isinstance(entry, Baseline) and entry.runs is not None for entry in stored)
            or any(reads_any(function, _TIMES, str(judging.config.rootpath)) for function in self._functions())
        )

    def _functions(self) -> list[object]:
        """Return the test's function and the functions of its fixtures."""
        item = self.judging.item
        definitions_by_name = getattr(getattr(item, "_fixtureinfo", None), "name2fixturedefs", {})
        fixtures = [fixturedef.func for definitions in definitions_by_name.values() for fixturedef in definitions]
        return [getattr(item, "function", None), *fixtures]

    def should_time_again(self, judged: JudgedMeasurement, time_budget: TimeBudget | None) -> bool:
        """Return whether to take another sample of a step's time.

        A second sample is taken if the step became slower or faster, or if the first sample cannot be stored in a baseline.
        If the time budget is spent, it is taken only if the test would otherwise fail. A third sample is taken if one sample
        shows a slowdown and the other is uncertain.

        Args:
            judged: The measurement with its times.
            time_budget: The test's time budget.
        """
        judging, times = self.judging, judged.measurement.times
        assert times is not None, "the caller asks about timed steps only"
        if len(times.samples) > 1:
            return _is_undecided(judged)
        reconsidered = {
            "step_time": {Outcome.REGRESSED, Outcome.IMPROVED, Outcome.UNCERTAIN} if judging.compares else set(),
            "throughput": {Outcome.OVER_BUDGET, Outcome.UNCERTAIN},
        }
        metrics = judged.verdict.metrics
        changed = {metric.outcome for metric in metrics if metric.outcome in reconsidered.get(metric.metric, ())}
        if time_budget is not None and not time_budget.may_sample_again:
            return not changed.isdisjoint(judging.failing_by(judged))
        return bool(changed) or (judging.settings.update is not None and times.best.invalid is not None)


def _is_undecided(judged: JudgedMeasurement) -> bool:
    """Return whether another sample of the step's time may decide an uncertain verdict."""
    verdict, baseline = judged.verdict.of("step_time"), judged.baseline
    if verdict is None or not verdict.allowed or not verdict.baseline or not isinstance(baseline, Baseline):
        return False
    times = judged.measurement.times
    assert times is not None, "the caller asks about timed steps only"
    assert baseline.runs is not None, "a judged step time has a baseline with times"
    return is_undecided(times.samples, baseline.runs, verdict.allowed / verdict.baseline)
