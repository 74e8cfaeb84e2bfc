"""A rank's sign of life, which describes its current work, and the search for stuck ranks.

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
"""Folders in torch with functions for collectives. Such a function may wait for other ranks in C++."""
_SILENT = 10.0
"""If a rank gives no sign of life for this many seconds, the report says so."""


@dataclass(frozen=True, slots=True)
class Position:
    """The current line of a rank's main thread.

    For example, a rank waits in a collective at ``"test_it.py:18 in step, within all_reduce"``. Then ``line`` is
    ``"test_it.py:18 in step"``, the innermost line in the project's code, and ``within`` is ``"all_reduce"``.
    """

    line: str
    within: str = ""
    """The innermost function outside the project's code; empty if the thread executes the project's code itself."""
    collective: bool = False
    """True if the innermost function may be waiting for other ranks in a collective."""

    def __str__(self) -> str:
        return f"{self.line}, within {self.within}" if self.within else self.line


@dataclass(frozen=True, slots=True)
class Beat:
    """A sign of life that a rank gives every half second, with its current work and progress."""

    number: int
    """Counts the rank's signs of life, from 1."""
    where: str
    """The rank's current work: ``"tests/test_gpt.py::test_step (call)"``, or a phrase such as ``"the collection"``."""
    point: Point
    """The rank's progress through tests and exchanges."""
    measures: bool
    """True during a measured test."""
    position: Position
    """The current line of the rank's main thread."""

    @property
    def progress(self) -> tuple[str, int, int, bool]:
        """Values for comparing two signs of life. If they are equal, the rank has made no progress in between."""
        return (self.where, *self.point)


def position_of(thread: int, root: Path) -> Position:
    """Return a thread's current line.

    Args:
        thread: The thread's identifier.
        root: The project's folder. Lines in this folder are preferred to lines in libraries.
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
    """Return whether a lack of progress means that ranks are stuck.

    This is so if a rank waits, is missing, or runs a measured test. By contrast, unmeasured tests may take any time.
    """
    return any(beat is None or beat.measures or beat.point.waits for beat in beats)


def stuck_text(beats: Sequence[Beat | None], silent: Sequence[float], seconds: float, failed: Mapping[int, str]) -> str:
    """Return a text for the report: a line with the stuck ranks, and lines with each rank's current work.

    Args:
        beats: The latest sign of life from each rank; ``None`` for a rank without a sign of life.
        silent: For each rank, the seconds since its latest sign of life.
        seconds: The seconds in which no rank has made progress.
        failed: The failure text from each rank whose test has failed. Other ranks may wait for such a rank in a collective.
    """
    world = len(beats)
    stuck = sorted(failed) or _stuck(beats, silent)
    if failed:
        reason = failed[stuck[0]].partition("\n")[0]
        first_line = f"{Rank(stuck[0], world)} failed by itself {reason}"
    elif stuck:
        name = str(Rank(stuck[0], world)) if len(stuck) == 1 else f"{in_words(stuck)} of {world}"
        first_line = f"{name} made no progress within {seconds:g} s (--gpumem-rank-timeout), and the others wait for "
        first_line += word_form(len(stuck), "it", "them")
    else:
        first_line = f"none of {world} ranks made progress within {seconds:g} s (--gpumem-rank-timeout)"
    by_text: dict[str, list[int]] = {}
    for number in sorted(range(world), key=lambda number: (number not in stuck, number)):
        by_text.setdefault(_state_text(beats[number], silent[number]), []).append(number)
    lines = [first_line, *(f"  {in_words(numbers)}: {text}" for text, numbers in by_text.items())]
    if failed:
        lines += [f"  and no rank made progress within {seconds:g} s", *failed[stuck[0]].split("\n")[1:]]
    return "\n".join(lines)


def _stuck(beats: Sequence[Beat | None], silent: Sequence[float]) -> list[int]:
    """Return the ranks for which the other ranks wait. The list is empty if the signs of life do not show this.

    For example, if ranks 0 and 2 wait in a test's fourth exchange while rank 1 computes, rank 1 is stuck. If no rank waits in
    an exchange, and three of four ranks are at the same line, the fourth rank is stuck.
    """
    absent = [number for number, beat in enumerate(beats) if beat is None or silent[number] > _SILENT]
    if absent:
        return absent
    present = [beat for beat in beats if beat is not None]
    arrived = [beat.point.waits for beat in present]
    if any(arrived):
        # The ranks in the latest exchange wait for all other ranks.
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
        return "has not started its measured tests"
    text = f"in {beat.where}, "
    text += "waiting for the others" if beat.point.waits else f"at {beat.position}"
    return f"{text}; no sign of life for {silent:.0f} s" if silent > _SILENT else text
