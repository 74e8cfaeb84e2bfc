"""Switch between a training loop and the measuring code.

The measuring code runs a step whenever it needs figures, but a training loop cannot be called step by step. So the loop and
the measuring code are coroutines in one thread (greenlet), and control switches at each boundary between two steps:

- The measuring code calls `Loop.next_step`. The call returns at the loop's next boundary.
- The loop calls `Loop.boundary`. The call returns when the measuring code wants another step.

Example:
    A loop runs 3 steps, and the measuring code needs the last 2. The loop runs step 1 and calls ``boundary()``, which starts
    the measuring code. The measuring code calls ``next_step()``, which resumes the loop. The loop runs step 2 and calls
    ``boundary()`` again. The measuring code calls ``next_step()`` for step 3, and ends. Then ``is_measured`` is True.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from greenlet import getcurrent, greenlet

if TYPE_CHECKING:
    from collections.abc import Callable


class LoopEnded(Exception):
    """Raised if the measuring code asks for another step after the loop has ended. The message is a clause."""


class EndOfLoop(BaseException):
    """Raised inside a loop to end it after the measurement, so the loop's own ``finally`` and ``with`` blocks run.

    The base class is ``BaseException``, because a loop may catch every ``Exception``. Make a new instance each time, because
    the traceback in a raised instance keeps the loop's frames and variables alive.
    """

    def __init__(self, loop: Loop) -> None:
        super().__init__("the loop has been measured")
        self.loop = loop


class Loop:
    """A loop and its measuring code.

    Args:
        measure: A function that measures the loop, and calls `next_step` to run a step. The first call to `boundary` starts
            this function. If it raises an exception, `end` raises the same exception.
    """

    def __init__(self, measure: Callable[[], object]) -> None:
        self._measure = measure
        self._measuring: greenlet | None = None
        self._loop: greenlet | None = None
        self._error: BaseException | None = None
        self._ended = False
        self._raised: BaseException | None = None
        self.is_counted = False
        """True while a step's operators are counted. Such a step may need more memory than a plain step."""
        self.steps = 0
        """The number of steps run so far for the measuring code."""

    # Methods called by the loop

    @property
    def has_begun(self) -> bool:
        """True if the loop has reached a boundary."""
        return self._measuring is not None

    @property
    def is_measured(self) -> bool:
        """True if the measuring code has finished and needs no further step."""
        return self._measuring is not None and self._measuring.dead

    def boundary(self) -> None:
        """Resume the measuring code after a step. Return when the measuring code needs another step, or has finished."""
        if self.is_measured or self._ended:
            return
        # greenlet returns control to the parent, the loop, when the measuring code returns.
        if self._measuring is None:
            self._measuring = greenlet(self._run)
        else:
            self.steps += 1
        self._loop = getcurrent()
        self._measuring.switch()

    def end(self, raised: BaseException | None = None) -> None:
        """Let the measuring code finish, because the loop has ended.

        Args:
            raised: The exception raised by the loop's latest step. `next_step` raises it again in the measuring code.
                ``None`` if the loop ended without an exception.

        Raises:
            BaseException: An exception raised by the measuring code.
        """
        self._ended, self._raised = True, raised
        if self._measuring is not None and not self._measuring.dead:
            self._loop = getcurrent()
            self._measuring.switch()
        if self._error is not None:
            error, self._error = self._error, None
            raise error

    # Methods called by the measuring code

    def next_step(self, *, counted: bool = False) -> None:
        """Run the loop until its next boundary.

        Args:
            counted: True if this step's operators are counted.

        Raises:
            LoopEnded: The loop ended before the boundary.
            BaseException: The exception passed to `end`.
        """
        if not self._ended:
            assert self._loop is not None, "measuring begins at a boundary of the loop"
            self.is_counted = counted
            self._loop.switch()
            self.is_counted = False
        if self._ended:
            raised, self._raised = self._raised, None
            raise raised or LoopEnded(
                f"the loop ended after {self.steps + 1} steps, before the measurement was complete: run more steps"
            )

    def _run(self) -> None:
        try:
            self._measure()
        except BaseException as error:  # noqa: BLE001 - `end` raises it later, because the loop itself might catch it
            self._error = error
