"""Exceptions that end a comparison of two revisions early."""

from __future__ import annotations

import signal


class RunFailed(Exception):
    """A run has nothing that can be compared; the message says why, and what to do."""


class Stopped(Exception):
    """A signal asked for the end: ``signum``."""

    def __init__(self, signum: int) -> None:
        super().__init__(f"ended by {signal.Signals(signum).name}")
        self.signum = signum
