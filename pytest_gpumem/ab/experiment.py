"""Takes runs of two revisions in turns until enough has been seen.

Runs are base, head, head, base, base, head, ...: what drifts on a machine (heat, load, clocks) then meets both sides alike,
and neighbours make a pair.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from pytest_gpumem.ab.runs import BASE, HEAD
from pytest_gpumem.gate.verdict import Outcome
from pytest_gpumem.timing.comparison import FEWEST_PAIRS

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator, Sequence

    from pytest_gpumem.ab.runs import Run, Side
    from pytest_gpumem.reports.comparison import Change, Compared

PAIRS_WITHOUT_TIME = 2
"""Bytes and counts repeat exactly; a second run of each side shows that they do."""


def reports_in_turns(
    take: Callable[[Side, int], Run], compare: Callable[[Sequence[tuple[Run, Run]]], Compared], most_pairs: int
) -> Iterator[Compared]:
    """Yield a report after each pair of runs, until no more are needed.

    ``take`` makes a run of a side, which is given its number; ``compare`` makes the report on pairs (base, head).
    """
    pairs: list[tuple[Run, Run]] = []
    before = None
    for number in range(most_pairs):
        runs = {side: take(side, 2 * number + turn) for turn, side in enumerate(order_of_pair(number), 1)}
        pairs.append((runs[BASE], runs[HEAD]))
        report = compare(pairs)
        yield report
        if is_settled(report, before):
            return
        before = report


def order_of_pair(number: int) -> tuple[Side, Side]:
    """Return the sides of a pair in the order in which they run; pairs count from 0."""
    return (BASE, HEAD) if number % 2 == 0 else (HEAD, BASE)


def is_settled(now: Compared, before: Compared | None) -> bool:
    """Tell whether more pairs would change nothing; ``before`` is the report without the last pair."""
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
