"""Make a failure text, which names the failed figures and says how to fix or accept them. Pure."""

from __future__ import annotations

import shlex
from dataclasses import astuple
from typing import TYPE_CHECKING

from pytest_gpumem.base.command_name import command_name
from pytest_gpumem.base.units import UnitSystem, format_ratio
from pytest_gpumem.facts.metrics import METRICS, Kind
from pytest_gpumem.facts.values.unknown_reads import decided_a_branch
from pytest_gpumem.judging.gate.failing import failing_metrics
from pytest_gpumem.judging.gate.speed import update_that_adds_time
from pytest_gpumem.judging.gate.verdict import NOT_MARKED, WORSE, MetricVerdict, Outcome, TestVerdict, Verdict, worst
from pytest_gpumem.judging.times.intervals import LEVEL
from pytest_gpumem.reporting.reports.explanation import explanation_blocks
from pytest_gpumem.reporting.reports.gpu_use import gpu_use_lines
from pytest_gpumem.reporting.reports.layout import Screen, columns, without_empty
from pytest_gpumem.reporting.reports.values import (
    difference,
    on_device,
    peaks_by_device,
    remarks_on,
    shown,
    texts_of,
    tolerated,
)
from pytest_gpumem.reporting.reports.view import origin_line

if TYPE_CHECKING:
    from collections.abc import Collection, Iterable, Sequence

    from pytest_gpumem.facts.measurement import Measurement
    from pytest_gpumem.facts.values.option_words import UpdateMode


_MEASURE_AGAIN = f"measure the test again, or remove its marker or fixture and run `{command_name()} prune`"
_REGION = (
    "a region of gpumem.track() runs once and is not recorded, so its lines and tensors are unknown; to see them, move its "
    "code into a function and call gpumem.measure(function)"
)
_DEVICE_AGAIN = (
    "name the baseline's device in the test's marker or in the settings, or run the test on a machine with this device"
)
_NOT_ALL_PROCESSES = "Not certain (required by --gpumem-strict): not all of the test's processes were measured"
_MARK_AGAIN = "add @pytest.mark.gpumem or the fixture to the test again, or name the test under mark in [tool.gpumem]"


def failure_text(
    verdict: TestVerdict,
    failing: frozenset[Outcome],
    units: UnitSystem,
    accept: str | None = None,
    memory: str = "Memory",
    bisect: str | None = None,
) -> str:
    """Return the failure text for a test.

    Args:
        verdict: The verdict on the test.
        failing: The failing outcomes in this session.
        units: The unit system for bytes.
        accept: The command from `accept_command`.
        memory: The name for the device's memory, such as ``"GPU memory"``.
        bisect: The command from `bisect_command`.
    """
    missing = verdict.missing_text if Outcome.MISSING in failing else None
    legible = Screen().legible
    if verdict.unmeasured:
        unmeasured = legible(verdict.unmeasured)
        if missing is None:
            return f"Not measured (required by --gpumem-strict): {unmeasured}"
        mend = _MARK_AGAIN if verdict.unmeasured == NOT_MARKED else _MEASURE_AGAIN
        names = ", ".join(verdict.missing)
        if verdict.missing_on:
            mend = _DEVICE_AGAIN
            names += f" on {', '.join(verdict.missing_on)}"
        return (
            f"Not measured any more: {unmeasured}\n\n"
            f"  baseline: {legible(names)}, but no figures were compared with it\n"
            f"  mend:     {mend}" + (f"\n  accept:   {accept}" if accept else "")
        )
    processes = [legible(process) for process in verdict.unmeasured_processes]
    if missing is not None and not verdict.verdicts:
        problem = _with_notes(legible(f"Measurement missing: {missing}"), processes)
        return f"{problem}\n\n  mend:     take the measurement again, or remove its baseline from the store"
    failed = [part for part in verdict.verdicts if any(metric.outcome in failing for metric in part.metrics)]
    shown = failed or [part for part in verdict.verdicts if decided_a_branch(part.measurement.notes)]
    blocks = []
    if missing is not None:
        blocks.append(_with_notes(legible(f"Measurement missing: {missing}"), processes))
    elif processes and not shown:
        blocks.append(_with_notes(_NOT_ALL_PROCESSES, processes))
    if failed or not blocks:
        several = len(verdict.verdicts) > 1
        blocks += [_block(part, failing, units, several, memory) for part in shown or verdict.verdicts]
        blocks += [_with_notes("", processes)] if processes and missing is None else []
    if any(metric.outcome in failing and metric.outcome in WORSE for part in failed for metric in part.metrics):
        uses = gpu_use_lines(verdict.gpu_uses, units, verdict.jobs_beside_torch)
        blocks += ["\n".join(f"  note: {line}" for line in uses)] if uses else []
    mending = []
    if Outcome.OVER_BUDGET in failing and any(
        metric.outcome is Outcome.OVER_BUDGET for part in failed for metric in part.metrics
    ):
        mending.append("  budget:   set by the test's @pytest.mark.gpumem, or by budget or models in [tool.gpumem]")
    mending += [f"  bisect:   {bisect}"] if bisect else []
    mending += [f"  accept:   {accept}"] if accept else []
    return "\n\n".join([*blocks, *(["\n".join(mending)] if mending else [])])


