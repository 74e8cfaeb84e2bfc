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
    either_row,
    join_layers,
    merge_rows,
    sort_holders,
)
from pytest_gpumem.facts.values.layers import layers_of

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Sequence

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
        at_peak, removed = _without_earlier(recorded, difference, repeats=repeats)
        difference -= removed
    notes: list[str] = []
    with_lines, guessed = _with_lines(at_peak, recorded, site_of) if repeats else (_rows(at_peak, site_of), 0)
    if guessed:
        notes.append(
            f"{format_bytes(guessed)} at the peak are from before the recorded step, and probably from the same lines as its "
            "tensors with the same dtype and shape"
        )
    if difference:
        compared = f"{format_bytes(abs(difference))} {'more' if difference > 0 else 'less'}"
        notes.append(f"the recorded run needed {compared} than the measured run, so some rows are missing or wrong")
    rows = join_layers(merge_rows(with_lines), layers_of(recorded.modules))
    missing = peak + difference - sum(row.nbytes for row in rows)
    if missing > 0:  # by the allocator's rounding
        rows = (*rows, Row("unattributed", missing))
    retained = retained_rows(recorded, site_of)
    return Explanation(_composition(rows, tuple(notes)), _composition(retained), holders=_holders(recorded, site_of))


def retained_rows(recorded: Recorded, site_of: Callable[[Iterable[Frame]], Site]) -> tuple[Row, ...]:
    """Return rows for the blocks left by a recorded run."""
    return _joined_rows(recorded.retained, recorded.modules, site_of)


def _holders(recorded: Recorded, site_of: Callable[[Iterable[Frame]], Site]) -> tuple[Holder, ...]:
    """Return the holders of the retained blocks. They are empty if none were searched."""
    by_path: dict[str, list[RecordedBlocks]] = {}
    for group in recorded.retained:
        if group.holder is not None:
            by_path.setdefault(group.holder, []).append(group)
    return sort_holders(
        Holder(path, _composition(_joined_rows(groups, recorded.modules, site_of))) for path, groups in by_path.items()
    )


def _composition(rows: tuple[Row, ...], notes: tuple[str, ...] = ()) -> Composition:
    return Composition(sum(row.nbytes for row in rows), rows, notes=notes)


def _without_earlier(recorded: Recorded, most_bytes: int, *, repeats: bool) -> tuple[tuple[RecordedBlocks, ...], int]:
    """Return the blocks at the peak without leftovers from the measured run and from later runs, and the removed bytes.

    Each run left the same blocks as the recorded run. The leftovers have no line and an equal size. Their dtype and shape are
    equal as well, or unknown, if no tensor refers to them.

    Args:
        recorded: The recorded run.
        most_bytes: The most bytes to remove.
        repeats: True if any number of runs came between the measured run and the recorded run.
    """
    left = _numbers(recorded.retained) - _numbers(recorded.freed)
    each_run = sum(size * count for (tensor, size), count in left.items() if not tensor)
    runs = most_bytes // each_run if repeats and each_run else 1
    room = Counter({kind: count * runs for kind, count in left.items()})
    kept, removed = [], 0
    for group in sorted(recorded.at_peak, key=lambda group: not group.tensor):
        size, kinds = group.nbytes // group.count, _kinds(group)
        most = (most_bytes - removed) // size
        count = min(group.count, most, *(room[kind] for kind in kinds)) if _is_older(group) else 0
        room.subtract(dict.fromkeys(kinds, count))
        removed += count * size
        if count < group.count:
            kept.append(replace(group, nbytes=group.nbytes - count * size, count=group.count - count))
    return tuple(kept), removed


