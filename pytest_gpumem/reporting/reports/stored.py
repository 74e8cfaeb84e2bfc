"""Show stored baselines as a table, or as JSON for programs. Pure."""

from __future__ import annotations

import json
from dataclasses import asdict
from typing import TYPE_CHECKING, Any, NamedTuple

from pytest_gpumem.base.units import counted
from pytest_gpumem.facts.metrics import METRICS
from pytest_gpumem.reporting.reports.layout import Column, Span, Table
from pytest_gpumem.reporting.reports.values import has_column, shown

if TYPE_CHECKING:
    from collections.abc import Sequence

    from pytest_gpumem.base.units import UnitSystem
    from pytest_gpumem.judging.gate.baseline import Baseline, Key

FORMAT = 1
"""The version number of the JSON format."""
_LEAST_NAME, _LEAST_REASON = 24, 12


class StoredBaseline(NamedTuple):
    """An entry in the store. ``slug`` names the folder for the entry's device."""

    slug: str
    key: Key
    entry: Baseline


def table(baselines: Sequence[StoredBaseline], units: UnitSystem, *, everything: bool = False) -> Table | None:
    """Return a table with a row for each baseline and a column for each metric.

    Args:
        baselines: The baselines.
        units: The unit system for bytes.
        everything: True to add columns for phases and counts.
    """
    if not baselines:
        return None
    metrics = [name for name in METRICS if _has_column(name, baselines, everything=everything)]
    # If a narrow screen omits columns, it omits the most important metrics last.
    weights = {
        name: None if METRICS[name].weight is None else len(metrics) - number for number, name in enumerate(metrics)
    }
    columns = (
        Column("test", left=True, least=_LEAST_NAME),
        Column("device", left=True),
        *(Column(METRICS[name].short or METRICS[name].title, weight=weight) for name, weight in weights.items()),
        Column("recorded", left=True, weight=len(metrics) + 1),
        Column("commit", left=True, weight=0),
        Column("reason", left=True, least=_LEAST_REASON),
    )
    rows = [
        [
            *(str(baseline.key), baseline.slug, *(_cell(name, baseline.entry, units) for name in metrics)),
            *(baseline.entry.recorded, baseline.entry.commit or "", baseline.entry.reason or ""),
        ]
        for baseline in baselines
    ]
    # Omit the columns for commits and reasons if no baseline has them.
    return Table(columns, tuple(tuple(map(Span, row)) for row in rows)).without_empty(range(len(columns) - 2))


def accounting(baselines: Sequence[StoredBaseline], of: int, where: str) -> str:
    """Return a line that counts the shown baselines: ``"3 of 12 baselines, of 2 tests on 1 device, in gpumem-baselines"``.

    Args:
        baselines: The shown baselines.
        of: The number of all baselines in the store.
        where: The store's path or address, without credentials.
    """
    tests = len({(baseline.key.file, baseline.key.test) for baseline in baselines})
    devices = len({baseline.slug for baseline in baselines})
    count = counted(of, "baseline") if len(baselines) == of else f"{len(baselines)} of {of} baselines"
    tests_and_devices = f", of {counted(tests, 'test')} on {counted(devices, 'device')}," if baselines else ""
    return f"{count}{tests_and_devices} in {where}"


def to_json(baselines: Sequence[StoredBaseline], where: str) -> str:
    """Return the baselines as JSON, with values in bytes, counts, seconds and items per second.

    ``where`` is the store's path or address, without credentials.
    """
    plain = {"format": FORMAT, "store": where, "baselines": [_plain(baseline) for baseline in baselines]}
    return json.dumps(plain, indent=2, allow_nan=False) + "\n"


def _plain(baseline: StoredBaseline) -> dict[str, Any]:
    entry = baseline.entry
    composition = entry.composition
    return {
        "file": baseline.key.file,
        "test": baseline.key.test,
        "name": baseline.key.name,
        "slug": baseline.slug,
        "device": entry.environment.device,
        "environment": dict(entry.environment.details),
        "workload": asdict(entry.workload),
        "metrics": {name: entry.metrics[name] for name in METRICS if name in entry.metrics},
        "runs": None if entry.runs is None else {"seconds": entry.runs.seconds, "cycles": entry.runs.cycles},
        "recorded": entry.recorded,
        "commit": entry.commit,
        "reason": entry.reason,
        "composition": None if composition is None else [row.text() for row in composition.rows],
    }


def _has_column(name: str, baselines: Sequence[StoredBaseline], *, everything: bool) -> bool:
    values = [baseline.entry.metrics[name] for baseline in baselines if name in baseline.entry.metrics]
    return bool(values) if everything else has_column(name, values)


def _cell(name: str, entry: Baseline, units: UnitSystem) -> str:
    value = entry.metrics.get(name)
    if value is None:
        return "-"
    if name != "step_time":
        return shown(name, value, units)
    runs = "not compared" if entry.runs is None else counted(len(entry.runs.seconds), "run")
    return f"{shown(name, value, units)} ({runs})"
