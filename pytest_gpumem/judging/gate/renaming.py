"""Find a new test's former names, from unused baselines with the same step, config, batch and device. Pure."""

from __future__ import annotations

from difflib import SequenceMatcher
from typing import TYPE_CHECKING

from pytest_gpumem.facts.metrics import METRICS
from pytest_gpumem.judging.gate.baseline import Budget
from pytest_gpumem.judging.gate.judge import judge
from pytest_gpumem.judging.gate.verdict import FormerTest, Outcome

if TYPE_CHECKING:
    from collections.abc import Iterable, Mapping

    from pytest_gpumem.facts.measurement import Measurement
    from pytest_gpumem.facts.metrics import Tolerance
    from pytest_gpumem.judging.gate.baseline import Baseline, Key
    from pytest_gpumem.judging.gate.verdict import MetricVerdict

MOST_CANDIDATES = 20
"""A measurement has at most this many former tests. If there are more, those with the most similar names are listed."""


def may_be_renamed(key: Key, measurement: Measurement, old: Key, entry: Baseline) -> bool:
    """Return whether a new test may be a deleted test under another name.

    The new measurement and the unused baseline must have the same name, step, config and batch. The two tests must be in the
    same file, or have the same name in different files. For example, ``tests/test_gpt.py::test_train`` may have been
    ``tests/test_gpt.py::test_step`` or ``tests/test_old.py::test_train``.

    Args:
        key: The key of the new measurement.
        measurement: The new measurement.
        old: The key of the deleted test's unused baseline.
        entry: The unused baseline.
    """
    workload, old_workload = measurement.workload, entry.workload
    alike = (workload.step, workload.config, workload.batch) == (
        old_workload.step,
        old_workload.config,
        old_workload.batch,
    )
    return alike and key.name == old.name and (key.file == old.file or key.test == old.test)


def candidates_of(
    key: Key, measurement: Measurement, unused: Iterable[tuple[Key, Baseline]], tolerances: Mapping[str, Tolerance]
) -> tuple[FormerTest, ...]:
    """Return the possible former names of a new test, the most similar names first.

    Args:
        key: The key of the new measurement.
        measurement: The new measurement.
        unused: The baselines of deleted tests on the same device.
        tolerances: The tolerances of the test, by metric.
    """
    candidates = [(old, entry) for old, entry in unused if may_be_renamed(key, measurement, old, entry)]
    candidates.sort(key=lambda pair: (-likeness(pair[0].test, key.test), pair[0]))
    return tuple(
        FormerTest(old.file, old.test, _differing_metrics(measurement, entry, tolerances))
        for old, entry in candidates[:MOST_CANDIDATES]
    )


def _differing_metrics(
    measurement: Measurement, entry: Baseline, tolerances: Mapping[str, Tolerance]
) -> tuple[MetricVerdict, ...]:
    """Return the verdicts on bytes, counts and ratios that differ from the unused baseline, the most serious first."""
    metrics = judge(measurement, Budget(), entry, tolerances).metrics
    differing = [
        metric
        for metric in metrics
        if not METRICS[metric.metric].is_timed and metric.outcome not in (Outcome.OK, Outcome.RECORDED)
    ]
    return tuple(sorted(differing, key=lambda metric: -metric.outcome.importance))


def likeness(old: str, new: str) -> float:
    """Return the similarity of two test names, from 0 (nothing in common) to 1 (equal)."""
    return SequenceMatcher(None, old, new, autojunk=False).ratio()
