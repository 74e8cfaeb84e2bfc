"""The search for the largest batch, or the longest sequence, that fits: found by running, to the unit. Pure functions."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Literal

if TYPE_CHECKING:
    from collections.abc import Sequence

Sought = Literal["samples", "tokens"]
"""The part of a batch's size that is varied."""
OPTIONS: dict[Sought, str] = {"samples": "--largest-batch", "tokens": "--longest-sequence"}
"""The option that looks for each."""
MOST = 10**9 - 1
"""More than any batch has samples or a sequence tokens: an option takes nine digits."""


@dataclass(frozen=True, slots=True)
class SizeTrial:
    """A size that was tried: a number of samples or of tokens, and the bytes that its step takes, or why that is not known."""

    size: int
    fits: bool
    peak: int | None = None
    why_not: str = ""
    """The reason why it cannot be run, as a clause, where that is not memory."""


@dataclass(frozen=True, slots=True)
class Largest:
    """The largest size that fits, and its peak; ``size`` is 0 where none does."""

    size: int
    peak: int | None = None
    why_not_more: str = ""
    """The reason why the next one cannot be run; empty where it lacks memory."""
    is_known: bool = True
    """False where the search was broken off: larger ones may fit."""


def next_size(
    trials: Sequence[SizeTrial], limit: int, start: int, unit: int = 1, elsewhere: Sequence[SizeTrial] = ()
) -> int | None:
    """Return the next size to try; ``None`` where the largest that fits, and that the next one does not, are known.

    What a step takes grows nearly along a line. So the next size is where the line through two that were tried meets the limit;
    where lines fall short again and again, the middle of what is left.

    Args:
        trials: What was tried, in its order.
        limit: The bytes that a step may take.
        start: The first size to try.
        unit: The number that sizes are multiples of.
        elsewhere: What was tried on another device, where a step takes nearly the same.
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
        # What is near tells little of what is far off, and a line that falls short again and again is left.
        guess = 2 * low if guess is None else min(guess, 64 * low)
        guess = max(guess, 2 * low - _before(trials, low)) if _one_sided(trials) else guess
    elif guess is None or _one_sided(trials) or (high.peak is None and guess > last):
        guess = (low + high.size) // 2
    return min(last, max(low + unit, guess // unit * unit))


def largest_of(trials: Sequence[SizeTrial], *, finished: bool = True) -> Largest:
    """Return the largest size that fits, as far as it was searched for."""
    low, high = _bounds(trials)
    peak = next((one.peak for one in trials if one.size == low), None)
    return Largest(low, peak, "" if high is None else high.why_not, finished)


def _bounds(trials: Sequence[SizeTrial]) -> tuple[int, SizeTrial | None]:
    """Return the largest size that fits, and the smallest beyond it that does not."""
    low = max((one.size for one in trials if one.fits), default=0)
    beyond = [one for one in trials if one.size > low]
    return low, min(beyond, key=lambda one: one.size, default=None)


def _on_the_line(trials: Sequence[SizeTrial], limit: int, low: int, high: SizeTrial | None) -> int | None:
    """Return the largest size at which a line is within the limit: that through both bounds, or up to the lower one."""
    known = {one.size: one.peak for one in trials if one.peak is not None}
    ends = [size for size in (low, None if high is None else high.size) if size in known]
    if len(ends) < 2:
        # Of sizes near each other an allocator's blocks would hide the slope.
        ends = [low, max((size for size in known if size <= low / 2), default=min(known, default=low))]
        ends = ends if low in known else sorted(known)[:2]
    if len(set(ends)) < 2:
        return None
    one, other = sorted(ends)
    slope = (known[other] - known[one]) / (other - one)
    return int(one + (limit - known[one]) / slope) if slope > 0 else None


def _one_sided(trials: Sequence[SizeTrial]) -> bool:
    """Return whether the last four trials all fit or all did not."""
    last = [one.fits for one in trials[-4:]]
    return len(last) == 4 and len(set(last)) == 1


def _before(trials: Sequence[SizeTrial], low: int) -> int:
    """Return the largest size that fits beneath ``low``."""
    return max((one.size for one in trials if one.fits and one.size < low), default=0)
