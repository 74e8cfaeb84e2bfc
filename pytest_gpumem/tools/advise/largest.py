"""Search for the largest batch, or the longest sequence, with which a step fits into memory. Pure functions.

The result is exact: the next larger size does not fit.

`next_size` returns a size, the caller runs the step with this size, and so on. For example, let a step need 2 GB plus 40 MB for
each sample, and let the limit be 10 GB. The first sizes are 1 and 2 samples, and both fit. The line through their two peaks
reaches the limit at 200 samples. But 128 samples are next, because a size is at most 64 times the largest size that has fitted
so far. After that, 200 samples fit, 272 do not fit, and 201 do not fit. So the search ends at 200 samples after six runs.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Literal

if TYPE_CHECKING:
    from collections.abc import Sequence

SizeAxis = Literal["samples", "tokens"]
"""The batch dimension to maximize: the number of samples, or the number of tokens in each sample."""
OPTIONS: dict[SizeAxis, str] = {"samples": "--largest-batch", "tokens": "--longest-sequence"}
"""The command-line option for each batch dimension."""
MOST = 10**9 - 1
"""The search ends at this size, because options accept numbers with at most nine digits."""


@dataclass(frozen=True, slots=True)
class SizeTrial:
    """The result of running a step with ``size`` samples or tokens. ``peak`` is in bytes, or ``None`` if unknown."""

    size: int
    fits: bool
    peak: int | None = None
    why_not: str = ""
    """The reason why a step with this size cannot run, as a clause. Empty if the step ran or ran out of memory."""


@dataclass(frozen=True, slots=True)
class Largest:
    """The largest size with which a step fits into memory, and the step's peak in bytes. ``size`` is 0 if no size fits."""

    size: int
    peak: int | None = None
    why_not_more: str = ""
    """The reason why a step with the next larger size cannot run, as a clause. Empty if that step needs too much memory."""
    is_known: bool = True
    """False if Ctrl-C ended the search early, so larger sizes may fit as well."""


def next_size(
    trials: Sequence[SizeTrial], limit: int, start: int, unit: int = 1, elsewhere: Sequence[SizeTrial] = ()
) -> int | None:
    """Return the next size to try, or ``None`` when the search has ended.

    A step's memory grows nearly linearly with the size. So the line through two measured peaks predicts the size at which the
    peak reaches the limit, and this size is next. If four trials in a row all fit or all do not fit, the prediction is poor.
    The next size is then halfway between the largest size that fits and the smallest size that does not, if both are known.

    Args:
        trials: The trials so far, in the order in which they ran.
        limit: The memory limit for a step in bytes.
        start: The first size to try.
        unit: Every size is a multiple of this number, for example of the number of micro-batches.
        elsewhere: Trials on another device. They improve the prediction, because a step needs nearly the same memory on each
            device.
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
        # A line through two small sizes predicts much larger sizes badly, so the next size is at most 64 times larger.
        guess = 2 * low if guess is None else min(guess, 64 * low)
        guess = max(guess, 2 * low - _before(trials, low)) if _one_sided(trials) else guess
    elif guess is None or _one_sided(trials) or (high.peak is None and guess > last):
        guess = (low + high.size) // 2
    return min(last, max(low + unit, guess // unit * unit))


def largest_of(trials: Sequence[SizeTrial], *, finished: bool = True) -> Largest:
    """Return the largest size that fits among the trials. ``finished`` is False if the search was interrupted."""
    low, high = _bounds(trials)
    peak = next((trial.peak for trial in trials if trial.size == low), None)
    return Largest(low, peak, "" if high is None else high.why_not, finished)


def _bounds(trials: Sequence[SizeTrial]) -> tuple[int, SizeTrial | None]:
    """Return the largest size that fits, and the trial with the smallest size that does not fit (``None`` if all sizes fit)."""
    low = max((trial.size for trial in trials if trial.fits), default=0)
    beyond = [trial for trial in trials if trial.size > low]
    return low, min(beyond, key=lambda trial: trial.size, default=None)


def _on_the_line(trials: Sequence[SizeTrial], limit: int, low: int, high: SizeTrial | None) -> int | None:
    """Return the size at which the line through two known peaks reaches the limit. Return ``None`` if fewer than two peaks are
    known, or if the line does not rise.
    """
    peaks = {trial.size: trial.peak for trial in trials if trial.peak is not None}
    ends = [size for size in (low, None if high is None else high.size) if size in peaks]
    if len(ends) < 2:
        # Use a second size of at most half of `low`. The allocator rounds block sizes, so peaks at nearby sizes may be equal.
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
