"""Baselines as a table, and as JSON for programs. Pure."""

from __future__ import annotations

import json
from dataclasses import asdict
from typing import TYPE_CHECKING, Any, NamedTuple

from pytest_gpumem.metrics import METRICS
from pytest_gpumem.reports.layout import Column, Span, Table
from pytest_gpumem.reports.values import shown
from pytest_gpumem.units import counted

if TYPE_CHECKING:
    from collections.abc import Sequence

    from pytest_gpumem.gate.baseline import Baseline, Key
    from pytest_gpumem.units import UnitSystem

FORMAT = 1
"""The number of the JSON's format."""
_LEAST_NAME, _LEAST_REASON = 24, 12


class StoredBaseline(NamedTuple):
    """An entry of the store: ``slug`` is its device's folder."""

    slug: str
    key: Key
    entry: Baseline


def table(baselines: Sequence[StoredBaseline], units: UnitSystem, *, everything: bool = False) -> Table | None:
    """Return a row for each baseline and a column for each metric; phases and counts with ``everything`` only."""
    if not baselines:
        return None
    metrics = [name for name in METRICS if _has_column(name, baselines, everything=everything)]
    # Where there is no room for all, what was judged first goes last.
    weights = {name: None if METRICS[name].weight is None else len(metrics) - at for at, name in enumerate(metrics)}
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
            *(str(one.key), one.slug, *(_cell(name, one.entry, units) for name in metrics)),
            *(one.entry.recorded, one.entry.commit or "", one.entry.reason or ""),
        ]
        for one in baselines
    ]
    # Without columns of commits and reasons that no baseline has.
    return Table(columns, tuple(tuple(map(Span, row)) for row in rows)).without_empty(range(len(columns) - 2))


def accounting(baselines: Sequence[StoredBaseline], of: int, where: str) -> str:
    """Return the line that counts: ``"3 of 12 baselines, of 2 tests on 1 device, in gpumem-baselines"``.

    ``where`` is shown as it is: a URL has no credentials any more.
    """
    tests = len({(one.key.file, one.key.test) for one in baselines})
    devices = len({one.slug for one in baselines})
    count = counted(of, "baseline") if len(baselines) == of else f"{len(baselines)} of {of} baselines"
    whose = f", of {counted(tests, 'test')} on {counted(devices, 'device')}," if baselines else ""
    return f"{count}{whose} in {where}"


def to_json(baselines: Sequence[StoredBaseline], where: str) -> str:
    """Return the baselines as JSON; values are in bytes, counts, seconds and items a second. ``where``: see `accounting`."""
    plain = {"format": FORMAT, "store": where, "baselines": [_plain(one) for one in baselines]}
    return json.dumps(plain, indent=2, allow_nan=False) + "\n"


def _plain(one: StoredBaseline) -> dict[str, Any]:
    entry = one.entry
    composition = entry.composition
    return {
        "file": one.key.file,
        "test": one.key.test,
        "name": one.key.name,
        "slug": one.slug,
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
    values = [one.entry.metrics[name] for one in baselines if name in one.entry.metrics]
    return bool(values) if everything else METRICS[name].has_column(values)


def _cell(name: str, entry: Baseline, units: UnitSystem) -> str:
    value = entry.metrics.get(name)
    if value is None:
        return "-"
    if name != "step_time":
        return shown(name, value, units)
    runs = "not compared" if entry.runs is None else counted(len(entry.runs.seconds), "run")
    return f"{shown(name, value, units)} ({runs})"
