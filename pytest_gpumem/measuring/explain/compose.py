"""Make the composition of the live bytes at a moment in a timeline. All functions are pure.

Each live block becomes a row with a category. Equal rows are merged.

Example:
    A training step with AdamW, ``Linear(256, 1024)``, relu, ``Linear(1024, 256)`` and batch 64 has its peak in the
    optimizer, at 10,575,904 bytes. Some of the rows::

        category         bytes    module  site      operator        tensor
        optimizer state  2097152  down    fig.py:24                 2 x float32[256, 1024]
        gradient         1048576  down    fig.py:18  AddmmBackward0  float32[256, 1024]
        parameter        1048576  down    fig.py:16                 float32[256, 1024]
        temporary        1048576          fig.py:24  div             float32[256, 1024]
        input              65536                                    float32[64, 256]

    `category_of` decides in this order:

    1. The owner's category, if an ownership snapshot gave the block a label: ``parameter``, ``buffer``, ``gradient``,
       ``optimizer state`` or ``input``.
    2. ``workspace``: the block was freed before the end of the call that allocated the block, or after the step, together with
       the workspaces of the backend (cuBLAS).
    3. ``other``: the block is older than the recording and has no label.
    4. ``temporary``: an autograd node allocated the block, in backward.
    5. All other blocks come from Python code. A block from an optimizer is ``temporary`` if it was freed, and otherwise
       ``other``. A block from a module is ``activation`` if it outlived the module's call, and otherwise ``temporary``. A
       block from outside all modules is ``activation`` if it was live when backward began to run nodes. If not, it is
       ``temporary`` if it was freed by the end of the step, and otherwise ``other``.
"""

from __future__ import annotations

from bisect import bisect_right
from dataclasses import replace
from typing import TYPE_CHECKING

from pytest_gpumem.base.units import format_bytes, word_form
from pytest_gpumem.facts.values.composition import (
    Composition,
    Row,
    either_row,
    holder_at,
    join_layers,
    merge_rows,
    sort_holders,
)
from pytest_gpumem.facts.values.source_lines import all_chains
from pytest_gpumem.measuring.explain.renewed_inputs import renewals
from pytest_gpumem.measuring.explain.survivors import is_workspace, survivors_of
from pytest_gpumem.measuring.explain.trace import Label, Mark

if TYPE_CHECKING:
    from collections.abc import Iterable, Iterator, Mapping, Sequence

    from pytest_gpumem.facts.values.composition import Holder
    from pytest_gpumem.measuring.explain.blocks import Lifetime, Timeline
    from pytest_gpumem.measuring.explain.survivors import AmbiguousBlocks, Replacement


def composition_at(timeline: Timeline, moment: int, own: int) -> Composition:
    """Return the composition right after the token at ``moment``.

    Args:
        timeline: The recorded step.
        moment: An index into the recording's tokens; -1 for the beginning of the recording.
        own: The step's own bytes when the recording began.
    """
    live = timeline.live[moment] if moment >= 0 else 0
    composition = _composition(timeline, timeline.at(moment), own + live)
    phase = next((block.phase for block in timeline.lifetimes if block.allocated == moment >= 0), "")
    return replace(composition, no_grad=timeline.no_grad, no_backward=timeline.no_backward, phase=phase)


def composition_of_peak(timeline: Timeline, own: int) -> Composition:
    """Return the composition at the peak of the step."""
    return composition_at(timeline, timeline.peak, own)


def compositions_of_phases(timeline: Timeline, own: int) -> dict[str, Composition]:
    """Return the composition at the peak of each phase, except the phase with the step's peak."""
    return {
        phase: composition_at(timeline, moment, own)
        for phase, moment in timeline.phases.items()
        if moment != timeline.peak
    }


def composition_of_retained(timeline: Timeline, growth: int = 0) -> Composition:
    """Return the composition of the bytes kept by the step after its end. ``growth`` are the bytes kept by each step."""
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
            f"{format_bytes(survivors.difference)} is the difference between a tensor and the smaller tensor that it replaces, "
            "as with torch.cat on a cache"
        )
    return Composition(
        survivors.nbytes, join_layers(merge_rows(rows), timeline.layers), timeline.recomputed, tuple(notes)
    )


