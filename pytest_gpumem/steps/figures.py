"""What one stretch of running cost, as differences of a device's readings."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from collections.abc import Mapping

    from pytest_gpumem.devices.contract import Peak


@dataclass(frozen=True, slots=True)
class Figures:
    """Readings around a stretch. ``live_*`` and peaks count from the same zero.

    ``live_before`` is read when only the stretch's own bytes (``own``) and foreign ones are live; ``live_run`` right after
    it ran; ``live_after`` when garbage has been collected.
    """

    own: int
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
    def peak_allocated(self) -> int:
        """The peak of the stretch's own bytes."""
        return self.peak.allocated + self.own - self.live_before

    def memory_metrics(self) -> dict[str, int]:
        """The memory metrics of the stretch, in bytes."""
        # Everything else that was live before is foreign, and does not change meanwhile.
        offset = self.own - self.live_before
        metrics = {"peak_allocated": self.peak_allocated}
        metrics |= {f"peak_{name}": peak.allocated + offset for name, peak in self.phases.items()}
        if self.peak.reserved is not None and self.reserved_before is not None:
            # Room that was left in segments reserved before is not in the difference, but tensors were put there.
            reserved = self.peak.reserved - self.reserved_before + self.own
            metrics["peak_reserved"] = max(reserved, metrics["peak_allocated"])
        metrics["retained"] = max(0, self.live_after - self.live_before - self.held_change)
        metrics["cyclic_garbage"] = max(0, self.live_run - self.live_after)
        return metrics
