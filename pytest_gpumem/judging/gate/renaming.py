"""Tests that may have been renamed: unused baselines with the same step, batch and device as a new measurement. Pure."""

from __future__ import annotations

from difflib import SequenceMatcher
from typing import TYPE_CHECKING

from pytest_gpumem.facts.metrics import METRICS, WHOLE
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
"""The most former tests for a measurement. The tests with the nearest names are used."""


def may_be_renamed(key: Key, measurement: Measurement, old: Key, entry: Baseline) -> bool:
    """Return whether the test of ``old`` may now be the test of ``key``.

    Both measurements have the same name, step, config and batch. The tests are in the same file, or they have the same name
    in different files. For example, ``tests/test_gpt.py::test_train`` may have been ``test_step`` in this file, or
    ``tests/test_old.py::test_train``.

    Args:
        key: The key of the new measurement.
        measurement: The new measurement.
        old: The key of the unused baseline.
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
    """Return the possible former names of a new test, the nearest first.

    Args:
        key: The key of the new measurement.
        measurement: The new measurement.
        unused: Baselines of deleted tests on the same device.
        tolerances: The tolerances of the test, by metric.
    """
    candidates = [(old, entry) for old, entry in unused if may_be_renamed(key, measurement, old, entry)]
    candidates.sort(key=lambda pair: (-likeness(pair[0].test, key.test), pair[0]))
    return tuple(
        FormerTest(old.file, old.test, _not_alike(measurement, entry, tolerances))
        for old, entry in candidates[:MOST_CANDIDATES]
    )


def _not_alike(
    measurement: Measurement, entry: Baseline, tolerances: Mapping[str, Tolerance]
) -> tuple[MetricVerdict, ...]:
    metrics = judge(measurement, Budget(), entry, tolerances).metrics
    differing = [
        metric
        for metric in metrics
        if METRICS[metric.metric].unit in WHOLE and metric.outcome not in (Outcome.OK, Outcome.RECORDED)
    ]
    return tuple(sorted(differing, key=lambda metric: -metric.outcome.importance))


def likeness(old: str, new: str) -> float:
    """Return the similarity of two test names, from 0 to 1 (equal)."""
    return SequenceMatcher(None, old, new, autojunk=False).ratio()
