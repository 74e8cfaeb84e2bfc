"""Composition of the bytes that are live at a moment of a timeline. Pure."""

from __future__ import annotations

from bisect import bisect_right
from dataclasses import replace
from typing import TYPE_CHECKING

from pytest_gpumem.explain.renewed_inputs import renewals
from pytest_gpumem.explain.survivors import is_workspace, survivors_of
from pytest_gpumem.explain.trace import Label, Mark
from pytest_gpumem.units import format_bytes
from pytest_gpumem.values.composition import Composition, Row, holder_at, joined, merged, ranked
from pytest_gpumem.values.source_lines import all_chains

if TYPE_CHECKING:
    from collections.abc import Iterable, Iterator, Mapping, Sequence

    from pytest_gpumem.explain.blocks import Lifetime, Timeline
    from pytest_gpumem.explain.survivors import Ambiguous, Replacement
    from pytest_gpumem.values.composition import Holder


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


def composition_of_retained(timeline: Timeline, growth: int = 0) -> Composition:
    """Return the composition of the bytes kept by the step. ``growth`` is the argument of `survivors_of`."""
    survivors = survivors_of(timeline, growth)
    step = (timeline, *timeline.following)[survivors.step]
    rows = [
        *(_row(block, step) for block in survivors.blocks),
        *(_row_of_ambiguous(pool, step) for pool in survivors.ambiguous),
        *(replace(_row(larger.block, step), nbytes=larger.nbytes) for larger in survivors.replacements),
    ]
    notes = [*map(_note_on_ambiguous, survivors.ambiguous)]
    if survivors.replacements:
        notes.append(
            f"{format_bytes(survivors.difference)} is a difference: a larger tensor replaces the one before, as the result of "
            "torch.cat replaces a cache"
        )
    return Composition(survivors.nbytes, joined(merged(rows), timeline.layers), timeline.recomputed, tuple(notes))


def holders_in(timeline: Timeline, paths: Mapping[int, str], growth: int = 0) -> tuple[Holder, ...]:
    """Return the holders of the bytes kept by the step.

    A holder is certain unless its blocks are ambiguous and these blocks have several holders.

    Args:
        timeline: The recorded step and the following steps.
        paths: The path to the holder of each block that is live at the end of the recording, by address.
        growth: The argument of `survivors_of`.
    """
    survivors = survivors_of(timeline, growth)
    step = (timeline, *timeline.following)[survivors.step]
    rows = [
        *(([block], _row(block, step)) for block in survivors.blocks),
        *((pool.blocks, _row_of_ambiguous(pool, step)) for pool in survivors.ambiguous),
        *(part for larger in survivors.replacements for part in _rows_of_replacement(larger, step)),
    ]
    return _holders(timeline, rows, paths)


def _rows_of_replacement(larger: Replacement, timeline: Timeline) -> Iterator[tuple[Sequence[Lifetime], Row]]:
    """Yield the latest blocks of a replacement, with the difference as a row.

    If several blocks have equal sizes, their differences are equal. Example: a line replaces a cache of keys and a cache of
    values. Otherwise the difference of each block is not known, and the row has all blocks.
    """
    row = _row(larger.block, timeline)
    number = len(larger.latest)
    is_shared = number > 1 and len({block.nbytes for block in larger.latest}) == 1 and larger.nbytes % number == 0
    for blocks in ([block] for block in larger.latest) if is_shared else [larger.latest]:
        yield blocks, replace(row, nbytes=larger.nbytes // number if is_shared else larger.nbytes)


def holders_of_inputs_in(timeline: Timeline, paths: Mapping[int, str]) -> tuple[Holder, ...]:
    """Return the holders of the inputs that the step makes anew. ``paths`` are as for `holders_in`."""
    rows = [
        ([renewal.latest], _row(renewal.freed, timeline))
        for renewal in renewals(timeline)
        if renewal.freed.own and renewal.latest is not None
    ]
    return _holders(timeline, rows, paths)


def _holders(
    timeline: Timeline, rows: Iterable[tuple[Sequence[Lifetime], Row]], paths: Mapping[int, str]
) -> tuple[Holder, ...]:
    """Return the holders of rows, each with the blocks that may be its memory. Without any path a row is left out."""
    rows_at: dict[frozenset[str], list[Row]] = {}
    for blocks, row in rows:
        at = frozenset(paths[block.address] for block in blocks if block.address in paths)
        if at:
            rows_at.setdefault(at, []).append(row)
    return ranked(
        holder_at(at, Composition(sum(row.nbytes for row in its_rows), joined(merged(its_rows), timeline.layers)))
        for at, its_rows in rows_at.items()
    )


def _row_of_ambiguous(pool: Ambiguous, timeline: Timeline) -> Row:
    """Return a row with the lines of all blocks. Its other texts are empty if the blocks differ."""
    rows = merged(_row(block, timeline) for block in pool.blocks)

    def common(texts: Iterable[str], otherwise: str = "") -> str:
        different = set(texts)
        return different.pop() if len(different) == 1 else otherwise

    return Row(
        common((row.category for row in rows), "other"),
        pool.blocks[0].nbytes * pool.number,
        module=common(row.path for row in rows),
        site=" or ".join(sorted({row.where for row in rows if row.where})),
        operator=" or ".join(sorted({row.operator for row in rows if row.operator})),
        tensor=common(row.tensor for row in rows),
        count=pool.number,
    )


def _note_on_ambiguous(pool: Ambiguous) -> str:
    nbytes, number = format_bytes(pool.blocks[0].nbytes), len(pool.blocks)
    freed = number - pool.number
    return (
        f"{pool.number} of {number} tensors with {nbytes} each is kept, and which one is not known: the step freed "
        f"{freed} older of this size"
    )


def composition_of_garbage(timeline: Timeline) -> Composition:
    """Return the composition of what only the cyclic collector freed, after the step."""
    if timeline.garbage is None:
        return Composition(0, ())
    begin, end = timeline.garbage
    collected = [block for block in timeline.lifetimes if block.freed is not None and begin <= block.freed <= end]
    return _composition(timeline, collected, sum(block.nbytes for block in collected))


def _composition(timeline: Timeline, lifetimes: Iterable[Lifetime], total: int) -> Composition:
    rows = joined(merged(_row(block, timeline) for block in lifetimes if block.own), timeline.layers)
    unattributed = total - sum(row.nbytes for row in rows)
    if unattributed:
        rows = (*rows, Row("unattributed", unattributed, count=1))
    return Composition(total, rows, timeline.recomputed)


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
        callers=all_chains([mark.callers]),
    )


def category_of(block: Lifetime, timeline: Timeline) -> str:
    """Return the category of a block: by its owner, or else by its creation site and lifetime."""
    if block.matched is not None:
        return category_of(block.matched, timeline)
    if block.label is not None:
        return block.label.category
    if is_workspace(block, timeline) or (block.allocated >= 0 and _freed_by(block, block.call_ended)):
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


def _freed_by(block: Lifetime, moment: int | None) -> bool:
    return moment is not None and block.freed is not None and block.freed <= moment
