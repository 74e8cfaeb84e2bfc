"""Choose the entries that a session writes into the store, according to the mode of ``--gpumem-update``. Pure.

For example, a baseline has ``peak_allocated = 100000000`` and ``syncs = 3``, and a run measures 90 MB and 5 syncs. The modes
have these effects:

- ``new`` writes nothing, because the baseline has all figures.
- ``improved`` writes 90 MB, and does not change the 3 syncs. The test still fails, because 5 syncs are too many.
- ``all`` writes 90 MB and 5 syncs.
"""

from __future__ import annotations

from dataclasses import replace
from typing import TYPE_CHECKING

from pytest_gpumem.facts.metrics import METRICS
from pytest_gpumem.facts.values.operator_counts import without_places
from pytest_gpumem.judging.gate.baseline import Baseline, Key, NoBaseline, with_runs
from pytest_gpumem.judging.gate.one_sided import may_be_added
from pytest_gpumem.judging.gate.speed import MACHINE, time_may_be_added
from pytest_gpumem.judging.gate.verdict import Outcome, Verdict
from pytest_gpumem.judging.times.comparison import SLOWER_RUN, slower_machine

if TYPE_CHECKING:
    from collections.abc import Iterable, Mapping

    from pytest_gpumem.facts.values.operator_counts import Tally
    from pytest_gpumem.facts.values.option_words import UpdateMode

ACCEPTS: dict[UpdateMode | None, frozenset[Outcome]] = {
    None: frozenset(),
    "new": frozenset({Outcome.NEW, Outcome.FOREIGN}),
    "improved": frozenset(),
    "all": frozenset(
        {Outcome.NEW, Outcome.FOREIGN, Outcome.STALE, Outcome.MISSING, Outcome.REGRESSED, Outcome.UNCERTAIN}
    ),
}
"""For each mode, the outcomes that do not fail a test, because the mode writes the figures with these outcomes into the store.
If a measurement is missing, the mode ``all`` removes its entry instead."""


def entries_to_write(
    mode: UpdateMode, measured: Mapping[Key, tuple[Verdict, Baseline]], stored: Mapping[Key, Baseline | NoBaseline]
) -> dict[Key, Baseline]:
    """Return the entries that an update writes into the store.

    The mode ``new`` adds missing entries, and adds missing metrics to stored entries. ``improved`` replaces the metrics that
    improved, and no others. ``all`` replaces all metrics. The times in an entry are always replaced together.

    The reason in an entry belongs to the entry's last accepted change. If a further change is accepted without a reason, the
    old reason is removed, except in the mode ``new``. Times from a further run do not count as a change.

    Args:
        mode: The value of ``--gpumem-update``.
        measured: For each accepted measurement, its verdict and an entry made from this run only.
        stored: The stored entry for each key in ``measured``.
    """
    entries: dict[Key, Baseline] = {}
    for key, (verdict, entry) in measured.items():
        earlier = stored[key]
        if isinstance(earlier, NoBaseline):
            if mode != "improved":
                entries[key] = entry
        elif mode == "new":
            added = _with_added(earlier, entry, verdict)
            if added != earlier:
                entries[key] = replace(added, reason=entry.reason or earlier.reason)
        elif mode == "all":
            merged = _accepted(earlier, entry, verdict)
            another_run = merged.runs != earlier.runs or not _same_machine(merged, earlier)
            changed = not entry.has_same_figures(earlier) or _has_changed_speed(verdict)
            if (entry.runs is not None and another_run) or not entry.is_equivalent(earlier):
                entries[key] = merged if changed else replace(merged, reason=earlier.reason)
        elif mode == "improved":
            lowered = _lowered(earlier, entry, verdict)
            if lowered is not None:
                entries[key] = lowered
    return entries


