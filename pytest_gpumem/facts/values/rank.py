"""A rank in a distributed job, and the names of measurements, which end with their rank. Pure functions."""

from __future__ import annotations

import re
from dataclasses import dataclass

from pytest_gpumem.facts.values.layers import runs

_NAMED = re.compile(r"(.*) rank (\d+) of (\d+)", re.DOTALL)


@dataclass(frozen=True, slots=True, order=True)
class Rank:
    """A process in a distributed job with ``world`` processes. Ranks begin at 0. ``str(Rank(3, 4))`` is ``"rank 3 of 4"``."""

    number: int
    world: int

    def __str__(self) -> str:
        return f"rank {self.number} of {self.world}"

    @property
    def is_first(self) -> bool:
        """True for rank 0, which writes files."""
        return self.number == 0


def name_on(rank: Rank, name: str) -> str:
    """Append a rank to a measurement's name: ``"train_step rank 3 of 4"``."""
    return f"{name} {rank}"


def rank_in(name: str) -> Rank | None:
    """Return the rank with which a measurement's name ends; ``None`` if the name does not end with a rank."""
    match = _NAMED.fullmatch(name)
    return None if match is None else Rank(int(match[2]), int(match[3]))


def without_rank(name: str) -> str:
    """Remove the rank from a measurement's name: ``"train_step"`` for ``"train_step rank 3 of 4"``."""
    match = _NAMED.fullmatch(name)
    return name if match is None else match[1]


def in_words(numbers: list[int]) -> str:
    """Return rank numbers as text: ``"rank 3"``, ``"ranks 0 and 2"`` or ``"ranks 0 to 2 and 5"``."""
    *earlier, last = runs(sorted(numbers), " to ")
    listed = f"{', '.join(earlier)} and {last}" if earlier else last
    return f"{'rank' if len(numbers) == 1 else 'ranks'} {listed}"
