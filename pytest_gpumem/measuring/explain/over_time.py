"""Compute the live bytes at each moment in a recorded step, by category. All functions are pure."""

from __future__ import annotations

from itertools import accumulate
from typing import TYPE_CHECKING

from pytest_gpumem.facts.values.categories import CATEGORIES
from pytest_gpumem.facts.values.events import AllocationEvent, SpanBegin, SpanEnd
from pytest_gpumem.facts.values.timeline import OverTime, PhaseSpan
from pytest_gpumem.measuring.explain.compose import category_of

if TYPE_CHECKING:
    from collections.abc import Iterator

    from pytest_gpumem.measuring.explain.recording import Recording


def over_time_of(recorded: Recording) -> OverTime:
    """Return the recorded step's live bytes by category, at its beginning and after each allocation and free.

    Example:
        The step in `lifetimes` has 4 points: the beginning and 3 events. ``totals`` are 400, 1200, 1600 and 800 bytes.
    """
    timeline, tokens = recorded.timeline, recorded.trace.tokens
    events = [(n, token) for n, token in enumerate(tokens) if isinstance(token, AllocationEvent)]
    index = {moment: number for number, (moment, _) in enumerate(events)}
    began = next((token.time_ns for token in tokens if isinstance(token, AllocationEvent | SpanBegin | SpanEnd)), 0)
    # The first point shows the bytes before the first event.
    changes = {category: [0] * (len(events) + 1) for category in CATEGORIES}
    for block in timeline.lifetimes:
        if block.own:
            series = changes[category_of(block, timeline)]
            series[0 if block.allocated < 0 else index[block.allocated] + 1] += block.nbytes
            if block.freed is not None:
                series[index[block.freed] + 1] -= block.nbytes
    totals = [recorded.own_bytes, *(recorded.own_bytes + timeline.live[moment] for moment, _ in events)]
    categories = {name: tuple(accumulate(series)) for name, series in changes.items() if any(series)}
    unattributed = tuple(total - sum(series[n] for series in categories.values()) for n, total in enumerate(totals))
    if any(unattributed):
        categories["unattributed"] = unattributed
    return OverTime(
        (0, *(event.time_ns - began for _, event in events)),
        tuple(totals),
        categories,
        index[timeline.peak] + 1 if timeline.peak >= 0 else 0,
        tuple(_phases(recorded, began)),
    )


def _phases(recorded: Recording, began: int) -> Iterator[PhaseSpan]:
    open_spans: list[SpanBegin] = []
    for token in recorded.trace.tokens:
        if isinstance(token, SpanBegin):
            open_spans.append(token)
        elif isinstance(token, SpanEnd):
            span = open_spans.pop()
            mark = recorded.trace.marks[span.mark] if span.kind == "mark" else None
            if mark is not None and mark.kind == "phase":
                yield PhaseSpan(mark.path, span.time_ns - began, token.time_ns - began)
