"""Peak memory of each step in a measurement that ran several steps, and its variation."""

from __future__ import annotations

from dataclasses import dataclass
from statistics import median_low
from typing import TYPE_CHECKING

from pytest_gpumem.base.units import format_bytes
from pytest_gpumem.facts.values.annotations import Count

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
    left_out: Count = 0
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
