"""Takes runs of two revisions in turn until enough has been seen, and keeps what is known meanwhile."""

from __future__ import annotations

from typing import TYPE_CHECKING

from pytest_gpumem.ab.schedule import BASE, HEAD, is_settled, order_of_pair

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

    from pytest_gpumem.ab.report import Report
    from pytest_gpumem.ab.runs import Run
    from pytest_gpumem.ab.schedule import Side


class Experiment:
    """``take`` makes a run of a side, which is given its number; ``compare`` makes the report on pairs (base, head)."""

    def __init__(
        self,
        take: Callable[[Side, int], Run],
        compare: Callable[[Sequence[tuple[Run, Run]]], Report],
        most_pairs: int,
    ) -> None:
        self._take = take
        self._compare = compare
        self._most_pairs = most_pairs
        self.report: Report | None = None
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
