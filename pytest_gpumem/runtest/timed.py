"""Which tests have their steps timed: those whose times are compared, recorded, shown or read."""

from __future__ import annotations

from typing import TYPE_CHECKING

from pytest_gpumem.config.marker import TIMED_LIMITS, sets_itself
from pytest_gpumem.gate.baseline import Baseline
from pytest_gpumem.metrics import METRICS, RealMetric
from pytest_gpumem.runtest.explaining import reads_any

if TYPE_CHECKING:
    from pytest_gpumem.runtest.judging import Judging

NOT_TIMED = "it was not timed, as its baseline has no time: --gpumem-update=all adds one, --gpumem-time only shows it"
_TIMES = frozenset({*(name for name, metric in METRICS.items() if isinstance(metric, RealMetric)), "times", "roi"})
"""Attributes of a `Measurement` that are times, or made of them."""


def should_time(judging: Judging, slug: str) -> bool:
    """Return whether the steps of a test are timed.

    A gate has no use for times where the baselines of the device called ``slug`` have none, unless the test or a hook reads
    them, its own marker limits them, or what is not compared fails. Ranks time the same steps, whatever each has in the store.
    """
    settings, item = judging.settings, judging.item
    if settings.time is not None:
        return settings.time
    return (
        not settings.baseline
        or settings.strict
        or settings.update is not None
        or judging.ranks.rank is not None
        or bool(judging.config.hook.pytest_gpumem_measurement.get_hookimpls())
        or any(sets_itself(item, limit) for limit in TIMED_LIMITS)
        or judging.measured.budget.min_throughput is not None
        or reads_any(getattr(item, "function", None), _TIMES)
        or any(isinstance(one, Baseline) and one.runs is not None for one in judging.stored_for(slug))
    )
