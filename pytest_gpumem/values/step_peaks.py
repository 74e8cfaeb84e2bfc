"""The peaks of the steps that one measurement looked at."""

from __future__ import annotations

from dataclasses import dataclass
from statistics import median_low
from typing import TYPE_CHECKING

from pytest_gpumem.units import format_bytes

if TYPE_CHECKING:
    from collections.abc import Sequence


@dataclass(frozen=True, slots=True)
class StepPeaks:
    """The peaks of all steps that were looked at, in order, in bytes.

    Example:
        >>> StepPeaks((900, 700, 700), left_out=1).repeated
        (700, 700)
    """

    allocated: tuple[int, ...] = ()
    """The allocated bytes at the peak of each step."""
    reserved: tuple[int, ...] = ()
    """The reserved bytes at the peak of each step. Empty if the device does not reserve."""
    left_out: int = 0
    """The number of first steps, which build state. Budgets count them; the metrics, which baselines keep, do not."""

    @property
    def repeated(self) -> tuple[int, ...]:
        """``allocated`` without the first steps, which build state. `peak_allocated` is the highest."""
        return self.allocated[self.left_out :]

    @property
    def differ(self) -> bool:
        """True if the peaks in ``repeated`` are not all equal."""
        return len({*self.repeated}) > 1

    def of(self, metric: str) -> tuple[int, ...]:
        """Return the peaks for ``peak_allocated`` or ``peak_reserved``, and nothing for another metric."""
        return {"peak_allocated": self.allocated, "peak_reserved": self.reserved}.get(metric, ())


def spread(peaks: Sequence[int]) -> str:
    """Return a clause: ``"between 7.24 MB and 45.00 MB in 19 steps, median 12.10 MB"``."""
    lowest, highest, middle = map(format_bytes, (min(peaks), max(peaks), median_low(peaks)))
    return f"between {lowest} and {highest} in {len(peaks)} steps, median {middle}"


def differ_by_chance(higher: Sequence[int], lower: Sequence[int], allowed: float) -> bool:
    """Return whether the highest of some steps may be above that of others by chance, as steps differ.

    Not where ``lower`` are all alike: then ``higher`` have something new. Nor where each step needs at least what the same
    step of ``lower`` needed, which a loop with a fixed seed shows and chance does not; where even the lowest is above the
    highest of ``lower``; or where the highest is further above it than all of ``lower`` are apart.

    Args:
        higher: Peaks in order, in bytes, of which the highest is more than ``allowed`` above that of ``lower``.
        lower: Peaks in order, in bytes.
        allowed: Bytes that are no difference.
    """
    most = max(lower)
    if max(higher) - most > allowed + most - min(lower) or min(higher) - most > allowed:
        return False
    same_steps = list(zip(higher, lower, strict=False))
    return max(one for one, _ in same_steps) - most <= allowed or any(
        one < other - allowed for one, other in same_steps
    )
