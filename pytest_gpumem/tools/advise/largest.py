"""Search for the largest batch, or the longest sequence, that fits. The result is exact. Pure functions.

The caller runs the step at each size from `next_size`. For example, let a step take 2 GB and 40 MB for each sample, and
let 10 GB be the limit. Sizes 1 and 2 fit. The line through them meets the limit at 200, but 128 is next, because a size is at
most 64 times the largest size that fits. In the next runs 200 fits, and 272 and 201 do not fit: six runs in total.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Literal

if TYPE_CHECKING:
    from collections.abc import Sequence

SizeAxis = Literal["samples", "tokens"]
"""The batch dimension to search."""
OPTIONS: dict[SizeAxis, str] = {"samples": "--largest-batch", "tokens": "--longest-sequence"}
"""The option that searches along each dimension."""
MOST = 10**9 - 1
"""The largest size in a search. Options accept nine digits."""


@dataclass(frozen=True, slots=True)
class SizeTrial:
    """A trial with a size in samples or tokens. ``peak`` is in bytes, or ``None`` if unknown."""

    size: int
    fits: bool
    peak: int | None = None
    why_not: str = ""
    """A clause with the reason why the size cannot run; empty if the step ran, or if memory ran out."""


@dataclass(frozen=True, slots=True)
class Largest:
    """The largest size that fits, and its peak in bytes. ``size`` is 0 if no size fits."""

    size: int
    peak: int | None = None
    why_not_more: str = ""
    """The reason why the next size cannot run, as a clause. Empty if memory runs out."""
    is_known: bool = True
    """False if the search was interrupted, so larger sizes may fit."""


def next_size(
    trials: Sequence[SizeTrial], limit: int, start: int, unit: int = 1, elsewhere: Sequence[SizeTrial] = ()
) -> int | None:
    """Return the next size to try, or ``None`` when the search has ended.

    Memory grows nearly linearly with the size. So the next size is the point at which the line through two trials meets the
    limit. If four trials in a row have the same result, the next size halves the remaining range instead.

    Args:
        trials: The trials so far, in order.
        limit: The bytes that a step may take.
        start: The first size to try.
        unit: All sizes are multiples of this number.
        elsewhere: Trials on another device, on which a step takes nearly the same memory.
    """
    if not trials:
        return max(unit, start // unit * unit)
    low, high = _bounds(trials)
    most = MOST // unit * unit
    if low == most or (high is not None and high.size - low <= unit):
        return None
    last = most if high is None else high.size - unit
    guess = _on_the_line([*elsewhere, *trials], limit, low, high)
    if high is None:
        # A line through nearby sizes predicts distant sizes badly, so growth is limited.
        guess = 2 * low if guess is None else min(guess, 64 * low)
        guess = max(guess, 2 * low - _before(trials, low)) if _one_sided(trials) else guess
    elif guess is None or _one_sided(trials) or (high.peak is None and guess > last):
        guess = (low + high.size) // 2
    return min(last, max(low + unit, guess // unit * unit))


def largest_of(trials: Sequence[SizeTrial], *, finished: bool = True) -> Largest:
    """Return the largest size that fits. ``finished`` is False if the search was interrupted."""
    low, high = _bounds(trials)
    peak = next((trial.peak for trial in trials if trial.size == low), None)
    return Largest(low, peak, "" if high is None else high.why_not, finished)


def _bounds(trials: Sequence[SizeTrial]) -> tuple[int, SizeTrial | None]:
    """Return the largest size that fits, and the trial with the smallest larger size, if any."""
    low = max((trial.size for trial in trials if trial.fits), default=0)
    beyond = [trial for trial in trials if trial.size > low]
    return low, min(beyond, key=lambda trial: trial.size, default=None)


def _on_the_line(trials: Sequence[SizeTrial], limit: int, low: int, high: SizeTrial | None) -> int | None:
    """Return the size at which a line through two known peaks meets the limit, or ``None`` without a rising line."""
    peaks = {trial.size: trial.peak for trial in trials if trial.peak is not None}
    ends = [size for size in (low, None if high is None else high.size) if size in peaks]
    if len(ends) < 2:
        # The second size is at most half of `low`: between nearby sizes, the allocator's block sizes hide the slope.
        ends = [low, max((size for size in peaks if size <= low / 2), default=min(peaks, default=low))]
        ends = ends if low in peaks else sorted(peaks)[:2]
    if len(set(ends)) < 2:
        return None
    smaller, larger = sorted(ends)
    slope = (peaks[larger] - peaks[smaller]) / (larger - smaller)
    return int(smaller + (limit - peaks[smaller]) / slope) if slope > 0 else None


def _one_sided(trials: Sequence[SizeTrial]) -> bool:
    """Return whether the last four trials all fit, or all do not fit."""
    last = [trial.fits for trial in trials[-4:]]
    return len(last) == 4 and len(set(last)) == 1


def _before(trials: Sequence[SizeTrial], low: int) -> int:
    """Return the largest size below ``low`` that fits."""
    return max((trial.size for trial in trials if trial.fits and trial.size < low), default=0)
