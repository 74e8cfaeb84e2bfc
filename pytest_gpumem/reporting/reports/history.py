"""Show a baseline's history as a table and a plot for the terminal. Pure."""

from __future__ import annotations

from typing import TYPE_CHECKING

from pytest_gpumem.base.units import counted
from pytest_gpumem.facts.measurement import changed_releases
from pytest_gpumem.facts.metrics import METRICS
from pytest_gpumem.judging.baselines.history import UnreadableFile
from pytest_gpumem.judging.gate.baseline import Baseline
from pytest_gpumem.reporting.reports.layout import Column, Screen, Span, Table, cells, laid_out
from pytest_gpumem.reporting.reports.values import moved, shown

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

    from pytest_gpumem.base.units import UnitSystem
    from pytest_gpumem.judging.baselines.history import Event
    from pytest_gpumem.reporting.reports.layout import Line, Screen, Style


_MARKS = "▁─▔"
"""The plot's marks for a value in the lower, middle or upper third of a terminal cell."""
_WIDEST = 8
"""The maximum width of a plotted value, in terminal cells."""


def plot(values: Sequence[float | None], label: Callable[[float], str], screen: Screen, height: int = 6) -> list[str]:
    """Return a plot of ``values`` as lines of text; empty if all values are equal.

    The axis begins at the smallest value. If this value is not 0, the last line of the plot says so. Each value is a mark and
    not a bar, because a bar that does not begin at 0 misleads. A narrow screen shows only the latest values.

    Args:
        values: The values in the order of time; ``None`` leaves a gap.
        label: Returns a value's text, for both ends of the axis.
        screen: The terminal's width and encoding.
        height: The number of lines. Each line shows three levels.
    """
    numbers = [value for value in values if value is not None]
    if len(set(numbers)) < 2:
        return []
    low, high = min(numbers), max(numbers)
    names = {height - 1: screen.legible(label(high)), 0: screen.legible(label(low))}
    margin = max(map(cells, names.values())) + 1
    room = max(8, (screen.width or 80) - margin - 1)
    drawn = values[-room:]
    width = min(_WIDEST, room // len(drawn))
    # A blank follows each mark, unless marks are only one cell wide.
    mark_width, gap = (width, "") if width == 1 else (width - 1, " ")
    marks = _MARKS if screen.legible(_MARKS) == _MARKS else '_-"'
    levels = [
        None if value is None else round((value - low) / (high - low) * (height * len(marks) - 1)) for value in drawn
    ]
    lines = []
    for row in reversed(range(height)):
        in_row = (level is not None and level // len(marks) == row for level in levels)
        drawing = "".join(
            (marks[(level or 0) % len(marks)] if is_marked else " ") * mark_width + gap
            for level, is_marked in zip(levels, in_row, strict=True)
        )
        lines.append(f"{names.get(row, '').rjust(margin)} {drawing}".rstrip())
    if low != 0:
        note = f"(the axis begins at {names[0]}, not at 0)"
        lines.append(note.rjust(min(screen.width or 80, margin + 1 + cells(note))))
    return lines


_SHORT = 9
_LEAST = 12
NOT_COMMITTED = "(not committed)"
OR_EARLIER = "(or earlier: this clone is shallow)"


def _relevant(events: Sequence[Event], metric: str) -> list[Event]:
    """Return the events that matter for ``metric``.

    Such an event adds or removes the baseline, or makes its file unreadable or readable again. Or it changes the metric, the
    workload or a package's release, or gives a new reason for accepting the baseline.
    """
    return [
        event
        for event in events
        if not isinstance(event.before, Baseline)
        or not isinstance(event.after, Baseline)
        or event.before.metrics.get(metric) != event.after.metrics.get(metric)
        or event.before.workload != event.after.workload
        or _packages(event)
        or (event.after.reason is not None and event.before.reason != event.after.reason)
    ]


def _packages(event: Event) -> tuple[str, ...]:
    """Return a clause for each package, including torch, whose release changed together with the baseline."""
    before, after = event.before, event.after
    if not isinstance(before, Baseline) or not isinstance(after, Baseline):
        return ()
    return changed_releases(before.environment.releases, after.environment.releases)


def history_lines(events: Sequence[Event], metric: str, units: UnitSystem, screen: Screen) -> list[Line]:
    """Return a table of changes (the latest last), a plot if values differ, and a line that counts all other changes."""
    relevant = _relevant(events, metric)
    first = next((event for event in events if event.after is not None), None)
    rows = tuple(_row(event, metric, units, is_first=event is first) for event in relevant)
    columns = (
        Column("date", left=True),
        Column("commit", left=True, weight=1),
        Column("author", left=True, least=_LEAST, weight=0),
        Column(METRICS[metric].title),
        Column("change"),
        Column("packages", left=True, least=_LEAST),
        Column("reason", left=True, least=_LEAST),
        Column("subject", left=True, least=_LEAST, weight=2),
    )
    always_shown = [number for number, column in enumerate(columns) if column.title not in ("packages", "reason")]
    lines = laid_out(Table(columns, rows).without_empty(always_shown), screen)
    values = [event.after.metrics.get(metric) if isinstance(event.after, Baseline) else None for event in relevant]
    plotted = plot(values, lambda value: shown(metric, value, units), screen)
    lines += [(Span(text),) for text in (*([""] if plotted else []), *plotted)]
    other_count = len(events) - len(relevant)
    if other_count:
        note = f"{counted(other_count, 'other change')} did not affect {METRICS[metric].title}"
        lines += [(Span(""),), (Span(note, "aside"),)]
    return lines


def _row(event: Event, metric: str, units: UnitSystem, *, is_first: bool) -> Line:
    commit, after = event.commit, event.after
    date = name = author = ""
    subject = NOT_COMMITTED
    if commit is not None:
        date, name, author, subject = commit.date, commit.name[:_SHORT], commit.author, commit.subject
        if commit.cut_off and event.before is None:
            author, subject = "", OR_EARLIER
    if isinstance(after, UnreadableFile):
        return tuple(map(Span, (date, name, author, "unreadable", "", "", "", f"{subject}: {after.why}")))
    value = "" if after is None else shown(metric, after.metrics.get(metric), units) or "-"
    change, style = _change(event, metric, units, is_first=is_first)
    reason = after.reason if after is not None and after.reason is not None else ""
    cells = (date, name, author, value, change, ", ".join(_packages(event)), reason, subject)
    return tuple(Span(cell, style if number == 4 else None) for number, cell in enumerate(cells))


def _change(event: Event, metric: str, units: UnitSystem, *, is_first: bool) -> tuple[str, Style | None]:
    before, after = event.before, event.after
    if after is None:
        return "gone", "doubtful"
    if before is None:
        return ("new", None) if is_first else ("back", "doubtful")
    if isinstance(before, UnreadableFile) or isinstance(after, UnreadableFile):
        return "", None
    old, new = before.metrics.get(metric), after.metrics.get(metric)
    if old is None or new is None or old == new:
        return ("other work" if before.workload != after.workload else ""), None
    text = moved(metric, old, new, units)
    if before.workload != after.workload:
        return f"{text} (other work)", None
    better = new > old if METRICS[metric].larger_is_better else new < old
    return text, "good" if better else "bad"