def _with_notes(headline: str, notes: Iterable[str]) -> str:
    return "\n".join([*filter(None, [headline]), *(f"  note: {note}" for note in notes)])


def accept_command(
    verdict: TestVerdict,
    failing: frozenset[Outcome],
    *,
    words: Sequence[str],
    options: Sequence[str] = (),
    rest: Sequence[str] = (),
) -> str | None:
    """Return the command to accept a failed test's figures, or ``None`` if no baseline would fix the failure.

    Args:
        verdict: The verdict on the test.
        failing: The failing outcomes in this session.
        words: The command without options, such as ``pytest`` and the node id.
        options: The session's options, which the command repeats.
        rest: The command's last words, after the options.
    """
    metrics = [metric for part in verdict.verdicts for metric in part.metrics if metric.outcome in failing]
    outcomes = {metric.outcome for metric in metrics} | ({Outcome.MISSING} & failing if verdict.missing else set())
    new = {Outcome.NEW, Outcome.FOREIGN}
    acceptable = new | {Outcome.REGRESSED, Outcome.UNCERTAIN, Outcome.STALE, Outcome.MISSING}
    if verdict.unmeasured or not verdict.verdicts or outcomes.isdisjoint(acceptable):
        return None
    times = {update_that_adds_time(metric) for metric in metrics if metric.metric == "step_time"}
    mode: UpdateMode = "new" if outcomes <= new and times <= {"new"} else "all"
    return update_command(mode, words, options, rest)


def update_command(mode: UpdateMode, words: Sequence[str], options: Sequence[str], rest: Sequence[str]) -> str:
    """Return the command to run a test again and write its baselines. The arguments are the same as in `accept_command`."""
    return " ".join(map(_quoted, [*words, f"--gpumem-update={mode}", *options, *rest]))


def bisect_command(
    verdict: TestVerdict, failing: frozenset[Outcome], nodeid: str, options: Sequence[str] = ()
) -> str | None:
    """Return the command to find the package behind a regression, or ``None`` if no package changed since the baseline."""
    compared = {Outcome.REGRESSED, Outcome.UNCERTAIN} & failing
    if not any(
        part.changed_packages and any(metric.outcome in compared for metric in part.metrics)
        for part in verdict.verdicts
    ):
        return None
    return " ".join(map(_quoted, ["gpumem", "bisect", "--packages", nodeid, *(["--", *options] if options else [])]))


def prune_command(*names: str, options: Sequence[str]) -> str:
    """Return the command to remove baselines whose tests no longer exist or are no longer measured.

    ``names`` are test ids or files. Without names, the command checks all baselines in the store.
    """
    return " ".join(map(_quoted, ["gpumem", "prune", *names, *options]))


