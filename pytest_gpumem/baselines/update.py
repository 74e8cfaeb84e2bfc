"""Which measurements a session writes into the store. Pure."""

from __future__ import annotations

from dataclasses import replace
from typing import TYPE_CHECKING

from pytest_gpumem.baselines.entry import Absent, Entry, Key
from pytest_gpumem.gate.verdict import Outcome, Verdict
from pytest_gpumem.metrics import METRICS

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

    ``new`` adds what is missing; ``improved`` lowers, metric by metric, what got better and leaves the rest; ``all``
    accepts everything.
    """
    wanted: dict[Key, Entry] = {}
    for key, (verdict, entry) in measured.items():
        earlier = stored[key]
        if isinstance(earlier, Absent):
            if mode != "improved":
                wanted[key] = entry
        elif mode == "all":
            if not entry.says_the_same(earlier):
                wanted[key] = _with_what_is_kept_of(earlier, entry)
        elif mode == "improved":
            better = {metric.metric: metric.value for metric in verdict.metrics if metric.outcome is Outcome.IMPROVED}
            if better:
                kept = {name: value for name, value in earlier.metrics.items() if name not in better}
                metrics = {**entry.metrics, **kept}
                # A composition belongs to its peak.
                composition = entry.composition if "peak_allocated" in better else earlier.composition
                wanted[key] = replace(entry, metrics=metrics, composition=composition)
    return wanted


def _with_what_is_kept_of(earlier: Entry, entry: Entry) -> Entry:
    """``entry``, with what this session did not take and is of the same work.

    Times (``--gpumem-no-time``), and the composition of the same peak (``--gpumem-explain=never``).
    """
    if entry.workload != earlier.workload:
        return entry
    if entry.composition is None and entry.metrics["peak_allocated"] == earlier.metrics["peak_allocated"]:
        entry = replace(entry, composition=earlier.composition)
    times = {name: value for name, value in earlier.metrics.items() if METRICS[name].unit != "bytes"}
    return replace(entry, metrics={**times, **entry.metrics})
