"""Signs of life from ranks, and the decision which rank is stuck.

All functions are pure except `position_of`, which reads a thread's call stack.
"""

from __future__ import annotations

import os
import sys
from collections import Counter
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

from pytest_gpumem.base.units import word_form
from pytest_gpumem.facts.values.rank import Rank, in_words
from pytest_gpumem.measuring.ranks.consensus import Point

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence
    from types import FrameType

_OURS = f"{Path(__file__).parents[2]}{os.sep}"
_COLLECTIVES = tuple(
    os.path.sep + str(Path("torch", folder)) + os.path.sep
    for folder in ("distributed", "autograd", "cuda", str(Path("nn", "parallel")))
)
"""Folders in torch whose functions may wait for other ranks in C++, because they run collectives."""
_SILENT = 10.0
"""After this many seconds without a sign of life, the report mentions the silence."""


@dataclass(frozen=True, slots=True)
class Position:
    """The position of a rank's main thread.

    For example, a rank that waits in a collective has the position ``"test_it.py:18 in step, within all_reduce"``. ``line`` is
    the innermost line from the project, ``"test_it.py:18 in step"``.
    """

    line: str
    within: str = ""
    """The library function that this line called; empty if there is none."""
    collective: bool = False
    """True if the library function may be waiting for other ranks."""

    def __str__(self) -> str:
        return f"{self.line}, within {self.within}" if self.within else self.line


@dataclass(frozen=True, slots=True)
class Beat:
    """A sign of life from a rank: its current work, its progress and its position."""

    number: int
    where: str
    """``"tests/test_gpt.py::test_step (call)"``, or a clause."""
    point: Point
    measures: bool
    """True during a measured test."""
    position: Position

    @property
    def progress(self) -> tuple[str, int, int, bool]:
        """The values that change when the rank makes progress."""
        return (self.where, *self.point)


def position_of(thread: int, root: Path) -> Position:
    """Return the current position of a thread.

    Args:
        thread: The thread's identifier.
        root: The project's folder. The position is a line from this folder if possible.
    """
    frame = sys._current_frames().get(thread)  # noqa: SLF001 - faulthandler and debuggers do the same
    innermost = frame
    file = "" if innermost is None else innermost.f_code.co_filename
    collective = any(folder in file for folder in _COLLECTIVES)
    while frame is not None:
        file = frame.f_code.co_filename
        if file.startswith(f"{root}{os.sep}") and "site-packages" not in file and not file.startswith(_OURS):
            within = "" if frame is innermost else _function(innermost)
            return Position(
                f"{os.path.relpath(file, root)}:{frame.f_lineno} in {frame.f_code.co_name}", within, collective
            )
        frame = frame.f_back
    return Position(_function(innermost) or "no line of Python")


def _function(frame: FrameType | None) -> str:
    if frame is None or frame.f_code.co_filename.startswith(_OURS):
        return ""
    return frame.f_code.co_name


def is_stuck(beats: Sequence[Beat | None]) -> bool:
    """Return whether a lack of progress is an error. It is an error if a rank waits, is missing, or runs a measured test."""
    return any(beat is None or beat.measures or beat.point.waits for beat in beats)


def stuck_text(beats: Sequence[Beat | None], silent: Sequence[float], seconds: float, failed: Mapping[int, str]) -> str:
    """Return a clause with the stuck ranks, and a line for the position of each rank.

    Args:
        beats: The latest sign of life from each rank; ``None`` if the rank gave none.
        silent: For each rank, the seconds since its latest sign of life.
        seconds: The time without progress on any rank, in seconds.
        failed: The failure text for each rank with a failed test. The other ranks wait in vain for these ranks.
    """
    world = len(beats)
    stuck = sorted(failed) or _stuck(beats, silent)
    if failed:
        reason = failed[stuck[0]].partition("\n")[0]
        first_line = f"{Rank(stuck[0], world)} failed by itself {reason}"
    elif stuck:
        name = str(Rank(stuck[0], world)) if len(stuck) == 1 else f"{in_words(stuck)} of {world}"
        first_line = (
            f"{name} did not come further within {seconds:g} s (--gpumem-rank-timeout), and the others wait for "
        )
        first_line += word_form(len(stuck), "it", "them")
    else:
        first_line = f"none of {world} ranks came further within {seconds:g} s (--gpumem-rank-timeout)"
    by_text: dict[str, list[int]] = {}
    for number in sorted(range(world), key=lambda number: (number not in stuck, number)):
        by_text.setdefault(_state_text(beats[number], silent[number]), []).append(number)
    lines = [first_line, *(f"  {in_words(numbers)}: {text}" for text, numbers in by_text.items())]
    if failed:
        lines += [f"  and no rank came further within {seconds:g} s", *failed[stuck[0]].split("\n")[1:]]
    return "\n".join(lines)


def _stuck(beats: Sequence[Beat | None], silent: Sequence[float]) -> list[int]:
    """Return the ranks for which the other ranks wait; an empty list if the signs of life do not show such ranks.

    For example, ranks 0 and 2 wait in exchange 4 of a test and rank 1 computes. Rank 1 is stuck. If no rank waits in an
    exchange, and three of four ranks are at the same line, the fourth rank is stuck.
    """
    absent = [number for number, beat in enumerate(beats) if beat is None or silent[number] > _SILENT]
    if absent:
        return absent
    present = [beat for beat in beats if beat is not None]
    arrived = [beat.point.waits for beat in present]
    if any(arrived):
        # The ranks at the furthest exchange wait for all ranks that are behind them or do not wait.
        furthest = max(beat.point[:2] for beat in present if beat.point.waits)
        return [number for number, beat in enumerate(present) if not (beat.point.waits and beat.point[:2] == furthest)]
    waiting = [beat.position.collective for beat in present]
    if any(waiting) and not all(waiting):
        return [number for number, waits in enumerate(waiting) if not waits]
    (common_position, count), *_ = Counter(beat.position for beat in present).most_common(1)
    if count > len(present) / 2:
        return [number for number, beat in enumerate(present) if beat.position != common_position]
    return []


def _state_text(beat: Beat | None, silent: float) -> str:
    if beat is None:
        return "has not come to its measured tests"
    text = f"in {beat.where}, "
    text += "waiting for the others" if beat.point.waits else f"at {beat.position}"
    return f"{text}; no sign of life for {silent:.0f} s" if silent > _SILENT else text
