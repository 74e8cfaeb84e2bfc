"""Which tests have their steps timed: those whose times are compared, recorded, shown or read."""

from __future__ import annotations

from typing import TYPE_CHECKING

from pytest_gpumem.gate.baseline import Baseline
from pytest_gpumem.gate.speed import MACHINE
from pytest_gpumem.metrics import METRICS, RealMetric
from pytest_gpumem.runtest.explaining import reads_any

if TYPE_CHECKING:
    from pytest_gpumem.gate.baseline import NoBaseline
    from pytest_gpumem.measurement import Environment
    from pytest_gpumem.runtest.judging import Judging

NOT_TIMED = (
    "it was not timed, as its baseline has no time of this machine: --gpumem-update adds one, --gpumem-time shows it"
)
_TIMES = frozenset({*(name for name, metric in METRICS.items() if isinstance(metric, RealMetric)), "times", "roi"})
"""Attributes of a `Measurement` that are times, or made of them."""


def should_time(judging: Judging, environment: Environment) -> bool:
    """Return whether the steps of a test are timed.

    A gate has no use for times where the baselines have none of this machine, unless a budget limits them, the test or a hook
    reads them, or what is not compared fails. Ranks time the same steps, whatever each has in the store.
    """
    settings, budget = judging.settings, judging.measured.budget
    if settings.time is not None:
        return settings.time
    return (
        not settings.baseline
        or settings.strict
        or settings.update is not None
        or judging.ranks.rank is not None
        or bool(judging.config.hook.pytest_gpumem_measurement.get_hookimpls())
        or budget.max_slowdown is not None
        or budget.min_throughput is not None
        or reads_any(getattr(judging.item, "function", None), _TIMES)
        or any(_has_times_of(environment, one) for one in judging.stored_for(environment.slug))
    )


def _has_times_of(environment: Environment, baseline: Baseline | NoBaseline) -> bool:
    if not isinstance(baseline, Baseline) or baseline.runs is None:
        return False
    return baseline.environment.details.get(MACHINE) == environment.details.get(MACHINE)
