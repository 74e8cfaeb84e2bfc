"""One line a run, for who waits: live on a terminal, when it has ended elsewhere."""

from __future__ import annotations

import time
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from typing import TextIO

    from pytest_gpumem.ab.runs import Run, Side
    from pytest_gpumem.git import Revision

_START_OF_LINE = "\r\x1b[K"


class Progress:
    """Writes lines such as ``3/16 base 1f3c9ab  12.3 s, 9 measured`` to ``stream``; ``most`` is how many runs there may be."""

    def __init__(self, stream: TextIO, most: int) -> None:
        self._stream = stream
        self._most = most
        self._live = stream.isatty()
        self._what = ""
        self._began = 0.0
        self._shown = ""

    def begin(self, number: int, side: Side, revision: Revision) -> None:
        """A run begins."""
        self._what = f"{number}/{self._most} {side} {revision.short}"
        self._began = time.monotonic()
        self.tick()

    def tick(self) -> None:
        """Time has passed."""
        self._show(f"{self._what}  {time.monotonic() - self._began:.0f} s ...")

    def end(self, run: Run) -> None:
        """The run has given its figures."""
        self.say(f"{self._what}  {time.monotonic() - self._began:.1f} s, {run.measured} measured")

    def say(self, text: str) -> None:
        """A line that stays."""
        self.clear()
        self._stream.write(f"{text}\n")
        self._stream.flush()

    def clear(self) -> None:
        """Take the live line away."""
        if self._shown:
            self._stream.write(_START_OF_LINE)
            self._stream.flush()
            self._shown = ""

    def _show(self, text: str) -> None:
        if self._live and text != self._shown:
            self._stream.write(f"{_START_OF_LINE}{text}")
            self._stream.flush()
            self._shown = text
