"""Rates of one step against another: memory saving, time increase, and the return on it. Pure."""

from __future__ import annotations

import math
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from typing_extensions import Self

WORTH_IT = 1.5
"""The saving over the cost from which on a technique is recommended."""


class Rate(float):
    """A ratio that says, in a failed assertion, which figures it was made of."""

    __slots__ = ("said",)
    said: str

    def __new__(cls, value: float, said: str) -> Self:
        rate = super().__new__(cls, value)
        rate.said = said
        return rate

    def __repr__(self) -> str:
        return f"{float(self):.3f} ({self.said})"

    def __reduce__(self) -> tuple[type[Rate], tuple[float, str]]:
        return type(self), (float(self), self.said)


def return_on(saving: float, cost: float) -> float:
    """Return ``saving / cost``; infinite when it costs nothing, 0 when it saves nothing."""
    if saving <= 0:
        return 0.0
    return saving / cost if cost > 0 else math.inf
