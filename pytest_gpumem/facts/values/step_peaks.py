"""The peaks of the steps in a measurement."""

from __future__ import annotations

from dataclasses import dataclass
from statistics import median_low
from typing import TYPE_CHECKING

from pytest_gpumem.base.units import format_bytes

if TYPE_CHECKING:
    from collections.abc import Sequence


@dataclass(frozen=True, slots=True)
class StepPeaks:
    """The peaks of all measured steps, in order and in bytes.

    Example:
        >>> StepPeaks((900, 700, 700), left_out=1).repeated
        (700, 700)
    """

    allocated: tuple[int, ...] = ()
    """The allocated bytes at each step's peak."""
    reserved: tuple[int, ...] = ()
    """The reserved bytes at each step's peak. Empty if the device does not reserve memory."""
    left_out: int = 0
    """The number of first steps, which create state. Budgets include these steps. Metrics and baselines leave them out."""

    @property
    def repeated(self) -> tuple[int, ...]:
        """``allocated`` without the first steps, which create state. `peak_allocated` is the highest of these peaks."""
        return self.allocated[self.left_out :]

    @property
    def differ(self) -> bool:
        """True if the peaks in ``repeated`` are not all equal."""
        return len({*self.repeated}) > 1

    def of(self, metric: str) -> tuple[int, ...]:
        """Return the peaks for ``peak_allocated`` or ``peak_reserved``. Other metrics have no peaks."""
        return {"peak_allocated": self.allocated, "peak_reserved": self.reserved}.get(metric, ())


def spread(peaks: Sequence[int]) -> str:
    """Return a clause: ``"between 7.24 MB and 45.00 MB in 19 steps, median 12.10 MB"``."""
    lowest, highest, middle = map(format_bytes, (min(peaks), max(peaks), median_low(peaks)))
    return f"between {lowest} and {highest} in {len(peaks)} steps, median {middle}"


def differ_by_chance(higher: Sequence[int], lower: Sequence[int], allowed: float) -> bool:
    """Return whether a higher maximum may be chance, because the steps' peaks vary.

    The higher maximum is not chance in four cases:

    - The peaks in ``lower`` are all equal.
    - Each step needs at least as much as the same step in ``lower``. This happens in a loop with a fixed seed, and is
      unlikely by chance.
    - The lowest peak in ``higher`` is above the maximum in ``lower``.
    - The maximum is higher than in ``lower`` by more than the range in ``lower``.

    Example:
        ``differ_by_chance((10, 30, 20), (25, 10, 12), 1)`` is ``True``: the maximum is 5 higher, the range of ``lower`` is
        15, and the first step needs less than before.

    Args:
        higher: Peaks in order, in bytes. Their maximum exceeds the maximum in ``lower`` by more than ``allowed``.
        lower: Peaks in order, in bytes.
        allowed: A difference in bytes that is ignored.
    """
    most = max(lower)
    if max(higher) - most > allowed + most - min(lower) or min(higher) - most > allowed:
        return False
    same_steps = list(zip(higher, lower, strict=False))
    return max(peak for peak, _ in same_steps) - most <= allowed or any(
        peak < lower_peak - allowed for peak, lower_peak in same_steps
    )
