"""The default for a session without ranks: a single process, which decides about its tests alone."""

from __future__ import annotations

from typing import TYPE_CHECKING

from pytest_gpumem.measuring.ranks.consensus import ALONE

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

    from pytest_gpumem.facts.values.rank import Rank
    from pytest_gpumem.judging.gate.verdict import TestVerdict
    from pytest_gpumem.measuring.ranks.consensus import Alone


class OneProcess:
    """A session in a single process, without ranks."""

    rank: Rank | None = None
    consensus: Alone = ALONE
    command: Sequence[str] = ("pytest",)
    """The words of the command that starts this session."""

    agreed: Callable[[TestVerdict, Callable[[TestVerdict], TestVerdict]], TestVerdict] | None = None
    """A function that combines all ranks' verdicts on a test and decides about them by its second argument; ``None`` without
    ranks."""
