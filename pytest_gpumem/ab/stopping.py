"""Ctrl-C and other requests to end, as a value that is looked at: what runs ends in order, also when asked twice."""

from __future__ import annotations

import signal
import threading
from contextlib import contextmanager
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from collections.abc import Iterator
    from types import FrameType

_SIGNALS = tuple(getattr(signal, name) for name in ("SIGINT", "SIGTERM", "SIGHUP", "SIGBREAK") if hasattr(signal, name))


class Stopped(Exception):
    """Somebody asked for the end. ``signum`` is the signal that did."""

    def __init__(self, signum: int) -> None:
        super().__init__(f"ended by {signal.Signals(signum).name}")
        self.signum = signum


class Stop:
    """Whether the end was asked for."""

    def __init__(self) -> None:
        self.signum: int | None = None

    def note(self, signum: int, _frame: FrameType | None = None) -> None:
        """Take note of a signal; the first counts."""
        if self.signum is None:
            self.signum = signum

    def check(self) -> None:
        """Raise `Stopped` if the end was asked for."""
        if self.signum is not None:
            raise Stopped(self.signum)


@contextmanager
def noted_signals() -> Iterator[Stop]:
    """A stretch in which signals that ask for the end are noted, and interrupt nothing."""
    stop = Stop()
    # Only the main thread gets signals, and what is ignored (nohup) stays so.
    mine = threading.current_thread() is threading.main_thread()
    noted = [signum for signum in _SIGNALS if mine and signal.getsignal(signum) is not signal.SIG_IGN]
    earlier = {signum: signal.signal(signum, stop.note) for signum in noted}
    try:
        yield stop
    finally:
        for signum, handler in earlier.items():
            signal.signal(signum, handler)
