"""Rates between two steps: the memory saving, the time increase, and the saving divided by the increase. Pure."""

from __future__ import annotations

import math
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from typing_extensions import Self

WORTH_IT = 1.5
"""The smallest return (saving divided by cost) at which a technique is recommended."""


class Rate(float):
    """A ratio whose text in a failed assertion includes the compared figures."""

    __slots__ = ("figures",)
    figures: str

    def __new__(cls, value: float, figures: str) -> Self:
        rate = super().__new__(cls, value)
        rate.figures = figures
        return rate

    def __repr__(self) -> str:
        return f"{float(self):.3f} ({self.figures})"

    def __reduce__(self) -> tuple[type[Rate], tuple[float, str]]:
        return type(self), (float(self), self.figures)


def return_on(saving: float, cost: float) -> float:
    """Return ``saving / cost``, infinity without a cost, and 0 without a saving.

    Example:
        A technique saves 30 % of the peak and adds 20 % to the time, so its return is 1.5.
    """
    if saving <= 0:
        return 0.0
    return saving / cost if cost > 0 else math.inf
