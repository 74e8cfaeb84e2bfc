"""The default for a session without ranks: a single process, which decides by itself."""

from __future__ import annotations

from typing import TYPE_CHECKING

from pytest_gpumem.measuring.ranks.consensus import ALONE

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

    from pytest_gpumem.facts.values.rank import Rank
    from pytest_gpumem.judging.gate.verdict import TestVerdict
    from pytest_gpumem.measuring.ranks.consensus import Alone


class OneProcess:
    """A session without other ranks."""

    rank: Rank | None = None
    consensus: Alone = ALONE
    command: Sequence[str] = ("pytest",)
    """The words that start such a session."""

    def agreed(self, verdict: TestVerdict, decide: Callable[[TestVerdict], TestVerdict]) -> TestVerdict:
        """Return the decided verdict on a test. A rank would combine the verdicts of all ranks first."""
        return decide(verdict)
