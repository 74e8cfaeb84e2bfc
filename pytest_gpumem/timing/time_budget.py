"""The time budget of one test: seconds for first samples, and once more as many for second samples."""

from __future__ import annotations

DEFAULT_SECONDS = 2.0


class TimeBudget:
    """The seconds that a test has left for timing. A step may take half of it, so that there is some for the ones to come."""

    __slots__ = ("_left", "_left_to_look", "_seconds")

    def __init__(self, seconds: float = DEFAULT_SECONDS) -> None:
        self._seconds = self._left = self._left_to_look = seconds

    @property
    def share(self) -> float:
        """Seconds for the next sample."""
        return self._left / 2

    @property
    def second_look(self) -> float:
        """Seconds for a second sample of a step: as long as a first one, whatever is left."""
        return self._seconds / 2

    @property
    def may_look_again(self) -> bool:
        """Whether seconds are left for second samples that decide nothing. One that fails the test is always taken."""
        return self._left_to_look > 0

    def look(self, seconds: float) -> None:
        """A second look took these ``seconds``."""
        self._left_to_look -= seconds

    def spend(self, seconds: float) -> None:
        """Timing took these ``seconds``."""
        self._left = max(0.0, self._left - seconds)
