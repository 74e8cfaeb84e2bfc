"""Ratios between two steps: how much memory a technique saves, how much time it costs, and saving divided by cost."""

from __future__ import annotations

import math
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from typing_extensions import Self

WORTH_IT = 1.5
"""A technique is recommended if its memory saving is at least 1.5 times its time cost. For example, a technique that saves 30 %
of the memory may take up to 20 % more time."""


class Rate(float):
    """A ratio that shows the two compared figures in a failed assertion: ``0.250 (peak 30.00 MB against 40.00 MB)``."""

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
    """Return ``saving / cost``; infinity if the technique costs no time, and 0 if the technique saves no memory.

    Example:
        A technique saves 30 % of the peak and adds 20 % to the time, so its return is 1.5.
    """
    if saving <= 0:
        return 0.0
    return saving / cost if cost > 0 else math.inf
