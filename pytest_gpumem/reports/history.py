"""The history of a baseline as a table and a plot for a terminal. Pure."""

from __future__ import annotations

from typing import TYPE_CHECKING

from pytest_gpumem.baselines.history import Unreadable
from pytest_gpumem.gate.baseline import Baseline
from pytest_gpumem.metrics import METRICS
from pytest_gpumem.reports.layout import Column, Screen, Span, Table, cells, laid_out
from pytest_gpumem.reports.values import moved, shown

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

    from pytest_gpumem.baselines.history import Event
    from pytest_gpumem.reports.layout import Line, Screen, Style
    from pytest_gpumem.units import UnitSystem


_MARKS = "▁─▔"
_LEVELS = len(_MARKS)
"""A mark low, in the middle and high in a cell."""
_WIDEST = 8
"""How many cells a number takes at most."""


def plot(values: Sequence[float | None], label: Callable[[float], str], screen: Screen, height: int = 6) -> list[str]:
    """A mark for each of ``values``, the last at the right; ``None`` is a gap. Nothing where there are not two to tell apart.

    The axis begins at the smallest and ends at the largest, which ``label`` names; a last line says so where that is not 0.
    So nothing is filled beneath a mark: how long that were would mean nothing. Where there is no room for all, the earliest
    are left out.
    """
    known = [value for value in values if value is not None]
    if len(set(known)) < 2:
        return []
    low, high = min(known), max(known)
    margin = max(cells(screen.legible(label(value))) for value in (low, high)) + 1
    room = max(8, (screen.width or 80) - margin - 1)
    shown = values[-room:]
    wide = min(_WIDEST, room // len(shown))
    marks = _MARKS if screen.legible(_MARKS) == _MARKS else '_-"'
    levels = [
        None if value is None else round((value - low) / (high - low) * (height * _LEVELS - 1)) for value in shown
    ]
    lines = []
    for row in reversed(range(height)):
        name = label(high) if row == height - 1 else label(low) if row == 0 else ""
        cells_of_row = (
            marks[level % _LEVELS] if level is not None and level // _LEVELS == row else " " for level in levels
        )
        columns = "".join(_column(mark, wide) for mark in cells_of_row)
        lines.append(f"{screen.legible(name).rjust(margin)} {columns}".rstrip())
    if low != 0:
        told = f"(the axis begins at {screen.legible(label(low))}, not at 0)"
        lines.append(told.rjust(min(screen.width or 80, margin + 1 + cells(told))))
    return lines


def _column(mark: str, wide: int) -> str:
    """A mark, with a blank that keeps it apart from the next where there is room."""
    return mark * wide if wide == 1 else mark * (wide - 1) + " "


_SHORT = 9
_LEAST = 12
NOT_COMMITTED = "(not committed)"
OR_EARLIER = "(or earlier: this clone is shallow)"


def told_of(events: Sequence[Event], metric: str) -> list[Event]:
    """Those of ``events`` that are to be shown of a metric: it changed, or what it is of did, or why it was accepted."""
    return [
        event
        for event in events
        if not isinstance(event.before, Baseline)
        or not isinstance(event.after, Baseline)
        or event.before.metrics.get(metric) != event.after.metrics.get(metric)
        or event.before.workload != event.after.workload
        or (event.after.reason is not None and event.before.reason != event.after.reason)
    ]


def history_lines(events: Sequence[Event], metric: str, units: UnitSystem, screen: Screen) -> list[Line]:
    """The table, the latest change last; below it a plot, where the values are not all the same, and what is not shown."""
    told = told_of(events, metric)
    first = next((event for event in events if event.after is not None), None)
    rows = [_row(event, metric, units, is_first=event is first) for event in told]
    reasons = any(row[5].text for row in rows)
    columns = (
        Column("date", left=True),
        Column("commit", left=True, weight=1),
        Column("author", left=True, least=_LEAST, weight=0),
        Column(METRICS[metric].title),
        Column("change"),
        Column("reason", left=True, least=_LEAST),
        Column("subject", left=True, least=_LEAST, weight=2),
    )
    kept = [number for number in range(len(columns)) if number != 5 or reasons]
    table = Table(
        tuple(columns[number] for number in kept), tuple(tuple(row[number] for number in kept) for row in rows)
    )
    lines = laid_out(table, screen)
    values = [event.after.metrics.get(metric) if isinstance(event.after, Baseline) else None for event in told]
    plotted = plot(values, lambda value: shown(metric, value, units), screen)
    lines += [(Span(text),) for text in (*([""] if plotted else []), *plotted)]
    others = len(events) - len(told)
    if others:
        said = f"{others} other change{'' if others == 1 else 's'} left {METRICS[metric].title} as it was"
        lines += [(Span(""),), (Span(said, "aside"),)]
    return lines


def _row(event: Event, metric: str, units: UnitSystem, *, is_first: bool) -> Line:
    commit, after = event.commit, event.after
    date = name = author = ""
    subject = NOT_COMMITTED
    if commit is not None:
        date, name, author, subject = commit.date, commit.name[:_SHORT], commit.author, commit.subject
        if commit.cut_off and event.before is None:
            author, subject = "", OR_EARLIER
    if isinstance(after, Unreadable):
        return tuple(map(Span, (date, name, author, "unreadable", "", "", f"{subject}: {after.why}")))
    value = "" if after is None else shown(metric, after.metrics.get(metric), units) or "-"
    change, style = _change(event, metric, units, is_first=is_first)
    reason = after.reason if after is not None and after.reason is not None else ""
    cells = (date, name, author, value, change, reason, subject)
    return tuple(Span(cell, style if number == 4 else None) for number, cell in enumerate(cells))


def _change(event: Event, metric: str, units: UnitSystem, *, is_first: bool) -> tuple[str, Style | None]:
    before, after = event.before, event.after
    if after is None:
        return "gone", "doubtful"
    if before is None:
        return ("new", None) if is_first else ("back", "doubtful")
    if isinstance(before, Unreadable) or isinstance(after, Unreadable):
        return "", None
    old, new = before.metrics.get(metric), after.metrics.get(metric)
    if old is None or new is None or old == new:
        return ("other work" if before.workload != after.workload else ""), None
    text = moved(metric, old, new, units)
    if before.workload != after.workload:
        return f"{text} (other work)", None
    better = new > old if METRICS[metric].larger_is_better else new < old
    return text, "good" if better else "bad"
