"""Rates of one step against another: memory saving, time increase, and the return on it. Pure functions."""

from __future__ import annotations

import math
from typing import TYPE_CHECKING, Protocol

from pytest_gpumem.units import format_bytes, format_ratio, format_seconds

if TYPE_CHECKING:
    from typing_extensions import Self

WORTH_IT = 1.5
"""The saving over the cost from which on a technique is recommended."""


class _Device(Protocol):
    @property
    def slug(self) -> str: ...

    @property
    def device(self) -> str: ...


class HasPeakAndTime(Protocol):
    """The figures of a measurement that a rate is made of (`pytest_gpumem.measurement.Measurement`)."""

    @property
    def name(self) -> str: ...

    @property
    def environment(self) -> _Device: ...

    @property
    def peak_allocated(self) -> int: ...

    @property
    def workspaces(self) -> int: ...

    @property
    def step_time(self) -> float: ...

    @property
    def recomputed(self) -> int | None: ...


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


def saves(mine: HasPeakAndTime, other: HasPeakAndTime) -> Rate:
    """Return the memory saving rate: (other - mine) / other, of ``peak_allocated`` without workspaces. 0.3 is 30 % less.

    Raises ``ValueError`` for measurements of different devices, or where ``other`` has no bytes to save.
    """
    _comparable(mine, other)
    before = other.peak_allocated - other.workspaces
    if before <= 0:
        raise ValueError(f"{other.name!r} has no bytes to save: its peak without workspaces is {format_bytes(before)}")
    rate = (before - mine.peak_allocated + mine.workspaces) / before
    return Rate(
        rate,
        f"peak {format_bytes(mine.peak_allocated)} against {format_bytes(other.peak_allocated)}{_why(mine, other)}",
    )


def costs(mine: HasPeakAndTime, other: HasPeakAndTime) -> Rate:
    """Return the time increase rate: (mine - other) / other, of ``step_time``. 0.2 is 20 % longer; negative is faster.

    Raises ``ValueError`` for measurements of different devices, `MissingMetric` when no time was taken.
    """
    _comparable(mine, other)
    rate = (mine.step_time - other.step_time) / other.step_time
    return Rate(rate, f"step time {format_seconds(mine.step_time)} against {format_seconds(other.step_time)}")


def roi(mine: HasPeakAndTime, other: HasPeakAndTime) -> Rate:
    """Return the saving over the cost; above `WORTH_IT` is recommended. Infinite at no cost, 0 when it saves nothing."""
    saving, cost = saves(mine, other), costs(mine, other)
    said = f"saves {format_ratio(saving)}, costs {format_ratio(cost)}"
    return Rate(return_on(saving, cost), said)


def return_on(saving: float, cost: float) -> float:
    """Return ``saving / cost``; infinite when it costs nothing, 0 when it saves nothing."""
    if saving <= 0:
        return 0.0
    return saving / cost if cost > 0 else math.inf


def _comparable(mine: HasPeakAndTime, other: HasPeakAndTime) -> None:
    if mine.environment.slug != other.environment.slug:
        raise ValueError(
            f"{mine.name!r} was measured on {mine.environment.device}, {other.name!r} on {other.environment.device}: "
            "figures of different devices have no relation"
        )


def _why(mine: HasPeakAndTime, other: HasPeakAndTime) -> str:
    """Return further evidence for or against recomputation."""
    if mine.recomputed is None or other.recomputed is None:
        return ""
    if mine.recomputed == 0 and mine.peak_allocated >= other.peak_allocated:
        return "; nothing was computed again in backward"
    if mine.recomputed != other.recomputed:
        return f"; {mine.recomputed} module calls were computed again in backward, {other.recomputed} there"
    return ""
