"""Signs of life of ranks, and from them which rank is stuck. Pure, but for reading where a thread stands."""

from __future__ import annotations

import os
import sys
from collections import Counter
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

from pytest_gpumem.ranks.consensus import Point
from pytest_gpumem.units import agreeing
from pytest_gpumem.values.rank import Rank, in_words

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence
    from types import FrameType

_OURS = f"{Path(__file__).parents[1]}{os.sep}"
_COLLECTIVES = tuple(
    os.path.sep + str(Path("torch", folder)) + os.path.sep
    for folder in ("distributed", "autograd", "cuda", str(Path("nn", "parallel")))
)
"""Folders of torch with functions that call C++ which waits for other ranks: collectives, and what has some in it."""
_SILENT = 10.0
"""Seconds without a sign of life after which a process is said to give none."""


@dataclass(frozen=True, slots=True)
class Position:
    """The position of a rank's main thread. ``line`` is the innermost one of the project: ``"test_it.py:18 in step"``."""

    line: str
    within: str = ""
    """The function of a library that it called, if it did."""
    collective: bool = False
    """True if that one may be waiting for other ranks."""

    def __str__(self) -> str:
        return f"{self.line}, within {self.within}" if self.within else self.line


@dataclass(frozen=True, slots=True)
class Beat:
    """A sign of life of a rank: what it runs, how far it has come, and where it stands."""

    number: int
    where: str
    """``"tests/test_gpt.py::test_step (call)"``, or a clause."""
    point: Point
    measures: bool
    """True if it is within a measured test."""
    position: Position

    @property
    def progress(self) -> tuple[str, int, int, bool]:
        """The part that changes when the rank comes further."""
        return (self.where, *self.point)


def position_of(thread: int, root: Path) -> Position:
    """Return where a thread stands.

    Args:
        thread: Its identifier.
        root: The folder of the project, whose lines are shown.
    """
    frame = sys._current_frames().get(thread)  # noqa: SLF001 - as faulthandler and debuggers do
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
    """Return whether ranks that come no further hold others up: one waits, has not come, or is within a measured test."""
    return any(beat is None or beat.measures or beat.point.waits for beat in beats)


def stuck_text(beats: Sequence[Beat | None], silent: Sequence[float], seconds: float, failed: Mapping[int, str]) -> str:
    """Return which ranks are stuck, and where all of them are, as a clause of several lines.

    Args:
        beats: The latest sign of life of each rank; ``None`` where there was none.
        silent: The seconds since then, of each.
        seconds: How long none of them has come further.
        failed: The text of the failure of each rank whose test failed by itself, so that others wait for it in vain.
    """
    world = len(beats)
    stuck = sorted(failed) or _stuck(beats, silent)
    if failed:
        why = failed[stuck[0]].partition("\n")[0]
        first = f"{Rank(stuck[0], world)} failed by itself {why}"
    elif stuck:
        who = str(Rank(stuck[0], world)) if len(stuck) == 1 else f"{in_words(stuck)} of {world}"
        first = f"{who} did not come further within {seconds:g} s (--gpumem-rank-timeout), and the others wait for "
        first += agreeing(len(stuck), "it", "them")
    else:
        first = f"none of {world} ranks came further within {seconds:g} s (--gpumem-rank-timeout)"
    by_text: dict[str, list[int]] = {}
    for number in sorted(range(world), key=lambda number: (number not in stuck, number)):
        by_text.setdefault(_where(beats[number], silent[number]), []).append(number)
    lines = [first, *(f"  {in_words(numbers)}: {text}" for text, numbers in by_text.items())]
    if failed:
        lines += [f"  and no rank came further within {seconds:g} s", *failed[stuck[0]].split("\n")[1:]]
    return "\n".join(lines)


def _stuck(beats: Sequence[Beat | None], silent: Sequence[float]) -> list[int]:
    """Return the ranks for which the others wait; none where that cannot be told."""
    absent = [number for number, beat in enumerate(beats) if beat is None or silent[number] > _SILENT]
    if absent:
        return absent
    there = [beat for beat in beats if beat is not None]
    arrived = [beat.point.waits for beat in there]
    if any(arrived):
        # Those that wait later than others wait for them; those that wait at the same step wait for all that do not wait.
        furthest = max(beat.point[:2] for beat in there if beat.point.waits)
        return [number for number, beat in enumerate(there) if not (beat.point.waits and beat.point[:2] == furthest)]
    waiting = [beat.position.collective for beat in there]
    if any(waiting) and not all(waiting):
        return [number for number, waits in enumerate(waiting) if not waits]
    (common, times), *_ = Counter(beat.position for beat in there).most_common(1)
    if times > len(there) / 2:
        return [number for number, beat in enumerate(there) if beat.position != common]
    return []


def _where(beat: Beat | None, silent: float) -> str:
    if beat is None:
        return "has not come to its measured tests"
    text = f"in {beat.where}, "
    text += "waiting for the others" if beat.point.waits else f"at {beat.position}"
    return f"{text}; no sign of life for {silent:.0f} s" if silent > _SILENT else text