def _lowered(earlier: Baseline, entry: Baseline, verdict: Verdict) -> Baseline | None:
    """Return the stored entry ``earlier`` with the values of improved metrics from ``entry``.

    An entry has a single environment, so improved figures from this run and other figures from the store must fit the same
    environment (`_fit`): this run's or the stored one. If neither environment fits all figures, the result is ``None``. The
    result is also ``None`` if no metric improved, or if a changed environment detail decides a metric that did not improve
    (`Metric.decided_by`).
    """
    better = {metric.metric: metric.value for metric in verdict.metrics if metric.outcome is Outcome.IMPROVED}
    unchanged = {name: value for name, value in earlier.metrics.items() if name not in better}
    details, earlier_details = entry.environment.details, earlier.environment.details
    decisive = {detail for name in unchanged for detail in METRICS[name].decided_by}
    if not better or any(details.get(detail) != earlier_details.get(detail) for detail in decisive):
        return None
    # The composition, the workspaces and the step peaks must come from the same run as the peak.
    of_peak = entry if "peak_allocated" in better else earlier
    of_times = entry if "step_time" in better else earlier
    if _fit(unchanged, entry, earlier) and (of_times.runs is None or _same_machine(of_times, entry)):
        environment = entry.environment
    elif _fit(better, earlier, entry) and of_peak.workspaces == earlier.workspaces:
        environment = earlier.environment
    else:
        return None
    # Do not add a metric with a `value_if_absent`: an entry without this metric is already read as this value.
    taken = {
        name: value
        for name, value in entry.metrics.items()
        if name in better or (METRICS[name].value_if_absent is None and _fit((name,), earlier, entry))
    }
    lowered = replace(
        entry,
        environment=environment,
        metrics={**taken, **unchanged},
        composition=of_peak.composition,
        other_phases=of_peak.other_phases,
        workspaces=of_peak.workspaces,
        # `unused_before` must come from the same run as `peak_reserved`, because it decides the tolerance for this metric.
        unused_before=(entry if "peak_reserved" in better else earlier).unused_before,
        # `gained_before` must come from the same run as the metrics that are compared by it.
        gained_before=(entry if "retained" in better else of_peak).gained_before,
        by_operator=_tallies_of(unchanged, earlier.by_operator) | _tallies_of(better, entry.by_operator),
        by_device=_lowered_by_device(earlier, entry, better),
        step_peaks=of_peak.step_peaks,
        step_peaks_by_device=of_peak.step_peaks_by_device,
    )
    return _with_times_of(of_times, lowered)


def _fit(names: Iterable[str], target: Baseline, source: Baseline) -> bool:
    """Return whether the metrics ``names`` in ``source`` could also have been measured in the environment of ``target``.

    This holds for a metric if its value is equal in both entries, or if all details that affect it are equal in both
    environments. For example, a peak that was measured with AVX-512 does not fit an environment with AVX2.
    """
    details, source_details = target.environment.details, source.environment.details
    return all(
        target.metrics.get(name) == source.metrics.get(name)
        or all(details.get(detail) == source_details.get(detail) for detail in METRICS[name].details)
        for name in names
    )


def _lowered_by_device(earlier: Baseline, entry: Baseline, better: Mapping[str, float]) -> dict[str, dict[str, int]]:
    """Return the bytes on each GPU. Values of metrics in ``better`` come from ``entry``, and all others from ``earlier``."""
    return {
        device: nbytes
        for device in sorted({*earlier.by_device, *entry.by_device})
        if (
            nbytes := {name: n for name, n in earlier.by_device.get(device, {}).items() if name not in better}
            | {name: n for name, n in entry.by_device.get(device, {}).items() if name in better}
        )
    }


def times_left_out(
    mode: UpdateMode, measured: Mapping[Key, tuple[Verdict, Baseline]], stored: Mapping[Key, Baseline | NoBaseline]
) -> list[str]:
    """Return a clause for each measurement whose times this mode would write, although these times cannot be stored."""
    return [
        reason
        for key, (verdict, entry) in measured.items()
        if mode == "all" or (mode == "new" and _lacks_times(stored[key], entry))
        if (reason := _refusal(verdict, entry, stored[key])) is not None
    ]


def _refusal(verdict: Verdict, entry: Baseline, stored: Baseline | NoBaseline) -> str | None:
    """Return why a run's times cannot be stored, as a clause; ``None`` if they can be stored, or if the run was not timed.

    Times are refused if they are invalid, or if the machine was slower than in the stored runs. If the stored runs have clock
    rates, times without a clock rate are also refused, unless the step became slower or faster.
    """
    times = verdict.measurement.times
    if times is None:
        return None
    if entry.runs is None:
        return times.best.invalid
    if isinstance(stored, NoBaseline) or not _has_comparable_times(entry, stored) or stored.runs is None:
        return None
    # Store also times that differ much from the stored runs. Without them, the runs would seem to vary less than they do.
    slower = slower_machine(entry.runs, stored.runs.pace, SLOWER_RUN)
    if slower is None and stored.runs.cycles and not entry.runs.cycles and not _has_changed_speed(verdict):
        return "the clock rate during the steps could not be read"
    return slower


