"""From pairs of runs to a report: times by pairs, bytes and counts by the judge. Pure."""

from __future__ import annotations

import statistics
from dataclasses import replace
from typing import TYPE_CHECKING

from pytest_gpumem.ab.report import STEP_TIME, Figure, LeftOut, Report, Row
from pytest_gpumem.gate.baseline import baseline_of
from pytest_gpumem.gate.budget import Budget
from pytest_gpumem.gate.judge import judge
from pytest_gpumem.gate.verdict import Outcome
from pytest_gpumem.metrics import METRICS, WHOLE
from pytest_gpumem.reports.values import shown
from pytest_gpumem.timing.comparison import compare_pairs

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence

    from pytest_gpumem.ab.report import Revision
    from pytest_gpumem.ab.runs import Key, Run
    from pytest_gpumem.gate.verdict import TestVerdict
    from pytest_gpumem.measurement import Measurement
    from pytest_gpumem.metrics import Tolerance
    from pytest_gpumem.timing.comparison import Comparison

CHANCE = frozenset({"peak_reserved"})
"""Metrics that differ from run to run without anybody's doing, within their tolerance."""

_SPEED: dict[str, Outcome] = {
    "slower": Outcome.REGRESSED,
    "faster": Outcome.IMPROVED,
    "uncertain": Outcome.UNCERTAIN,
    "not slower": Outcome.OK,
}


def compare_runs(
    pairs: Sequence[tuple[Run, Run]],
    base: Revision,
    head: Revision,
    tolerance: float,
    tolerances: Mapping[str, Tolerance],
) -> Report:
    """The report on ``pairs`` of runs (base, head). ``tolerance`` is for times, ``tolerances`` for everything else."""
    rows: list[Row] = []
    left_out: list[LeftOut] = []
    for key in sorted({key for pair in pairs for run in pair for key in run.tests}):
        bases = [one.tests.get(key) for one, _ in pairs]
        heads = [one.tests.get(key) for _, one in pairs]
        reason = _why_not(bases, heads)
        if reason is not None:
            title = "::".join(key)
            left_out.append(LeftOut(title, reason, broke=_is_measured(bases) and _fails(heads) and not _fails(bases)))
            continue
        compared, others = _compare_test(key, bases, heads, tolerance, tolerances)
        rows += compared
        left_out += others
    return Report(base, head, len(pairs), tolerance, tuple(rows), tuple(left_out))


def _is_measured(verdicts: Sequence[TestVerdict | None]) -> bool:
    return any(_figures(verdict) for verdict in verdicts)


def _figures(verdict: TestVerdict | None) -> dict[str, Measurement]:
    """The measurements of a test in one run, by name."""
    if verdict is None or verdict.unmeasured:
        return {}
    return {one.measurement.name: one.measurement for one in verdict.verdicts}


def _fails(verdicts: Sequence[TestVerdict | None]) -> bool:
    """Whether the test failed for reasons of its own whenever it ran."""
    ran = [verdict for verdict in verdicts if verdict is not None]
    return bool(ran) and all(verdict.failed_by_itself for verdict in ran)


def _why_not(bases: Sequence[TestVerdict | None], heads: Sequence[TestVerdict | None]) -> str | None:
    """Why a test cannot be compared, as a clause; ``None`` when both sides measured it."""
    if all(verdict is None for verdict in heads):
        return "it ran in base only"
    if all(verdict is None for verdict in bases):
        return "it ran in head only"
    said = {"base": _unmeasured(bases), "head": _unmeasured(heads)}
    reasons = {side: reason for side, reason in said.items() if reason is not None}
    if not reasons:
        return None
    if len(set(reasons.values())) == 1 and len(reasons) == 2:
        return f"{reasons['head']}, in base and in head"
    return "; ".join(f"{reason}, in {side}" for side, reason in reasons.items())


def _unmeasured(verdicts: Sequence[TestVerdict | None]) -> str | None:
    """Why a side measured nothing in any run; ``None`` when it did."""
    if _is_measured(verdicts):
        return None
    last = next(verdict for verdict in reversed(verdicts) if verdict is not None)
    return last.unmeasured or "it asserts relations only"


