"""In which order the two revisions run, and when enough has been seen. Pure.

Runs are base, head, head, base, base, head, ...: what drifts on a machine (heat, load, clocks) then meets both sides alike,
and neighbours make a pair.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Literal

from pytest_gpumem.gate.verdict import Outcome
from pytest_gpumem.timing.comparison import FEWEST_PAIRS

if TYPE_CHECKING:
    from pytest_gpumem.ab.report import Figure, Report

Side = Literal["base", "head"]
BASE: Side = "base"
HEAD: Side = "head"

PAIRS_WITHOUT_TIME = 2
"""Bytes and counts repeat exactly; a second run of each side shows that they do."""


def order_of_pair(number: int) -> tuple[Side, Side]:
    """Which side of a pair runs first; pairs count from 0."""
    return (BASE, HEAD) if number % 2 == 0 else (HEAD, BASE)


def is_settled(now: Report, before: Report | None) -> bool:
    """Whether more pairs would change nothing; ``before`` is the report without the last pair."""
    if not now.rows:
        return True
    if not now.speeds:
        return now.pairs >= PAIRS_WITHOUT_TIME
    earlier = before.speeds if before is not None else {}
    return now.pairs >= FEWEST_PAIRS and all(
        _is_decided(speed, earlier.get(key), now.tolerance) for key, speed in now.speeds.items()
    )


def _is_decided(now: Figure, before: Figure | None, tolerance: float) -> bool:
    if now.word == "not slower":
        return now.interval is not None and now.interval.high <= 1 + tolerance
    # Looking after every pair gives chance several chances: what ends the runs has to be seen twice.
    return now.outcome is not Outcome.UNCERTAIN and before is not None and now.word == before.word
