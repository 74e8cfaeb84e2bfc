"""Explain a process's peak from the blocks that the process recorded. All functions are pure."""

from __future__ import annotations

import re
from collections import Counter
from dataclasses import replace
from typing import TYPE_CHECKING

from pytest_gpumem.base.units import format_bytes
from pytest_gpumem.facts.values.composition import Composition, Explanation, Row, join_layers, merge_rows
from pytest_gpumem.facts.values.layers import layers_of

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Mapping

    from pytest_gpumem.emulating.emulated_process.usage import Frame, Recorded, RecordedBlocks
    from pytest_gpumem.measuring.explain.sites import Site

_NUMBER = re.compile(r"(?<! rank)(?<! restart) \d+$")


def process_explanation(
    recorded: Recorded,
    recorded_peak: int,
    peak: int,
    site_of: Callable[[Iterable[Frame]], Site],
    *,
    repeats: bool = False,
) -> Explanation:
    """Return the explanation of a process's peak. A process records neither operators nor lines in backward.

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
    if repeats:
        at_peak = _with_lines(at_peak, recorded.retained)
    notes: tuple[str, ...] = ()
    if difference:
        compared = f"{format_bytes(abs(difference))} {'more' if difference > 0 else 'less'}"
        notes = (f"the recorded run needed {compared} than the measured run, so some rows are missing or wrong",)
    rows = _rows(at_peak, recorded.modules, site_of)
    missing = peak + difference - sum(row.nbytes for row in rows)
    if missing > 0:  # by the allocator's rounding
        rows = (*rows, Row("unattributed", missing))
    return Explanation(_composition(rows, notes), _composition(retained_rows(recorded, site_of)))


def retained_rows(recorded: Recorded, site_of: Callable[[Iterable[Frame]], Site]) -> tuple[Row, ...]:
    """Return rows of the blocks that a recorded run left."""
    return _rows(recorded.retained, recorded.modules, site_of)


def processes_again(measured: Mapping[str, int], again: Mapping[str, int]) -> dict[str, str]:
    """Return the name of each process in the recorded run, by its name in the measured run.

    Processes of a program are numbered by their start, so ``serve.py`` and ``serve.py 2`` may change places. Their peaks show
    who is who.

    Example:
        ``{"serve.py": "serve.py 2", "serve.py 2": "serve.py"}`` for the measured peaks ``{"serve.py": 5, "serve.py 2": 9}`` and
        the recorded peaks ``{"serve.py": 9, "serve.py 2": 5}``.

    Args:
        measured: The measured peak of each process in bytes, by name.
        again: The recorded peak of each process in bytes, by name.
    """
    names = {name: name for name, peak in measured.items() if again.get(name) == peak}
    for name, peak in measured.items():
        if name not in names:
            free = (other for other in again if _program(other) == _program(name) and other not in names.values())
            equal = next((other for other in free if again[other] == peak), None)
            if equal is not None:
                names[name] = equal
    for name in measured:
        if name not in names and name in again and name not in names.values():
            names[name] = name
    return names


def _program(name: str) -> str:
    """Return a process's name without its number: ``serve.py`` for ``serve.py 2``."""
    return _NUMBER.sub("", name)


def _composition(rows: tuple[Row, ...], notes: tuple[str, ...] = ()) -> Composition:
    return Composition(sum(row.nbytes for row in rows), rows, notes=notes)


def _without_earlier(
    at_peak: Iterable[RecordedBlocks], retained: Iterable[RecordedBlocks], most_bytes: int, *, repeats: bool
) -> tuple[tuple[RecordedBlocks, ...], int]:
    """Return the blocks at the peak without those that the measured run left, and the removed bytes.

    The measured run left the same blocks as the recorded run: without a line, and with an equal size, dtype and shape.

    Args:
        at_peak: The blocks at the peak in the recorded run.
        retained: The blocks that the recorded run left.
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
    """Return the blocks at the peak, in which blocks of earlier runs have the line that leaves such blocks in each run.

    If several lines leave blocks with this size, dtype and shape, nothing shows which line it was.
    """
    lines: dict[tuple[str, int], set[tuple[str, tuple[Frame, ...]]]] = {}
    for group in retained:
        lines.setdefault(_kind(group), set()).add((group.module, group.frames))
    with_lines = []
    for group in at_peak:
        found = lines.get(_kind(group), set()) if _is_older(group) else set()
        ((module, frames),) = found if len(found) == 1 else [(group.module, group.frames)]
        with_lines.append(replace(group, module=module, frames=frames))
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
        callers = (site.callers,) if site.callers else ()
        rows.append(
            Row(
                group.category,
                group.nbytes,
                group.module,
                site.user,
                site.library,
                tensor=group.tensor,
                count=group.count,
                callers=callers,
            )
        )
    return join_layers(merge_rows(rows), layers_of(modules))
