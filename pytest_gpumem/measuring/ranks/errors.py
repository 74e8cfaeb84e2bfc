"""Exceptions of ranks."""

from __future__ import annotations


class LaunchError(ValueError):
    """An environment variable prevents the ranks from finding each other. The message has its value and the expected value."""


class BoardError(RuntimeError):
    """The store of the ranks cannot be reached."""


class RankLost(BaseException):
    """Another rank will not come. The message is a clause with its name.

    The class does not derive from `Exception`, so a test's ``except Exception`` cannot swallow the error.
    """
