"""Takes runs of two revisions in turns until enough has been seen, and keeps what is known meanwhile.

Runs are base, head, head, base, base, head, ...: what drifts on a machine (heat, load, clocks) then meets both sides alike,
and neighbours make a pair.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from pytest_gpumem.ab.runs import BASE, HEAD
from pytest_gpumem.gate.verdict import Outcome
from pytest_gpumem.timing.comparison import FEWEST_PAIRS

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

    from pytest_gpumem.ab.runs import Run, Side
    from pytest_gpumem.reports.comparison import Change, Compared

PAIRS_WITHOUT_TIME = 2
"""Bytes and counts repeat exactly; a second run of each side shows that they do."""


class Experiment:
    """``take`` makes a run of a side, which is given its number; ``compare`` makes the report on pairs (base, head)."""

    def __init__(
        self,
        take: Callable[[Side, int], Run],
        compare: Callable[[Sequence[tuple[Run, Run]]], Compared],
        most_pairs: int,
    ) -> None:
        self._take = take
        self._compare = compare
        self._most_pairs = most_pairs
        self.report: Compared | None = None
        """What is known until now; ``None`` before the first pair."""

    def run(self) -> None:
        """Take pairs of runs until no more are needed. What ``take`` raises ends it, with the report as it then is."""
        pairs: list[tuple[Run, Run]] = []
        number = 0
        while len(pairs) < self._most_pairs:
            runs: dict[Side, Run] = {}
            for side in order_of_pair(len(pairs)):
                number += 1
                runs[side] = self._take(side, number)
            pairs.append((runs[BASE], runs[HEAD]))
            before, self.report = self.report, self._compare(pairs)
            if is_settled(self.report, before):
                return


def order_of_pair(number: int) -> tuple[Side, Side]:
    """Which side of a pair runs first; pairs count from 0."""
    return (BASE, HEAD) if number % 2 == 0 else (HEAD, BASE)


def is_settled(now: Compared, before: Compared | None) -> bool:
    """Whether more pairs would change nothing; ``before`` is the report without the last pair."""
    assert now.pairs is not None, "it is of runs in turns"
    if not now.rows:
        return True
    if not now.speeds:
        return now.pairs >= PAIRS_WITHOUT_TIME
    earlier = before.speeds if before is not None else {}
    return now.pairs >= FEWEST_PAIRS and all(
        _is_decided(speed, earlier.get(key), now.tolerance) for key, speed in now.speeds.items()
    )


def _is_decided(now: Change, before: Change | None, tolerance: float) -> bool:
    if now.outcome is Outcome.OK:
        return now.interval is not None and now.interval.high <= 1 + tolerance
    # Looking after every pair gives chance several chances: what ends the runs has to be seen twice.
    return now.outcome is not Outcome.UNCERTAIN and before is not None and now.outcome is before.outcome
