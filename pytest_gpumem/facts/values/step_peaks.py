"""Peak memory of each step in a measurement that ran several steps, and its variation."""

from __future__ import annotations

from dataclasses import dataclass
from statistics import median_low
from typing import TYPE_CHECKING

from pytest_gpumem.base.units import format_bytes

if TYPE_CHECKING:
    from collections.abc import Sequence


@dataclass(frozen=True, slots=True)
class StepPeaks:
    """The peak of each measured step in bytes, in the order of the steps.

    Example:
        >>> StepPeaks((900, 700, 700), left_out=1).repeated
        (700, 700)
    """

    allocated: tuple[int, ...] = ()
    """The highest number of allocated bytes in each step."""
    reserved: tuple[int, ...] = ()
    """The highest number of bytes that the allocator reserved in each step. Empty if the device does not reserve memory."""
    left_out: int = 0
    """The number of steps at the beginning that create state, for example AdamW's averages. Budgets include these steps, but
    metrics and baselines ignore them."""

    @property
    def repeated(self) -> tuple[int, ...]:
        """The allocated peaks of the steps after the first `left_out` steps. The metric `peak_allocated` is their maximum."""
        return self.allocated[self.left_out :]

    @property
    def differ(self) -> bool:
        """True if at least two steps after the first `left_out` steps have different allocated peaks."""
        return len({*self.repeated}) > 1

    def of(self, metric: str) -> tuple[int, ...]:
        """Return each step's peak for the metric ``peak_allocated`` or ``peak_reserved``; empty for other metrics."""
        return {"peak_allocated": self.allocated, "peak_reserved": self.reserved}.get(metric, ())


def spread(peaks: Sequence[int]) -> str:
    """Return peaks as a text: ``"between 7.24 MB and 45.00 MB in 19 steps, median 12.10 MB"``."""
    lowest, highest, middle = map(format_bytes, (min(peaks), max(peaks), median_low(peaks)))
    return f"between {lowest} and {highest} in {len(peaks)} steps, median {middle}"


def differ_by_chance(higher: Sequence[int], lower: Sequence[int], allowed: float) -> bool:
    """Return whether chance may explain that one measurement's highest peak exceeds another's, because steps' peaks vary.

    In four cases, chance does not explain the difference:

    - The peaks in ``lower`` are all equal.
    - Each step in ``higher`` needs at least as much as the same step in ``lower``. With a fixed seed, a regression looks like
      this. With chance, some steps would need less.
    - Even the lowest peak in ``higher`` exceeds all peaks in ``lower``.
    - The maximum of ``higher`` exceeds the maximum of ``lower`` by more than the range of ``lower`` (maximum minus minimum).

    Example:
        ``differ_by_chance((10, 30, 20), (25, 10, 12), 1)`` is ``True``. The maximum grew from 25 to 30, but the peaks in
        ``lower`` range from 10 to 25, and the first step needs less than in ``lower``.

    Args:
        higher: Each step's peak in bytes. The maximum exceeds the maximum of ``lower`` by more than ``allowed``.
        lower: Each step's peak in the other measurement, in bytes.
        allowed: A difference of at most this many bytes counts as equal.
    """
    most = max(lower)
    if max(higher) - most > allowed + most - min(lower) or min(higher) - most > allowed:
        return False
    same_steps = list(zip(higher, lower, strict=False))
    return max(peak for peak, _ in same_steps) - most <= allowed or any(
        peak < lower_peak - allowed for peak, lower_peak in same_steps
    )