def measured_section(measurements: Iterable[Measurement], units: UnitSystem) -> str:
    """Return a table with the figures that a test measured before its own code failed."""
    rows = [
        (METRICS[name].title, measurement.name, shown(name, value, units))
        for measurement in measurements
        for name, value in measurement.metrics.items()
    ]
    return "\n".join(columns(("metric", "measurement", "now"), rows, left=(0, 1)))


def _block(verdict: Verdict, failing: frozenset[Outcome], units: UnitSystem, several: bool, memory: str) -> str:
    # The line does not begin with the measurement's name, because a CI runner may take such a name for a command.
    name = f"In {verdict.measurement.name}: " if several else ""
    lines = [f"{name}{_headline(verdict, failing, units, memory)}"]
    explained = [*failing_metrics(verdict, failing), *failing_metrics(verdict, failing, "work")]
    for block in (_metric_table(verdict, failing, units), *explanation_blocks(verdict, explained, units)):
        lines += ["", *(f"  {line}" for line in block)]
    reasons = _reasons(verdict, _failed_by(verdict, failing), lines[0])
    notes = [
        *reasons,
        *(note for note in remarks_on(verdict.measurement) if not any(note in line for line in (lines[0], *reasons))),
    ]
    if verdict.measurement.workload.step == "region" and verdict.measurement.explanation is None and explained:
        notes.append(_REGION)
    by_device = peaks_by_device(verdict.measurement, units)
    notes += [] if by_device is None else [by_device]
    lines += ["", *(f"  note: {note}" for note in notes)] if notes else []
    if verdict.origin is not None:
        lines += ["", f"  baseline: {origin_line(verdict.origin)}"]
        lines += [f"  reason:   {verdict.origin.reason}"] if verdict.origin.reason else []
    return "\n".join(map(Screen().legible, lines))


def _reasons(verdict: Verdict, failed_by: Collection[Kind], headline: str) -> list[str]:
    """Return the metrics' reasons for a failure text, except for reasons that the headline contains.

    A reason that several metrics share appears once: ``"peak allocated, peak reserved: the step's peak did not settle"``.
    """
    titles: dict[str, list[str]] = {}
    for metric in verdict.metrics:
        if metric.reason and metric.reason not in headline and _bears_on(metric, failed_by):
            titles.setdefault(metric.reason, []).append(METRICS[metric.metric].title)
    return [f"{', '.join(metrics)}: {reason}" for reason, metrics in titles.items()]


def _headline(verdict: Verdict, failing: frozenset[Outcome], units: UnitSystem, memory: str) -> str:
    outcome = worst(metric.outcome for metric in verdict.metrics if metric.outcome in failing)
    first = min(
        (metric for metric in verdict.metrics if metric.outcome is outcome),
        key=lambda metric: METRICS[metric.metric].precedence,
        default=None,
    )
    if first is not None and outcome is Outcome.OVER_BUDGET:
        problem = "below budget" if METRICS[first.metric].larger_is_better else "over budget"
        return f"{_subject(first, memory, problem)} {_against(first, first.budget, 'budget', units)}"
    if first is not None and outcome in (Outcome.REGRESSED, Outcome.UNCERTAIN):
        problem = "regressed" if outcome is Outcome.REGRESSED else "may have regressed"
        if first.baseline is not None and first.value < first.baseline and METRICS[first.metric].kind == "memory":
            problem = "is not comparable"  # a metric that shrank has not regressed
        against = _against(first, first.baseline, "baseline", units)
        # If the workload changed, this explains the growth better than any other reason.
        workload = f"; another workload: {verdict.reason}" if verdict.reason else ""
        allowed = tolerated(first.metric, first.allowed, first.baseline, units)
        packages = "".join(f"; {clause}" for clause in verdict.changed_packages)
        return f"{_subject(first, memory, problem)} {against}, allowed {allowed}{workload}{packages}"
    decided = decided_a_branch(verdict.measurement.notes)
    if first is None and decided is not None:
        return f"Not certain (required by --gpumem-strict): {decided}"
    why = f"{METRICS[first.metric].title}: {first.reason}" if first is not None and first.reason else None
    reason = verdict.reason or why or "the test has no budget, and --gpumem-baseline was not given"
    return f"Not compared (required by --gpumem-strict): {outcome.words}, {reason}"


