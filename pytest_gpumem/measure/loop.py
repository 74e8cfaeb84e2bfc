"""A loop that owns its steps, and code that measures them: each runs until the next boundary, then the other goes on.

Measuring is written as code that runs a step when it wants one. A training loop cannot be called a step at a time, so the two
are coroutines of one thread (greenlet): to measuring, a step is a call that returns at the loop's next boundary; to the loop, a
boundary is a call that returns when measuring wants another step.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from greenlet import getcurrent, greenlet

if TYPE_CHECKING:
    from collections.abc import Callable


class LoopEnded(Exception):
    """Raised where measuring asks for another step of a loop that has ended; the message is a clause."""


class EndOfLoop(BaseException):
    """Ends a loop that has been measured, through its own ``finally`` and ``with`` blocks. Loops catch each ``Exception``.

    Each is raised once: its traceback keeps the frames of the loop alive, with all that they hold.
    """

    def __init__(self, loop: Loop) -> None:
        super().__init__("the loop has been measured")
        self.loop = loop


class Loop:
    """One loop and what measures it. ``measure`` is called at the loop's first boundary, and runs its steps with `next_step`.

    Args:
        measure: Measures the loop. What it raises is kept for `result`.
    """

    def __init__(self, measure: Callable[[], object]) -> None:
        self._measure = measure
        self._measuring: greenlet | None = None
        self._loop: greenlet | None = None
        self._error: BaseException | None = None
        self._ended = False
        self._raised: BaseException | None = None
        self.is_counted = False
        """True if the loop runs a step that is counted, which may take more memory than one of its own."""
        self.steps = 0
        """The number of steps that have been run for measuring."""

    # Called by the loop

    @property
    def is_measured(self) -> bool:
        """True if measuring has come to its end, so that no further step is wanted."""
        return self._measuring is not None and self._measuring.dead

    def boundary(self) -> None:
        """Let measuring go on: a step has ended. Returns when another is wanted, or none any more."""
        if self.is_measured or self._ended:
            return
        # The parent is where control goes when measuring returns.
        if self._measuring is None:
            self._measuring = greenlet(self._run)
        else:
            self.steps += 1
        self._loop = getcurrent()
        self._measuring.switch()

    def end(self, raised: BaseException | None = None) -> None:
        """Let measuring come to its end with the steps that there were. Raises what it raised.

        ``raised`` is what ended the latest step, for measuring to deal with; ``None`` where that is the loop's own business.
        """
        self._ended, self._raised = True, raised
        if self._measuring is not None and not self._measuring.dead:
            self._loop = getcurrent()
            self._measuring.switch()
        if self._error is not None:
            error, self._error = self._error, None
            raise error

    # Called by measuring

    def next_step(self, *, counted: bool = False) -> None:
        """Run the loop until its next boundary. Raises `LoopEnded` if it ends before, or what `end` was given."""
        if not self._ended:
            assert self._loop is not None, "measuring begins at a boundary of the loop"
            self.is_counted = counted
            self._loop.switch()
            self.is_counted = False
        if self._ended:
            raised, self._raised = self._raised, None
            raise raised or LoopEnded(
                f"the loop ended after {self.steps + 1} steps, before all was measured: let it run some more"
            )

    def _run(self) -> None:
        try:
            self._measure()
        except BaseException as error:  # noqa: BLE001 - raised where the loop has ended: the loop might catch it
            self._error = error
