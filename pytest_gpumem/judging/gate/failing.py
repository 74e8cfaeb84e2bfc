"""Find the outcomes and the metrics because of which a test fails. All functions are pure."""

from __future__ import annotations

from typing import TYPE_CHECKING

from pytest_gpumem.facts.metrics import METRICS, Kind
from pytest_gpumem.facts.values.unknown_reads import decided_a_branch
from pytest_gpumem.judging.gate.verdict import ALWAYS_FAILING, FAILING, PASSING, Outcome

if TYPE_CHECKING:
    from collections.abc import Collection

    from pytest_gpumem.judging.gate.verdict import TestVerdict, Verdict


def failing_outcomes(
    verdict: TestVerdict, *, strict: bool, compares: bool, accepts: frozenset[Outcome]
) -> frozenset[Outcome]:
    """Return the outcomes because of which the gate fails a test. The result is empty if the test already failed by itself.

    Args:
        verdict: The verdict on the test.
        strict: Whether a test also fails if a figure was not compared (``--gpumem-strict``).
        compares: Whether a regression is a failure (``--gpumem-baseline``). Without this option, an update compares only to
            choose the figures to write.
        accepts: The outcomes whose figures this session writes into the store. These outcomes do not fail the test.
    """
    if verdict.failed_by_itself:
        return frozenset()
    outcomes = {metric.outcome for measured in verdict.verdicts for metric in measured.metrics}
    if verdict.unmeasured:
        outcomes.add(Outcome.UNMEASURED)
    if verdict.missing:
        outcomes.add(Outcome.MISSING)
    if not verdict.verdicts:
        # An update accepts `missing` by removing baselines. It does not remove the baselines of a test that measured nothing,
        # so `missing` still fails such a test.
        accepts -= {Outcome.MISSING}
    if strict:
        failing = outcomes - PASSING
        if not verdict.gated and not failing:
            failing = {Outcome.RECORDED}
        is_branch_decided = any(decided_a_branch(measured.measurement.notes) for measured in verdict.verdicts)
        if is_branch_decided or (verdict.unmeasured_processes and not verdict.unmeasured):
            failing |= {Outcome.UNCERTAIN}
    else:
        failing = outcomes & (FAILING if compares else ALWAYS_FAILING)
    return frozenset(failing - accepts)


def failing_metrics(verdict: Verdict, failing: Collection[object], kind: Kind = "memory") -> list[str]:
    """Return the metrics of a kind, such as ``"memory"``, whose outcome is in ``failing``."""
    return [
        metric.metric for metric in verdict.metrics if metric.outcome in failing and METRICS[metric.metric].kind == kind
    ]
