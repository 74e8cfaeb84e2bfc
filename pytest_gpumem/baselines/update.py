"""Selection of the measurements that a session writes into the store. Pure."""

from __future__ import annotations

from dataclasses import replace
from typing import TYPE_CHECKING

from pytest_gpumem.gate.baseline import Baseline, Key, NoBaseline, with_runs
from pytest_gpumem.gate.one_sided import may_be_added
from pytest_gpumem.gate.speed import MACHINE, time_may_be_added
from pytest_gpumem.gate.verdict import Outcome, Verdict
from pytest_gpumem.metrics import METRICS, WHOLE
from pytest_gpumem.timing.comparison import SLOWER_RUN, slower_machine
from pytest_gpumem.values.operator_counts import without_places

if TYPE_CHECKING:
    from collections.abc import Iterable, Mapping

    from pytest_gpumem.values.operator_counts import Tally
    from pytest_gpumem.values.option_words import UpdateMode

ACCEPTS: dict[UpdateMode | None, frozenset[Outcome]] = {
    None: frozenset(),
    "new": frozenset({Outcome.NEW, Outcome.FOREIGN}),
    "improved": frozenset(),
    "all": frozenset(
        {Outcome.NEW, Outcome.FOREIGN, Outcome.STALE, Outcome.MISSING, Outcome.REGRESSED, Outcome.UNCERTAIN}
    ),
}
"""The outcomes that an update accepts, by writing what was measured or removing what its test no longer measures."""