def holders_in(timeline: Timeline, paths: Mapping[int, str], growth: int = 0) -> tuple[Holder, ...]:
    """Return the holders of the bytes kept by the step after its end.

    If it is unknown which of several blocks the step keeps, the result names the holders of all these blocks as alternatives.

    Args:
        timeline: The recorded step and the following steps.
        paths: For each live block at the end of the recording, the path to the block's holder, by the block's address.
        growth: The bytes kept by each step, as in `survivors_of`.
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
    """Yield the blocks that replaced smaller blocks, with a row for the bytes by which these blocks have grown.

    For example, a line replaces a cache of keys and a cache of values by longer caches. If both have the same size, both have
    grown equally, and each gets its own row. If the sizes differ, only the sum of the growth is known. Then a single row stands
    for all blocks.
    """
    row = _row(larger.block, timeline)
    number = len(larger.latest)
    is_shared = number > 1 and len({block.nbytes for block in larger.latest}) == 1 and larger.nbytes % number == 0
    for blocks in ([block] for block in larger.latest) if is_shared else [larger.latest]:
        yield blocks, replace(row, nbytes=larger.nbytes // number if is_shared else larger.nbytes)


def holders_of_inputs_in(timeline: Timeline, paths: Mapping[int, str]) -> tuple[Holder, ...]:
    """Return the holders of inputs that the step frees and creates again. ``paths`` is the same as in `holders_in`."""
    rows = [
        ([renewal.latest], _row(renewal.freed, timeline))
        for renewal in renewals(timeline)
        if renewal.freed.own and renewal.latest is not None
    ]
    return _holders(timeline, rows, paths)


def _holders(
    timeline: Timeline, rows: Iterable[tuple[Sequence[Lifetime], Row]], paths: Mapping[int, str]
) -> tuple[Holder, ...]:
    """Return the rows' holders. Each row comes with the blocks that may contain its bytes.

    A row is dropped if ``paths`` contains none of its blocks.
    """
    rows_by_paths: dict[frozenset[str], list[Row]] = {}
    for blocks, row in rows:
        row_paths = frozenset(paths[block.address] for block in blocks if block.address in paths)
        if row_paths:
            rows_by_paths.setdefault(row_paths, []).append(row)
    return sort_holders(
        holder_at(
            row_paths,
            Composition(sum(row.nbytes for row in held_rows), join_layers(merge_rows(held_rows), timeline.layers)),
        )
        for row_paths, held_rows in rows_by_paths.items()
    )


def _row_of_ambiguous(pool: AmbiguousBlocks, timeline: Timeline) -> Row:
    """Return a single row for ambiguous blocks, with all their lines and operators."""
    rows = (_row(block, timeline) for block in pool.blocks)
    return either_row(rows, pool.blocks[0].nbytes * pool.number, pool.number)


def _note_on_ambiguous(pool: AmbiguousBlocks) -> str:
    nbytes, number = format_bytes(pool.blocks[0].nbytes), len(pool.blocks)
    freed = number - pool.number
    return (
        f"{pool.number} of {number} tensors with {nbytes} each {word_form(pool.number, 'is', 'are')} kept, but it is not known "
        f"which, because the step freed {freed} older {word_form(freed, 'tensor', 'tensors')} with this size"
    )


def composition_of_garbage(timeline: Timeline) -> Composition:
    """Return the composition of the blocks freed only by Python's cyclic collector, after the step."""
    if timeline.garbage is None:
        return Composition(0, ())
    begin, end = timeline.garbage
    collected = [block for block in timeline.lifetimes if block.freed is not None and begin <= block.freed <= end]
    return _composition(timeline, collected, sum(block.nbytes for block in collected))


def _composition(timeline: Timeline, lifetimes: Iterable[Lifetime], total: int) -> Composition:
    rows = join_layers(merge_rows(_row(block, timeline) for block in lifetimes if block.own), timeline.layers)
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
    """Return a block's category. Without an owner, the category depends on the allocating code and the lifetime."""
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
    """Return the category for a block allocated by forward, recomputed code, or an optimizer."""
    if block.in_optimizer:
        return "temporary" if block.freed is not None else "other"
    if block.module_ended is not None:
        return "temporary" if _freed_by(block, block.module_ended) else "activation"
    # A block from outside all modules is an activation if it is still live when backward runs the next node.
    after = bisect_right(timeline.nodes, block.allocated)
    if after < len(timeline.nodes) and not _freed_by(block, timeline.nodes[after]):
        return "activation"
    ended = timeline.step_ended if timeline.step_ended is not None else len(timeline.live)
    return "temporary" if _freed_by(block, ended) else "other"


def _freed_by(block: Lifetime, moment: int | None) -> bool:
    return moment is not None and block.freed is not None and block.freed <= moment
