"""Composition of the bytes that are live at a moment of a timeline. Pure."""

from __future__ import annotations

from bisect import bisect_right
from collections import Counter
from dataclasses import replace
from typing import TYPE_CHECKING, TypeVar

from pytest_gpumem.explain.renewed_inputs import renewals
from pytest_gpumem.explain.trace import Label, Mark
from pytest_gpumem.values.composition import Composition, Holder, Row, joined, merged, ranked

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Mapping

    from pytest_gpumem.explain.lifetimes import Lifetime, Timeline


_T = TypeVar("_T")


def composition_at(timeline: Timeline, moment: int, own: int) -> Composition:
    """Return the composition right after a moment. ``own`` are the step's bytes when the recording began."""
    live = timeline.live[moment] if moment >= 0 else 0
    composition = _composition(timeline, timeline.at(moment), own + live)
    phase = next((block.phase for block in timeline.lifetimes if block.allocated == moment >= 0), "")
    return replace(composition, no_grad=timeline.no_grad, no_backward=timeline.no_backward, phase=phase)


def composition_of_peak(timeline: Timeline, own: int) -> Composition:
    """Return the composition at the peak of the step."""
    return composition_at(timeline, timeline.peak, own)


def compositions_of_phases(timeline: Timeline, own: int) -> dict[str, Composition]:
    """Return the composition at the peak of each phase but the one that has the peak of the step."""
    return {
        phase: composition_at(timeline, moment, own)
        for phase, moment in timeline.phases.items()
        if moment != timeline.peak
    }


def composition_of_retained(timeline: Timeline) -> Composition:
    """Return the composition of retained bytes: allocated in the step, and live after garbage was collected."""
    left = left_by(timeline)
    return _composition(timeline, left, sum(block.nbytes for block in left))


def holders_in(timeline: Timeline, paths: Mapping[int, str]) -> tuple[Holder, ...]:
    """Return the holders of the retained bytes.

    Args:
        timeline: The recorded step.
        paths: The path to the holder of each block that the step left, by address.
    """
    return _holders(timeline, ((block, paths.get(block.address)) for block in left_by(timeline)))


def holders_of_inputs_in(timeline: Timeline, paths: Mapping[int, str]) -> tuple[Holder, ...]:
    """Return the holders of the inputs that the step makes anew. ``paths`` are as for `holders_in`."""
    return _holders(timeline, ((freed, paths.get(made.address)) for freed, made in renewals(timeline.lifetimes)))


def _holders(timeline: Timeline, blocks_with_paths: Iterable[tuple[Lifetime, str | None]]) -> tuple[Holder, ...]:
    of_path: dict[str, list[Lifetime]] = {}
    for block, path in blocks_with_paths:
        if path is not None:
            of_path.setdefault(path, []).append(block)
    return ranked(
        Holder(path, Composition(sum(block.nbytes for block in blocks), _rows(timeline, blocks)))
        for path, blocks in of_path.items()
    )


def left_by(timeline: Timeline) -> list[Lifetime]:
    """Return the blocks that the step allocated and that are live after garbage was collected.

    Without those in whose place an older one was freed: a gradient that is made anew in each step is not kept by it. That is
    first one of the same owner, then any of the same size, whose owner may have been another or not known.
    """
    left = [
        block
        for block in timeline.lifetimes
        if block.allocated >= 0 and block.freed is None and not _is_workspace(block, timeline)
    ]
    replaced = Counter(
        _owner_and_size(block)
        for block in timeline.lifetimes
        if block.own and block.allocated < 0 and block.freed is not None
    )
    kept = _without(left, replaced, _owner_and_size)
    sizes: Counter[int] = Counter()
    for (nbytes, _, _), number in replaced.items():
        sizes[nbytes] += number
    return _without(kept, sizes, lambda block: block.nbytes)


def _without(blocks: Iterable[Lifetime], replaced: Counter[_T], key: Callable[[Lifetime], _T]) -> list[Lifetime]:
    """Return the blocks without as many of each ``key`` as were ``replaced``, which are taken off from that."""
    kept = []
    for block in blocks:
        same = key(block)
        if replaced[same]:
            replaced[same] -= 1
        else:
            kept.append(block)
    return kept


def _owner_and_size(block: Lifetime) -> tuple[int, str, str]:
    label = block.label
    return (block.nbytes, "", "") if label is None else (block.nbytes, label.category, label.module)


def composition_of_garbage(timeline: Timeline) -> Composition:
    """Return the composition of what only the cyclic collector freed, after the step."""
    if timeline.garbage is None:
        return Composition(0, ())
    begin, end = timeline.garbage
    collected = [block for block in timeline.lifetimes if block.freed is not None and begin <= block.freed <= end]
    return _composition(timeline, collected, sum(block.nbytes for block in collected))


def _composition(timeline: Timeline, lifetimes: Iterable[Lifetime], total: int) -> Composition:
    rows = _rows(timeline, lifetimes)
    unattributed = total - sum(row.nbytes for row in rows)
    if unattributed:
        rows = (*rows, Row("unattributed", unattributed, count=1))
    return Composition(total, rows, timeline.recomputed)


def _rows(timeline: Timeline, lifetimes: Iterable[Lifetime]) -> tuple[Row, ...]:
    return joined(merged(_row(block, timeline) for block in lifetimes if block.own), timeline.layers)


def _row(block: Lifetime, timeline: Timeline) -> Row:
    category = category_of(block, timeline)
    block = block.matched or block
    mark, label = block.mark or Mark("call"), block.label or Label(block.address, category)
    return Row(
        category,
        block.nbytes,
        module=label.module or mark.path,
        site=mark.site or label.site,
        library=mark.library,
        operator=block.node or block.operator.removeprefix("aten::"),
        tensor=label.tensor or block.tensor,
    )


def category_of(block: Lifetime, timeline: Timeline) -> str:
    """Return the category of a block: by its owner, or else by its creation site and lifetime."""
    if block.matched is not None:
        return category_of(block.matched, timeline)
    if block.label is not None:
        return block.label.category
    if _is_workspace(block, timeline) or (block.allocated >= 0 and _freed_by(block, block.call_ended)):
        return "workspace"
    if block.allocated < 0:
        return "other"
    if block.node:
        return "temporary"
    return _of_python_code(block, timeline)


def _of_python_code(block: Lifetime, timeline: Timeline) -> str:
    """Return the category of a block that forward, recomputed code, or an optimizer allocated."""
    if block.in_optimizer:
        return "temporary" if block.freed is not None else "other"
    if block.module_ended is not None:
        return "temporary" if _freed_by(block, block.module_ended) else "activation"
    # Outside of every module: an activation lives until backward begins to run nodes.
    after = bisect_right(timeline.nodes, block.allocated)
    if after < len(timeline.nodes) and not _freed_by(block, timeline.nodes[after]):
        return "activation"
    ended = timeline.step_ended if timeline.step_ended is not None else len(timeline.live)
    return "temporary" if _freed_by(block, ended) else "other"


def _is_workspace(block: Lifetime, timeline: Timeline) -> bool:
    """Return whether the block was freed with the workspaces that the backend gave back after the step."""
    if timeline.workspaces is None or block.freed is None:
        return False
    begin, end = timeline.workspaces
    return begin <= block.freed <= end


def _freed_by(block: Lifetime, moment: int | None) -> bool:
    return moment is not None and block.freed is not None and block.freed <= moment
