"""Baselines as a table, and as JSON for programs. Pure."""

from __future__ import annotations

import json
from dataclasses import asdict
from typing import TYPE_CHECKING, Any, NamedTuple

from pytest_gpumem.metrics import METRICS
from pytest_gpumem.reports.layout import Column, Span, Table
from pytest_gpumem.reports.values import shown

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence

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
    """A row a baseline, a column a metric that any of them has; phases and counts with ``everything`` only."""
    if not baselines:
        return None
    metrics = [name for name in METRICS if _is_told(name, baselines, everything=everything)]
    columns = [Column("test", left=True, least=_LEAST_NAME), Column("device", left=True)]
    # Where there is no room for all, what was judged first goes last.
    columns += [
        Column(
            METRICS[name].short or METRICS[name].title,
            weight=None if METRICS[name].weight is None else len(metrics) - number,
        )
        for number, name in enumerate(metrics)
    ]
    columns.append(Column("recorded", left=True, weight=len(metrics) + 1))
    cells = [
        [str(one.key), one.slug, *(_cell(name, one.entry, units) for name in metrics), one.entry.recorded]
        for one in baselines
    ]
    for column, told in (
        (Column("commit", left=True, weight=0), [one.entry.commit for one in baselines]),
        (Column("reason", left=True, least=_LEAST_REASON), [one.entry.reason for one in baselines]),
    ):
        if any(told):
            columns.append(column)
            for row, text in zip(cells, told, strict=True):
                row.append(text or "")
    return Table(tuple(columns), tuple(tuple(map(Span, row)) for row in cells))


def accounting(baselines: Sequence[StoredBaseline], of: int, where: str) -> str:
    """The line that counts: ``"3 of 12 baselines, of 2 tests on 1 device, in gpumem-baselines"``.

    ``where`` is shown as it is: a URL has no credentials any more.
    """
    tests = len({(one.key.file, one.key.test) for one in baselines})
    devices = len({one.slug for one in baselines})
    several = f"{len(baselines)} baselines" if len(baselines) == of else f"{len(baselines)} of {of} baselines"
    counted = "1 baseline" if len(baselines) == of == 1 else several
    if not baselines:
        return f"{counted} in {where}"
    return f"{counted}, of {tests} test{'' if tests == 1 else 's'} on {devices} device{'' if devices == 1 else 's'}, in {where}"


def to_json(baselines: Sequence[StoredBaseline], where: str) -> str:
    """The baselines for programs; values are in bytes, counts, seconds and items a second. ``where``: see `accounting`."""
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
        "metrics": dict(_ordered(entry.metrics)),
        "runs": None if entry.runs is None else {"seconds": entry.runs.seconds, "cycles": entry.runs.cycles},
        "recorded": entry.recorded,
        "commit": entry.commit,
        "reason": entry.reason,
        "composition": None if composition is None else [row.text() for row in composition.rows],
    }


def _ordered(metrics: Mapping[str, float]) -> dict[str, float]:
    return {name: metrics[name] for name in METRICS if name in metrics}


def _is_told(name: str, baselines: Sequence[StoredBaseline], *, everything: bool) -> bool:
    values = [one.entry.metrics[name] for one in baselines if name in one.entry.metrics]
    return bool(values) if everything else METRICS[name].has_column(values)


def _cell(name: str, entry: Baseline, units: UnitSystem) -> str:
    value = entry.metrics.get(name)
    if value is None:
        return "-"
    told = shown(name, value, units)
    if name != "step_time":
        return told
    if entry.runs is None:
        return told
    runs = len(entry.runs.seconds)
    return f"{told} ({runs} run{'' if runs == 1 else 's'})"