def _accepted(earlier: Baseline, entry: Baseline, verdict: Verdict) -> Baseline:
    """Return ``entry``, completed with values from the stored entry ``earlier`` if both have the same workload.

    If this run has no composition (``--gpumem-explain=never``) and the same peak, the stored composition is added. For the
    times, the first condition that is true decides:

    1. This run has no times (``--no-gpumem-time``). The result has the stored times if they come from the same machine.
    2. The stored entry has no runs, or runs from another machine. The result has only this run's times.
    3. This run's times are refused (`_refusal`). The result has the stored times.
    4. The step became slower or faster. The result has only this run's times.
    5. In all other cases, the result has the stored runs and this run.
    """
    if entry.workload != earlier.workload:
        return entry
    if entry.composition is None and entry.metrics["peak_allocated"] == earlier.metrics["peak_allocated"]:
        entry = replace(entry, composition=earlier.composition, other_phases=earlier.other_phases)
    entry = replace(entry, by_operator={**entry.by_operator, **_better_placed(entry, earlier)})
    if earlier.runs is None:
        # The stored entry has no valid runs. So store this run's times even if the run was disturbed.
        return entry if "step_time" in entry.metrics else _with_times_of(earlier, entry)
    if "step_time" in entry.metrics and not _has_comparable_times(entry, earlier):
        return entry
    if entry.runs is None or _refusal(verdict, entry, earlier) is not None:
        return _with_times_of(earlier, entry)
    if _has_changed_speed(verdict):
        return entry
    return with_runs(earlier.runs.extended_by(entry.runs), entry)


def _tallies_of(
    metrics: Mapping[str, float], by_operator: Mapping[str, tuple[Tally, ...]]
) -> dict[str, tuple[Tally, ...]]:
    """Return the tallies in ``by_operator`` for the metrics in ``metrics``."""
    return {name: tallies for name, tallies in by_operator.items() if name in metrics}


def _better_placed(entry: Baseline, earlier: Baseline) -> dict[str, tuple[Tally, ...]]:
    """Return tallies from ``earlier`` that can replace tallies without lines in ``entry``, because their numbers are equal."""
    return {
        name: earlier.by_operator[name]
        for name, tallies in entry.by_operator.items()
        if name in earlier.by_operator
        and without_places(tallies) == tallies
        and without_places(earlier.by_operator[name]) == tallies
    }


def _with_times_of(source: Baseline, entry: Baseline) -> Baseline:
    """Return ``entry`` with the runs and times from ``source`` only, or without times if the machines differ."""
    metrics = {name: value for name, value in entry.metrics.items() if not METRICS[name].is_timed}
    if not _same_machine(source, entry):
        return replace(entry, metrics=metrics, runs=None)
    times = {name: value for name, value in source.metrics.items() if METRICS[name].is_timed}
    return replace(entry, metrics={**metrics, **times}, runs=source.runs)


def _has_changed_speed(verdict: Verdict) -> bool:
    speed = verdict.of("step_time")
    return speed is not None and speed.outcome in (Outcome.REGRESSED, Outcome.IMPROVED)


def _has_comparable_times(entry: Baseline, earlier: Baseline) -> bool:
    """Return whether both entries have the same workload and machine, so their times can be compared."""
    return entry.workload == earlier.workload and _same_machine(entry, earlier)


def _same_machine(entry: Baseline, earlier: Baseline) -> bool:
    return entry.environment.details.get(MACHINE) == earlier.environment.details.get(MACHINE)


def _lacks_times(stored: Baseline | NoBaseline, entry: Baseline) -> bool:
    """Return whether the stored entry has no valid times, and may get the times of ``entry``."""
    if isinstance(stored, NoBaseline):
        return True
    may_be_added = time_may_be_added(entry.environment, stored.environment)
    return stored.runs is None and stored.workload == entry.workload and may_be_added


def _with_added(earlier: Baseline, entry: Baseline, verdict: Verdict) -> Baseline:
    """Return the stored entry ``earlier``, with missing metrics and times from ``entry``.

    A metric or a time is added only if ``earlier`` was measured in a comparable environment (`may_be_added`).
    """
    missing = [METRICS[metric.metric] for metric in verdict.metrics if metric.outcome is Outcome.NEW]
    metrics = {
        metric.name: entry.metrics[metric.name]
        for metric in missing
        if may_be_added(metric, entry.environment, earlier.environment)
    }
    by_operator = {**earlier.by_operator, **_tallies_of(metrics, entry.by_operator)}
    named_device = earlier.named_device or entry.named_device
    added = replace(earlier, metrics={**earlier.metrics, **metrics}, by_operator=by_operator, named_device=named_device)
    if entry.runs is None or not _lacks_times(earlier, entry):
        return added
    # Entries from older versions lack the machine, so add the machine on which the added times were measured.
    details = {**earlier.environment.details, MACHINE: entry.environment.details[MACHINE]}
    environment = replace(earlier.environment, details=details)
    return _with_times_of(entry, replace(added, environment=environment))
