"""Tests that may have been renamed: a new measurement beside unused baselines of the same step, batch and device. Pure."""

from __future__ import annotations

from difflib import SequenceMatcher
from typing import TYPE_CHECKING

from pytest_gpumem.gate.baseline import Budget
from pytest_gpumem.gate.judge import judge
from pytest_gpumem.gate.verdict import FormerTest, Outcome
from pytest_gpumem.metrics import METRICS, WHOLE

if TYPE_CHECKING:
    from collections.abc import Iterable, Mapping

    from pytest_gpumem.gate.baseline import Baseline, Key
    from pytest_gpumem.gate.verdict import MetricVerdict
    from pytest_gpumem.measurement import Measurement
    from pytest_gpumem.metrics import Tolerance

MOST_CANDIDATES = 20
"""The number of candidates kept for each measurement: those with the nearest names."""


def may_be_renamed(key: Key, measurement: Measurement, old: Key, entry: Baseline) -> bool:
    """Return whether ``entry``, the unused baseline of ``old``, may be that of the test of ``key``.

    It was measured under the same name, with the same step, config and batch. The test is in the same file, or has the same
    name in another file. For example, ``tests/test_gpt.py::test_train`` may have been ``test_step`` there, or
    ``tests/test_old.py::test_train``.
    """
    new, before = measurement.workload, entry.workload
    alike = (new.step, new.config, new.batch) == (before.step, before.config, before.batch)
    return alike and key.name == old.name and (key.file == old.file or key.test == old.test)


def candidates_of(
    key: Key, measurement: Measurement, unused: Iterable[tuple[Key, Baseline]], tolerances: Mapping[str, Tolerance]
) -> tuple[FormerTest, ...]:
    """Return the possible former names of a new test, the nearest first.

    Args:
        key: The test of the measurement, and its name.
        measurement: What was measured.
        unused: Baselines of deleted tests, on the same device.
        tolerances: The tolerances of the test, by metric.
    """
    alike = [(old, entry) for old, entry in unused if may_be_renamed(key, measurement, old, entry)]
    alike.sort(key=lambda pair: (-likeness(pair[0].test, key.test), pair[0]))
    return tuple(
        FormerTest(old.file, old.test, _not_alike(measurement, entry, tolerances))
        for old, entry in alike[:MOST_CANDIDATES]
    )


def _not_alike(
    measurement: Measurement, entry: Baseline, tolerances: Mapping[str, Tolerance]
) -> tuple[MetricVerdict, ...]:
    judged = judge(measurement, Budget(), entry, tolerances).metrics
    whole = [
        one for one in judged if METRICS[one.metric].unit in WHOLE and one.outcome not in (Outcome.OK, Outcome.RECORDED)
    ]
    return tuple(sorted(whole, key=lambda one: -one.outcome.importance))


def likeness(old: str, new: str) -> float:
    """Return how much two names of tests have in common, from 0 to 1 (equal)."""
    return SequenceMatcher(None, old, new, autojunk=False).ratio()
