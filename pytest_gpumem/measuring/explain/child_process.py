"""Explain a process's peak from its recorded blocks. All functions are pure."""

from __future__ import annotations

from collections import Counter
from dataclasses import replace
from typing import TYPE_CHECKING

from pytest_gpumem.base.units import format_bytes
from pytest_gpumem.facts.values.composition import (
    Composition,
    Explanation,
    Holder,
    Row,
    join_layers,
    merge_rows,
    sort_holders,
)
from pytest_gpumem.facts.values.layers import layers_of

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable

    from pytest_gpumem.emulating.emulated_process.usage import Frame, Recorded, RecordedBlocks
    from pytest_gpumem.measuring.explain.sites import Site


def process_explanation(
    recorded: Recorded,
    recorded_peak: int,
    peak: int,
    site_of: Callable[[Iterable[Frame]], Site],
    *,
    repeats: bool = False,
) -> Explanation:
    """Return the explanation of a process's peak.

    Memory from backward has the allocating line, for example in a `torch.autograd.Function`. If there is none, it has the line
    in forward that created the autograd node.

    If the second run needed other memory, the explanation is about the second run, and a note says so. A server that keeps
    tensors still has those of the measured run when it runs again. They do not belong to the measured peak.

    Args:
        recorded: The blocks in a second run.
        recorded_peak: The peak in the second run, in bytes as `peak_allocated` counts them.
        peak: The measured peak, in the same bytes.
        site_of: Returns the user's line in a call stack.
        repeats: True for a step, because it ran many times before. Each run left the same blocks as the recorded run, so blocks
            of earlier runs belong to the same line.
    """
    difference = recorded_peak - peak
    at_peak = recorded.at_peak
    if difference > 0:
        at_peak, removed = _without_earlier(at_peak, recorded.retained, difference, repeats=repeats)
        difference -= removed
    notes: list[str] = []
    if repeats:
        with_lines = _with_lines(at_peak, recorded.retained)
        guessed = sum(group.nbytes for group, older in zip(with_lines, at_peak, strict=True) if group != older)
        if guessed:
            notes.append(
                f"{format_bytes(guessed)} at the peak are from before the recorded step, and probably from the same line as its"
                " tensors with the same dtype and shape"
            )
        at_peak = with_lines
    if difference:
        compared = f"{format_bytes(abs(difference))} {'more' if difference > 0 else 'less'}"
        notes.append(f"the recorded run needed {compared} than the measured run, so some rows are missing or wrong")
    rows = _rows(at_peak, recorded.modules, site_of)
    missing = peak + difference - sum(row.nbytes for row in rows)
    if missing > 0:  # by the allocator's rounding
        rows = (*rows, Row("unattributed", missing))
    retained = retained_rows(recorded, site_of)
    return Explanation(_composition(rows, tuple(notes)), _composition(retained), holders=_holders(recorded, site_of))


def retained_rows(recorded: Recorded, site_of: Callable[[Iterable[Frame]], Site]) -> tuple[Row, ...]:
    """Return rows for the blocks left by a recorded run."""
    return _rows(recorded.retained, recorded.modules, site_of)


def _holders(recorded: Recorded, site_of: Callable[[Iterable[Frame]], Site]) -> tuple[Holder, ...]:
    """Return the holders of the retained blocks. They are empty if none were searched."""
    by_path: dict[str, list[RecordedBlocks]] = {}
    for group in recorded.retained:
        if group.holder is not None:
            by_path.setdefault(group.holder, []).append(group)
    return sort_holders(
        Holder(path, _composition(_rows(groups, recorded.modules, site_of))) for path, groups in by_path.items()
    )


def _composition(rows: tuple[Row, ...], notes: tuple[str, ...] = ()) -> Composition:
    return Composition(sum(row.nbytes for row in rows), rows, notes=notes)


def _without_earlier(
    at_peak: Iterable[RecordedBlocks], retained: Iterable[RecordedBlocks], most_bytes: int, *, repeats: bool
) -> tuple[tuple[RecordedBlocks, ...], int]:
    """Return the blocks at the peak without the measured run's leftovers, and the removed bytes.

    The measured run left the same blocks as the recorded run: without a line, and with an equal size, dtype and shape.

    Args:
        at_peak: The blocks at the peak in the recorded run.
        retained: The recorded run's leftovers.
        most_bytes: The most bytes to remove.
        repeats: True if any number of runs came between the measured run and the recorded run.
    """
    left: Counter[tuple[str, int]] = Counter()
    for group in retained:
        left[_kind(group)] += group.count
    kept, removed = [], 0
    for group in at_peak:
        kind, size = _kind(group), group.nbytes // group.count
        most = (most_bytes - removed) // size
        count = min(group.count, most if repeats else min(left[kind], most)) if _is_older(group) and left[kind] else 0
        left[kind] -= 0 if repeats else count
        removed += count * size
        if count < group.count:
            kept.append(replace(group, nbytes=group.nbytes - count * size, count=group.count - count))
    return tuple(kept), removed


def _with_lines(at_peak: Iterable[RecordedBlocks], retained: Iterable[RecordedBlocks]) -> tuple[RecordedBlocks, ...]:
    """Return the blocks at the peak. Blocks from earlier runs get the line of equal blocks in this run.

    This is a guess, because a program may have made an equal tensor elsewhere. If several lines leave blocks with this size,
    dtype and shape, nothing shows which line it was. A size alone is no evidence, so a block without a known dtype and shape
    gets no line.
    """
    lines: dict[tuple[str, int], set[tuple[str, tuple[Frame, ...], str]]] = {}
    for group in retained:
        lines.setdefault(_kind(group), set()).add((group.module, group.frames, group.operator))
    with_lines = []
    for group in at_peak:
        places = lines.get(_kind(group), set()) if _is_older(group) and group.tensor else set()
        ((module, frames, operator),) = places if len(places) == 1 else [(group.module, group.frames, group.operator)]
        with_lines.append(replace(group, module=module, frames=frames, operator=operator))
    return tuple(with_lines)


def _kind(group: RecordedBlocks) -> tuple[str, int]:
    return group.tensor, group.nbytes // group.count


def _is_older(group: RecordedBlocks) -> bool:
    """Return whether blocks are from before the recording, and no module or optimizer refers to them."""
    return not group.frames and group.category == "other"


def _rows(
    blocks: Iterable[RecordedBlocks], modules: Iterable[str], site_of: Callable[[Iterable[Frame]], Site]
) -> tuple[Row, ...]:
    rows = []
    for group in blocks:
        site = site_of(group.frames)
        if not site.user and not site.library:
            site = site_of(group.node_frames)
        callers = (site.callers,) if site.callers else ()
        rows.append(
            Row(
                group.category,
                group.nbytes,
                group.module,
                site.user,
                site.library,
                group.operator,
                group.tensor,
                group.count,
                callers=callers,
            )
        )
    return join_layers(merge_rows(rows), layers_of(modules))
