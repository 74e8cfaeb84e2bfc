"""Which measurements a session writes into the store. Pure."""

from __future__ import annotations

from dataclasses import replace
from typing import TYPE_CHECKING

from pytest_gpumem.baselines.entry import Absent, Entry, Key
from pytest_gpumem.gate.speed import MACHINE
from pytest_gpumem.gate.verdict import Outcome, Verdict
from pytest_gpumem.metrics import METRICS, WHOLE
from pytest_gpumem.timing.comparison import MOST_RUNS

if TYPE_CHECKING:
    from collections.abc import Mapping

    from pytest_gpumem.baselines.update_modes import UpdateMode

ACCEPTS: dict[UpdateMode | None, frozenset[Outcome]] = {
    None: frozenset(),
    "new": frozenset({Outcome.NEW, Outcome.FOREIGN}),
    "improved": frozenset(),
    "all": frozenset({Outcome.NEW, Outcome.FOREIGN, Outcome.STALE, Outcome.REGRESSED, Outcome.UNCERTAIN}),
}
"""The outcomes that an update mends by writing what was measured."""


def entries_to_write(
    mode: UpdateMode, measured: Mapping[Key, tuple[Verdict, Entry]], stored: Mapping[Key, Entry | Absent]
) -> dict[Key, Entry]:
    """Those of ``measured`` (of tests that passed) that ``mode`` wants in the store and that would change it.

    ``new`` adds what is missing, also to a stored entry, whose other figures stay; ``improved`` lowers, metric by metric,
    what got better and leaves the rest; ``all`` accepts everything.
    """
    wanted: dict[Key, Entry] = {}
    for key, (verdict, entry) in measured.items():
        earlier = stored[key]
        if isinstance(earlier, Absent):
            if mode != "improved":
                wanted[key] = entry
        elif mode == "new":
            added = _with_added(earlier, entry, verdict)
            if added != earlier:
                wanted[key] = added
        elif mode == "all":
            merged = _with_runs(earlier, _with_what_is_kept_of(earlier, entry), verdict)
            if not entry.says_the_same(earlier) or _brings_a_run(merged, earlier, verdict):
                wanted[key] = merged
        elif mode == "improved":
            better = {metric.metric: metric.value for metric in verdict.metrics if metric.outcome is Outcome.IMPROVED}
            if better:
                kept = {name: value for name, value in earlier.metrics.items() if name not in better}
                metrics = {**entry.metrics, **kept}
                # A composition belongs to its peak.
                composition = entry.composition if "peak_allocated" in better else earlier.composition
                runs = entry.runs if "step_time" in better else earlier.runs if _same_machine(entry, earlier) else None
                wanted[key] = replace(entry, metrics=metrics, composition=composition, runs=runs)
    return wanted


def _with_runs(earlier: Entry, entry: Entry, verdict: Verdict) -> Entry:
    """``entry`` as the latest of the runs of ``earlier``, or as the first one of a new speed, work or machine."""
    if entry.workload != earlier.workload or earlier.runs is None or not _same_machine(entry, earlier):
        return entry
    if entry.runs is not None and _has_another_speed(verdict):
        return entry
    runs = earlier.runs if entry.runs is None else earlier.runs.and_then(entry.runs)
    return replace(entry, runs=runs, metrics={**entry.metrics, "step_time": runs.median})


def _brings_a_run(entry: Entry, earlier: Entry, verdict: Verdict) -> bool:
    """Whether the store knows more of a step's times with ``entry``; once it knows enough, the latest one is no news."""
    if entry.runs is None or entry.runs == earlier.runs:
        return False
    known = earlier.runs is not None and len(earlier.runs.seconds) == MOST_RUNS
    return not known or _has_another_speed(verdict) or not _same_machine(entry, earlier)


def _has_another_speed(verdict: Verdict) -> bool:
    speed = verdict.of("step_time")
    return speed is not None and speed.outcome in (Outcome.REGRESSED, Outcome.IMPROVED)


def _same_machine(entry: Entry, earlier: Entry) -> bool:
    return entry.environment.details.get(MACHINE) == earlier.environment.details.get(MACHINE)


def _with_added(earlier: Entry, entry: Entry, verdict: Verdict) -> Entry:
    """``earlier``, with those of the metrics that it lacks that are what its environment gives, too."""
    here, there = entry.environment.details, earlier.environment.details
    missing = [METRICS[metric.metric] for metric in verdict.metrics if metric.outcome is Outcome.NEW]
    metrics = {
        metric.name: entry.metrics[metric.name]
        for metric in missing
        if metric.unit in WHOLE and all(here.get(detail) == there.get(detail) for detail in metric.depends_on)
    }
    return replace(earlier, metrics={**earlier.metrics, **metrics})


def _with_what_is_kept_of(earlier: Entry, entry: Entry) -> Entry:
    """``entry``, with what this session did not take and is of the same work.

    Times (``--gpumem-no-time``), and the composition of the same peak (``--gpumem-explain=never``).
    """
    if entry.workload != earlier.workload:
        return entry
    if entry.composition is None and entry.metrics["peak_allocated"] == earlier.metrics["peak_allocated"]:
        entry = replace(entry, composition=earlier.composition)
    times = {name: value for name, value in earlier.metrics.items() if METRICS[name].unit not in WHOLE}
    return replace(entry, metrics={**times, **entry.metrics})
