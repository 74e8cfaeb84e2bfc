"""Composition of the bytes that are live at a moment of a timeline. Pure."""

from __future__ import annotations

from bisect import bisect_right
from dataclasses import replace
from typing import TYPE_CHECKING

from pytest_gpumem.explain.trace import folded
from pytest_gpumem.values.composition import Composition, Row, merged

if TYPE_CHECKING:
    from collections.abc import Iterable

    from pytest_gpumem.explain.lifetimes import Lifetime, Timeline


def composition_at(timeline: Timeline, moment: int, own: int) -> Composition:
    """Return the composition right after a moment. ``own`` are the step's bytes when the recording began."""
    live = timeline.live[moment] if moment >= 0 else 0
    composition = _composition(timeline, timeline.at(moment), own + live)
    return replace(composition, no_grad=timeline.no_grad, no_backward=timeline.no_backward)


def composition_of_peak(timeline: Timeline, own: int) -> Composition:
    """Return the composition at the peak of the step."""
    return composition_at(timeline, timeline.peak, own)


def composition_of_retained(timeline: Timeline) -> Composition:
    """Return the composition of retained bytes: allocated in the step, and live after garbage was collected."""
    left = left_by(timeline)
    return _composition(timeline, left, sum(life.nbytes for life in left))


def left_by(timeline: Timeline) -> list[Lifetime]:
    """Return the blocks that the step allocated and that are live after garbage was collected."""
    return [
        life for life in timeline.lives if life.born >= 0 and life.died is None and not _is_workspace(life, timeline)
    ]


def composition_of_garbage(timeline: Timeline) -> Composition:
    """Return the composition of what only the cyclic collector freed, after the step."""
    if timeline.garbage is None:
        return Composition(0, ())
    begin, end = timeline.garbage
    collected = [life for life in timeline.lives if life.died is not None and begin <= life.died <= end]
    return _composition(timeline, collected, sum(life.nbytes for life in collected))


def _composition(timeline: Timeline, lives: Iterable[Lifetime], total: int) -> Composition:
    rows = merged(_row(life, timeline) for life in lives if life.own)
    unattributed = total - sum(row.nbytes for row in rows)
    if unattributed:
        rows = (*rows, Row("unattributed", unattributed, count=1))
    return Composition(total, rows, timeline.recomputed)


def _row(life: Lifetime, timeline: Timeline) -> Row:
    category = category_of(life, timeline)
    life = life.like or life
    mark, label = life.mark, life.label
    row = Row(
        category,
        life.nbytes,
        module=folded(mark.path) if mark is not None else "",
        site=mark.site if mark is not None else "",
        library=mark.library if mark is not None else "",
        operator=life.node or life.operator.removeprefix("aten::"),
        tensor=life.tensor,
    )
    if label is None:
        return row
    return replace(
        row,
        module=folded(label.module) or row.module,
        site=row.site or label.site,
        tensor=label.tensor or row.tensor,
    )


def category_of(life: Lifetime, timeline: Timeline) -> str:
    """Return the category of a block: by its owner, or else by its creation site and lifetime."""
    if life.like is not None:
        return category_of(life.like, timeline)
    if life.label is not None:
        return life.label.category
    if life.born < 0:
        return "other"
    if _is_workspace(life, timeline) or _died_by(life, life.call_ended):
        return "workspace"
    if life.node:
        return "temporary"
    return _of_python_code(life, timeline)


def _of_python_code(life: Lifetime, timeline: Timeline) -> str:
    """Return the category of a block that forward, recomputed code, or an optimizer allocated."""
    if life.in_optimizer:
        return "temporary" if life.died is not None else "other"
    if life.module_ended is not None:
        return "temporary" if _died_by(life, life.module_ended) else "activation"
    # Outside of every module: backward tells whether it was made for it.
    after = bisect_right(timeline.nodes, life.born)
    if after < len(timeline.nodes) and not _died_by(life, timeline.nodes[after]):
        return "activation"
    ended = timeline.step_ended if timeline.step_ended is not None else len(timeline.live)
    return "temporary" if _died_by(life, ended) else "other"


def _is_workspace(life: Lifetime, timeline: Timeline) -> bool:
    """Return whether the block was freed with the workspaces that the backend gave back after the step."""
    if timeline.workspaces is None or life.died is None:
        return False
    begin, end = timeline.workspaces
    return begin <= life.died <= end


def _died_by(life: Lifetime, moment: int | None) -> bool:
    return moment is not None and life.died is not None and life.died <= moment
