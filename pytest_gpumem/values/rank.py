"""A rank of a distributed job, and how the names of measurements tell ranks apart. Pure."""

from __future__ import annotations

import re
from dataclasses import dataclass

from pytest_gpumem.values.layers import runs

_NAMED = re.compile(r"(.*) rank (\d+) of (\d+)", re.DOTALL)


@dataclass(frozen=True, slots=True, order=True)
class Rank:
    """A rank, the first being 0, among ``world`` of them. As text ``"rank 3 of 4"``."""

    number: int
    world: int

    def __str__(self) -> str:
        return f"rank {self.number} of {self.world}"

    @property
    def is_first(self) -> bool:
        """True if it is the one that writes."""
        return self.number == 0


def name_on(rank: Rank, name: str) -> str:
    """Return the name of a measurement on a rank: ``"train_step rank 3 of 4"``."""
    return f"{name} {rank}"


def rank_in(name: str) -> Rank | None:
    """Return the rank that the name of a measurement ends with; ``None`` where it was taken without ranks."""
    found = _NAMED.fullmatch(name)
    return None if found is None else Rank(int(found[2]), int(found[3]))


def without_rank(name: str) -> str:
    """Return the name of a measurement as its test gave it."""
    found = _NAMED.fullmatch(name)
    return name if found is None else found[1]


def in_words(numbers: list[int]) -> str:
    """Return ``"rank 3"``, ``"ranks 0 and 2"``, ``"ranks 0 to 2 and 5"``."""
    *others, last = runs(sorted(numbers), " to ")
    listed = f"{', '.join(others)} and {last}" if others else last
    return f"{'rank' if len(numbers) == 1 else 'ranks'} {listed}"
