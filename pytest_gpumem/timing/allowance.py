"""The seconds that timing may add to one test."""

from __future__ import annotations

DEFAULT_SECONDS = 2.0


class TimeAllowance:
    """What is left of a test's seconds for timing. A step may take half of it, so that there is some for the ones to come."""

    __slots__ = ("_left", "_seconds")

    def __init__(self, seconds: float = DEFAULT_SECONDS) -> None:
        self._seconds = self._left = seconds

    @property
    def share(self) -> float:
        """Seconds for the next sample."""
        return self._left / 2

    @property
    def second_look(self) -> float:
        """Seconds for a sample that decides whether the test fails: as long as a first one, whatever is left."""
        return self._seconds / 2

    def spend(self, seconds: float) -> None:
        """Timing took these ``seconds``."""
        self._left = max(0.0, self._left - seconds)
