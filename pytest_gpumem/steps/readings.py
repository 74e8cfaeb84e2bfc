"""Readings around a stretch of running: its windows, its cost in bytes, and the growth per step."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence

    from pytest_gpumem.devices.contract import Peak


@dataclass(frozen=True, slots=True)
class Figures:
    """Readings around a stretch. Live bytes and peaks count from the same zero.

    ``foreign`` bytes are live all the time and are not the stretch's own. ``live_before`` is read before it ran; ``live_run``
    right after it ran; ``live_after`` when garbage has been collected.
    """

    foreign: int
    live_before: int
    reserved_before: int | None
    peak: Peak
    live_run: int
    live_after: int
    phases: Mapping[str, Peak] = field(default_factory=dict)
    turnover: int = 0
    """Bytes that were allocated in all, whether freed or not."""
    held_change: int = 0
    """How much more the test's fixtures hold than before: kept on purpose, not retained."""
    workspaces: int = 0
    """Bytes that the backend's libraries still held for themselves when the stretch ended; the peak has them, too."""

    @property
    def own(self) -> int:
        """The stretch's own bytes when it began."""
        return self.live_before - self.foreign

    @property
    def peak_allocated(self) -> int:
        """The peak of the stretch's own bytes."""
        return self.peak.allocated - self.foreign

    def memory_metrics(self) -> dict[str, int]:
        """The memory metrics of the stretch, in bytes."""
        metrics = {"peak_allocated": self.peak_allocated}
        metrics |= {f"peak_{name}": peak.allocated - self.foreign for name, peak in self.phases.items()}
        if self.peak.reserved is not None and self.reserved_before is not None:
            # Room that was left in segments reserved before is not in the difference, but tensors were put there.
            reserved = self.peak.reserved - self.reserved_before + self.own
            metrics["peak_reserved"] = max(reserved, metrics["peak_allocated"])
        metrics["retained"] = max(0, self.live_after - self.live_before - self.held_change)
        metrics["cyclic_garbage"] = max(0, self.live_run - self.live_after)
        return metrics


SETTLING_STEPS = 6
"""Steps in which a cache, or a list that forgets its oldest entries, may fill before growth is read."""
WINDOW = 12
"""Steps over which growth is read: a multiple of 2 and 3, so that a step that keeps bytes every second or third time has
the same growth wherever the window begins. What is emptied at least once within them is no growth."""


def grows(live: Sequence[int]) -> bool:
    """Whether bytes that are live after each of some steps grow: they never fall after their lowest and end higher.

    Or they go up and down, but both their lowest and their highest are higher in the later half than in the earlier one.
    """
    since_lowest = live[live.index(min(live)) :]
    if since_lowest[-1] > since_lowest[0] and list(since_lowest) == sorted(since_lowest):
        return True
    return _is_higher_later(live)


def growth_per_step(live: Sequence[int]) -> int:
    """Return the bytes that each step keeps, 0 where memory does not grow.

    It grows where both the lowest and the highest of ``live`` are higher in the later half than in the earlier one: what is
    emptied now and then may be at any point of its course.

    Args:
        live: The bytes that are live before the first step and after each one, garbage collected.
    """
    if len(live) < 2 or not _is_higher_later(live):
        return 0
    return max(0, round((live[-1] - live[0]) / (len(live) - 1)))


def _is_higher_later(live: Sequence[int]) -> bool:
    early, late = live[: len(live) // 2], live[len(live) // 2 :]
    return min(late) > min(early) and max(late) > max(early)