def _compare_test(
    key: Key,
    bases: Sequence[TestVerdict | None],
    heads: Sequence[TestVerdict | None],
    tolerance: float,
    tolerances: Mapping[str, Tolerance],
) -> tuple[list[Row], list[LeftOut]]:
    runs = [(_figures(base), _figures(head)) for base, head in zip(bases, heads, strict=True)]
    names = list(dict.fromkeys(name for pair in runs for side in pair for name in side))
    rows, left_out = [], []
    for name in names:
        title = f"{'::'.join(key)} ({name})"
        mine = [base[name] for base, _ in runs if name in base]
        theirs = [head[name] for _, head in runs if name in head]
        pairs = [(base[name], head[name]) for base, head in runs if name in base and name in head]
        reason = _not_comparable(mine, theirs)
        if reason is None and not pairs:
            reason = "no pair of neighbouring runs measured it"
        if reason is not None:
            left_out.append(LeftOut(title if len(names) > 1 else "::".join(key), reason))
            continue
        another = _another_workload(mine, theirs)
        if another is None:
            figures, notes = _compare_measurement(mine, theirs, pairs, tolerance, tolerances)
        else:
            # The judge lets nothing in bytes grow with the workload; what else another one does cannot be compared.
            figures, notes = _exact_figures(mine, theirs, tolerances)
            notes.insert(0, another)
        if not figures and another is not None:
            left_out.append(LeftOut(title if len(names) > 1 else "::".join(key), another))
            continue
        notes += [
            f"measured in {len(there)} of {len(runs)} runs of {side}"
            for side, there in (("base", mine), ("head", theirs))
            if len(there) < len(runs)
        ]
        rows.append(Row(*key, name, tuple(figures), tuple(notes), only_one=len(names) == 1))
    return rows, left_out


def _not_comparable(bases: Sequence[Measurement], heads: Sequence[Measurement]) -> str | None:
    if not heads:
        return "it is measured in base only"
    if not bases:
        return "it is measured in head only"
    base, head = bases[-1], heads[-1]
    if base.environment.slug != head.environment.slug:
        return f"it was measured on {base.environment.device} in base, on {head.environment.device} in head"
    return None


def _another_workload(bases: Sequence[Measurement], heads: Sequence[Measurement]) -> str | None:
    differences = heads[-1].workload.differences(bases[-1].workload)
    return f"another workload: {'; '.join(differences)}" if differences else None


def _compare_measurement(
    bases: Sequence[Measurement],
    heads: Sequence[Measurement],
    pairs: Sequence[tuple[Measurement, Measurement]],
    tolerance: float,
    tolerances: Mapping[str, Tolerance],
) -> tuple[list[Figure], list[str]]:
    figures: list[Figure] = []
    notes: list[str] = []
    samples = [(base.times.best, head.times.best) for base, head in pairs if base.times and head.times]
    if samples:
        speed = compare_pairs(samples, tolerance)
        base, head = (statistics.median(sample.median for sample in side) for side in zip(*samples, strict=True))
        figures.append(_time(speed, base, head, tolerance))
    elif any(one.times for one in (*bases, *heads)):
        notes.append(f"timed in {'base' if bases[-1].times else 'head'} only")
    exact, said = _exact_figures(bases, heads, tolerances)
    return [*figures, *exact], [*notes, *said]


def _time(speed: Comparison, base: float, head: float, tolerance: float) -> Figure:
    return Figure(
        STEP_TIME,
        _SPEED[speed.outcome],
        speed.outcome,
        base,
        head,
        interval=speed.seconds,
        allowed=tolerance * base,
        reason=speed.reason if speed.outcome == "uncertain" else None,
    )


def _exact_figures(
    bases: Sequence[Measurement], heads: Sequence[Measurement], tolerances: Mapping[str, Tolerance]
) -> tuple[list[Figure], list[str]]:
    """Bytes and counts. Where the runs of one side differ, those two figures count that are closest to one another."""
    notes: list[str] = []
    base_values: dict[str, float] = {}
    head_values: dict[str, float] = {}
    for name, metric in METRICS.items():
        if metric.unit not in WHOLE:
            continue
        mine = [one.metrics[name] for one in bases if name in one.metrics]
        theirs = [one.metrics[name] for one in heads if name in one.metrics]
        if mine and theirs:
            base_values[name], head_values[name] = closest(mine, theirs)
        elif mine or theirs:
            notes.append(f"{metric.title} in {'base' if mine else 'head'} only")
        for side, values in (("base", mine), ("head", theirs)):
            if len(set(values)) > 1 and name not in CHANCE:
                least, most = (shown(name, value, "si") for value in (min(values), max(values)))
                spread = f"{least} to {most}" if least != most else f"by {max(values) - min(values):.0f}"
                notes.append(f"{metric.title} differs between the runs of {side}: {spread}")
    # Times are judged by pairs; whatever else a measurement holds is none of the judge's business here.
    earlier = baseline_of(replace(bases[-1], metrics=base_values, times=None, explanation=None), "", None)
    now = replace(heads[-1], metrics=head_values, times=None, explanation=None)
    verdict = judge(now, Budget(), earlier, {name: one for name, one in tolerances.items() if name in base_values})
    return [
        Figure(
            one.metric,
            one.outcome,
            one.outcome.words,
            one.baseline,
            one.value,
            allowed=one.allowed,
            reason=one.reason,
        )
        for one in verdict.metrics
        if one.allowed is not None and one.baseline is not None
    ], notes


def closest(base: Sequence[float], head: Sequence[float]) -> tuple[float, float]:
    """The figures of two sides that are closest to one another; the same one twice where their ranges overlap."""
    if min(head) > max(base):
        return max(base), min(head)
    if max(head) < min(base):
        return min(base), max(head)
    both = max(min(base), min(head))
    return both, both