def entries_to_write(
    mode: UpdateMode, measured: Mapping[Key, tuple[Verdict, Baseline]], stored: Mapping[Key, Baseline | NoBaseline]
) -> dict[Key, Baseline]:
    """Return the entries of ``measured`` (of tests that passed) that ``mode`` accepts and that would change the store.

    ``new`` adds what is missing, also to a stored entry, whose other figures stay; ``improved`` lowers, metric by metric,
    what got better and leaves the rest; ``all`` accepts everything. Times go along with one another. The reason is that of
    the last change that was accepted, and goes when another is accepted without one; one more run of times is none.
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
            changed = not entry.takes_the_same(earlier) or _has_another_speed(verdict)
            if (entry.runs is not None and another_run) or not entry.says_the_same(earlier):
                entries[key] = merged if changed else replace(merged, reason=earlier.reason)
        elif mode == "improved":
            lowered = _lowered(earlier, entry, verdict)
            if lowered is not None:
                entries[key] = lowered
    return entries


def _lowered(earlier: Baseline, entry: Baseline, verdict: Verdict) -> Baseline | None:
    """Return ``earlier`` with improved metrics lowered; ``None`` if none is, or no environment fits all of its figures."""
    better = {metric.metric: metric.value for metric in verdict.metrics if metric.outcome is Outcome.IMPROVED}
    kept = {name: value for name, value in earlier.metrics.items() if name not in better}
    here, there = entry.environment.details, earlier.environment.details
    decisive = {detail for name in kept for detail in METRICS[name].decided_by}
    if not better or any(here.get(detail) != there.get(detail) for detail in decisive):
        return None
    # A composition belongs to its peak, as workspaces and the peaks of all steps do.
    of_peak = entry if "peak_allocated" in better else earlier
    of_times = entry if "step_time" in better else earlier
    if _fit(kept, entry, earlier) and (of_times.runs is None or _same_machine(of_times, entry)):
        environment = entry.environment
    elif _fit(better, earlier, entry) and of_peak.workspaces == earlier.workspaces:
        environment = earlier.environment
    else:
        return None
    # A metric whose absence has a meaning stays absent.
    taken = {
        name: value
        for name, value in entry.metrics.items()
        if name in better or (METRICS[name].where_absent is None and _fit((name,), earlier, entry))
    }
    lowered = replace(
        entry,
        environment=environment,
        metrics={**taken, **kept},
        composition=of_peak.composition,
        other_phases=of_peak.other_phases,
        workspaces=of_peak.workspaces,
        # It says how far the reserved bytes may vary by chance.
        unused_before=(entry if "peak_reserved" in better else earlier).unused_before,
        by_operator=_made_of(kept, earlier.by_operator) | _made_of(better, entry.by_operator),
        by_device=_lowered_by_device(earlier, entry, better),
        step_peaks=of_peak.step_peaks,
        step_peaks_by_device=of_peak.step_peaks_by_device,
    )
    return _with_times_of(of_times, lowered)


def _fit(names: Iterable[str], there: Baseline, source: Baseline) -> bool:
    """Return whether the environment of ``there`` may stand for these figures of ``source``.

    Either nothing that moves a figure differs between the two environments, or the figure is the same in both. For example,
    a peak that AVX-512 raised and a peak from AVX2 do not fit one environment.
    """
    details, others = there.environment.details, source.environment.details
    return all(
        there.metrics.get(name) == source.metrics.get(name)
        or all(details.get(detail) == others.get(detail) for detail in METRICS[name].details)
        for name in names
    )


def _lowered_by_device(earlier: Baseline, entry: Baseline, better: Mapping[str, float]) -> dict[str, dict[str, int]]:
    """Return the bytes of each GPU: those of ``entry`` of the metrics that are ``better``, and else those of ``earlier``."""
    return {
        device: here
        for device in sorted({*earlier.by_device, *entry.by_device})
        if (
            here := {name: n for name, n in earlier.by_device.get(device, {}).items() if name not in better}
            | {name: n for name, n in entry.by_device.get(device, {}).items() if name in better}
        )
    }


def times_left_out(
    mode: UpdateMode, measured: Mapping[Key, tuple[Verdict, Baseline]], stored: Mapping[Key, Baseline | NoBaseline]
) -> list[str]:
    """Return, as a clause for each measurement, why its times are not stored though ``mode`` accepts them."""
    return [
        reason
        for key, (verdict, entry) in measured.items()
        if mode == "all" or (mode == "new" and _lacks_times(stored[key], entry))
        if (reason := _refusal(verdict, entry, stored[key])) is not None
    ]


def _refusal(verdict: Verdict, entry: Baseline, stored: Baseline | NoBaseline) -> str | None:
    """Return why later runs cannot be compared with this one, or it does not fit those in the store, as a clause."""
    times = verdict.measurement.times
    if times is None:
        return None
    if entry.runs is None:
        return times.best.invalid
    if isinstance(stored, NoBaseline) or not _goes_on(entry, stored) or stored.runs is None:
        return None
    # Outliers stay: without them runs would seem to vary less than they do.
    slower = slower_machine(entry.runs, stored.runs.pace, SLOWER_RUN)
    if slower is None and stored.runs.cycles and not entry.runs.cycles and not _has_another_speed(verdict):
        return "the clock that steps run by could not be read"
    return slower


def _accepted(earlier: Baseline, entry: Baseline, verdict: Verdict) -> Baseline:
    """Return ``entry``, completed from ``earlier`` by what this session did not take, if that is of the same work.

    That is the composition of the same peak (``--gpumem-explain=never``), and times: those of ``earlier`` where this run
    took none (``--no-gpumem-time``) or is refused, and otherwise this run as the latest of its runs.
    """
    if entry.workload != earlier.workload:
        return entry
    if entry.composition is None and entry.metrics["peak_allocated"] == earlier.metrics["peak_allocated"]:
        entry = replace(entry, composition=earlier.composition, other_phases=earlier.other_phases)
    entry = replace(entry, by_operator={**entry.by_operator, **_better_placed(entry, earlier)})
    if earlier.runs is None:
        # Times that are not compared are those of the latest run, disturbed or not.
        return entry if "step_time" in entry.metrics else _with_times_of(earlier, entry)
    if "step_time" in entry.metrics and not _goes_on(entry, earlier):
        return entry
    if entry.runs is None or _refusal(verdict, entry, earlier) is not None:
        return _with_times_of(earlier, entry)
    if _has_another_speed(verdict):
        return entry
    return with_runs(earlier.runs.and_then(entry.runs), entry)


def _made_of(
    metrics: Mapping[str, float], by_operator: Mapping[str, tuple[Tally, ...]]
) -> dict[str, tuple[Tally, ...]]:
    """Return the tallies by operator of these metrics."""
    return {name: tallies for name, tallies in by_operator.items() if name in metrics}


def _better_placed(entry: Baseline, earlier: Baseline) -> dict[str, tuple[Tally, ...]]:
    """Return the tallies of ``earlier`` where ``entry`` has the same operators and does not know their lines."""
    return {
        name: earlier.by_operator[name]
        for name, tallies in entry.by_operator.items()
        if name in earlier.by_operator
        and without_places(tallies) == tallies
        and without_places(earlier.by_operator[name]) == tallies
    }


def _with_times_of(source: Baseline, entry: Baseline) -> Baseline:
    """Return ``entry`` with all runs and times of ``source``, or with none where that is of another machine."""
    metrics = {name: value for name, value in entry.metrics.items() if not _is_time(name)}
    if not _same_machine(source, entry):
        return replace(entry, metrics=metrics, runs=None)
    times = {name: value for name, value in source.metrics.items() if _is_time(name)}
    return replace(entry, metrics={**metrics, **times}, runs=source.runs)


def _is_time(metric: str) -> bool:
    return METRICS[metric].unit not in WHOLE


def _has_another_speed(verdict: Verdict) -> bool:
    speed = verdict.of("step_time")
    return speed is not None and speed.outcome in (Outcome.REGRESSED, Outcome.IMPROVED)


def _goes_on(entry: Baseline, earlier: Baseline) -> bool:
    """Return whether the times of ``entry`` are of the same work and machine as those of ``earlier``."""
    return entry.workload == earlier.workload and _same_machine(entry, earlier)


def _same_machine(entry: Baseline, earlier: Baseline) -> bool:
    return entry.environment.details.get(MACHINE) == earlier.environment.details.get(MACHINE)


def _lacks_times(stored: Baseline | NoBaseline, entry: Baseline) -> bool:
    """Return whether the times of ``entry`` are missing in the store, and may be written."""
    if isinstance(stored, NoBaseline):
        return True
    may_be_added = time_may_be_added(entry.environment, stored.environment)
    return stored.runs is None and stored.workload == entry.workload and may_be_added


def _with_added(earlier: Baseline, entry: Baseline, verdict: Verdict) -> Baseline:
    """Return ``earlier`` with the metrics that it lacks and its environment would give as well, and with times."""
    here, there = entry.environment.details, earlier.environment.details
    missing = [METRICS[metric.metric] for metric in verdict.metrics if metric.outcome is Outcome.NEW]
    metrics = {
        metric.name: entry.metrics[metric.name]
        for metric in missing
        if may_be_added(metric, entry.environment, earlier.environment)
    }
    by_operator = {**earlier.by_operator, **_made_of(metrics, entry.by_operator)}
    named = earlier.named_device or entry.named_device
    added = replace(earlier, metrics={**earlier.metrics, **metrics}, by_operator=by_operator, named_device=named)
    if entry.runs is None or not _lacks_times(earlier, entry):
        return added
    # Entries of older versions lack the machine; that of the added times is known.
    environment = replace(earlier.environment, details={**there, MACHINE: here[MACHINE]})
    return _with_times_of(entry, replace(added, environment=environment))