def _with_lines(
    at_peak: Iterable[RecordedBlocks], recorded: Recorded, site_of: Callable[[Iterable[Frame]], Site]
) -> tuple[list[Row], int]:
    """Return the rows at the peak, and the bytes of rows whose line is a guess.

    Blocks from earlier runs get the lines of equal blocks in this run. This is a guess, because a program may have made an
    equal tensor elsewhere. A size alone is no evidence, so a block without a known dtype and shape gets no line.
    """
    kept: dict[tuple[str, int], list[Row]] = {}
    for group in recorded.retained:
        kept.setdefault(_kind(group), []).append(_row(group, site_of))
    freed = _numbers(recorded.freed)
    rows: list[Row] = []
    guessed = 0
    for group in at_peak:
        row, equal = _row(group, site_of), kept.get(_kind(group))
        if equal and group.tensor and _is_older(group):
            is_replaced = ("", group.nbytes // group.count) in freed
            rows += _rows_of_earlier_runs(row, equal, recorded.modules, is_replaced=is_replaced)
            guessed += row.nbytes
        else:
            rows.append(row)
    return rows, guessed


def _rows_of_earlier_runs(row: Row, kept: Iterable[Row], modules: Iterable[str], *, is_replaced: bool) -> Sequence[Row]:
    """Return rows with lines for blocks from earlier runs.

    Example:
        The recorded run kept a tensor at ``serve.py:9``, and an equal tensor at ``serve.py:12``. So 21 older tensors are ten
        tensors from each line, and a tensor from ``serve.py:12 or serve.py:9``. If the run also freed an older tensor with this
        size, a new tensor may only replace it. Then all 21 tensors are from ``serve.py:12 or serve.py:9``.

    Args:
        row: The blocks from earlier runs.
        kept: The rows of equal blocks that the recorded run kept.
        modules: The paths of all modules in the process's models.
        is_replaced: Whether the run freed older blocks with this size.
    """
    places = merge_rows(replace(each, category=row.category) for each in kept)
    if len(places) == 1:
        return [replace(places[0], nbytes=row.nbytes, count=row.count)]
    runs = 0 if is_replaced else row.count // sum(place.count for place in places)
    rows = [replace(place, nbytes=place.nbytes * runs, count=place.count * runs) for place in places if runs]
    rest = row.count - sum(each.count for each in rows)
    if rest:
        joined = join_layers(places, layers_of(modules))
        rows.append(either_row(joined, row.nbytes // row.count * rest, rest))
    return rows


def _numbers(blocks: Iterable[RecordedBlocks]) -> Counter[tuple[str, int]]:
    """Count blocks by their kind. All blocks of a size also count as the kind without a tensor."""
    numbers = Counter[tuple[str, int]]()
    for group in blocks:
        numbers.update(dict.fromkeys(_kinds(group), group.count))
    return numbers


def _kinds(group: RecordedBlocks) -> set[tuple[str, int]]:
    """Return the blocks' kind and the kind without a tensor."""
    return {_kind(group), _kind(replace(group, tensor=""))}


def _kind(group: RecordedBlocks) -> tuple[str, int]:
    return group.tensor, group.nbytes // group.count


def _is_older(group: RecordedBlocks) -> bool:
    """Return whether blocks are from before the recording, and no module or optimizer refers to them."""
    return not group.frames and group.category == "other"


def _joined_rows(
    blocks: Iterable[RecordedBlocks], modules: Iterable[str], site_of: Callable[[Iterable[Frame]], Site]
) -> tuple[Row, ...]:
    return join_layers(merge_rows(_rows(blocks, site_of)), layers_of(modules))


def _rows(blocks: Iterable[RecordedBlocks], site_of: Callable[[Iterable[Frame]], Site]) -> list[Row]:
    return [_row(group, site_of) for group in blocks]


def _row(group: RecordedBlocks, site_of: Callable[[Iterable[Frame]], Site]) -> Row:
    site = site_of(group.frames)
    if not site.user and not site.library:
        site = site_of(group.node_frames)
    return Row(
        group.category,
        group.nbytes,
        group.module,
        site.user,
        site.library,
        group.operator,
        group.tensor,
        group.count,
        callers=(site.callers,) if site.callers else (),
    )