def _subject(verdict: MetricVerdict, memory: str, problem: str) -> str:
    """Return the beginning of a headline: ``"GPU memory regressed: peak"``, or ``"Work regressed: syncs"``."""
    metric = METRICS[verdict.metric]
    kind = memory if metric.kind == "memory" else metric.kind.capitalize()
    return f"{kind} {problem}: {'peak' if metric.name == 'peak_allocated' else metric.title}{on_device(verdict)}"


def _against(verdict: MetricVerdict, other: float | None, limit_name: str, units: UnitSystem) -> str:
    assert other is not None, "the metric has a baseline or a budget"
    ratio = format_ratio(verdict.value / other - 1) if other else ""
    if METRICS[verdict.metric].unit in ("bytes", "count"):
        more = difference(verdict.metric, verdict.value - other, units)
        ratio = f"{more} ({ratio})" if ratio else more
    if verdict.interval is not None and other == verdict.baseline:
        low, high = verdict.interval
        ratio += f" ({LEVEL:.0%} between {format_ratio(low - 1)} and {format_ratio(high - 1)})".replace("%", " %", 1)
    value, against = (shown(verdict.metric, number, units, verdict.of) for number in (verdict.value, other))
    return f"{value}, {limit_name} {against}: {ratio}"


def _metric_table(verdict: Verdict, failing: frozenset[Outcome], units: UnitSystem) -> list[str]:
    failed_by = _failed_by(verdict, failing)
    rows = [astuple(texts_of(metric, units)) for metric in verdict.metrics if _bears_on(metric, failed_by)]
    header, rows_kept = without_empty(("metric", "baseline", "now", "change", "allowed", "budget", ""), rows, (0, 2))
    return columns(header, rows_kept, left=(0, len(header) - 1 if header[-1] == "" else 0))


def _failed_by(verdict: Verdict, failing: frozenset[Outcome]) -> set[Kind]:
    """Return the kinds of the failing metrics, such as ``memory`` or ``time``."""
    return {METRICS[metric.metric].kind for metric in verdict.metrics if metric.outcome in failing}


def _bears_on(metric: MetricVerdict, failed_by: Collection[Kind]) -> bool:
    """Return whether the failure text shows a metric. ``failed_by`` contains the kinds of the failed metrics.

    The text shows all judged metrics, and all other metrics of the failed kinds. If a time failed, the text also shows counts.
    """
    kind = METRICS[metric.metric].kind
    if metric.outcome is Outcome.RECORDED or (kind == "work" and metric.outcome is Outcome.OK):
        # Counts and phase times explain a slower step, but would distract from growing memory.
        return kind in failed_by or (kind != "memory" and not {"time", "throughput"}.isdisjoint(failed_by))
    return True


def _quoted(word: str) -> str:
    # Put a test id in double quotes, as people do. If double quotes are not enough, use shlex's quotes. For invisible
    # characters, use bash's escapes.
    if shlex.quote(word) == word:
        return word
    if Screen().legible(word) != word:
        return "$'" + "".join(map(_in_bash, word)) + "'"
    return shlex.quote(word) if any(character in word for character in '"$`\\!') else f'"{word}"'


def _in_bash(character: str) -> str:
    if character in "\\'":
        return "\\" + character
    if Screen().legible(character) == character:
        return character
    # Python reads invalid UTF-8 in file names as lone surrogates, so turn these surrogates back into the original bytes.
    escaped = "\udc80" <= character <= "\udcff"
    return "".join(
        f"\\x{byte:02x}" for byte in character.encode(errors="surrogateescape" if escaped else "surrogatepass")
    )
