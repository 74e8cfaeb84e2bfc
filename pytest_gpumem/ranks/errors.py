"""Exceptions of ranks."""

from __future__ import annotations


class LaunchError(ValueError):
    """An environment in which ranks cannot find one another; the message says which variable is wrong, and what would be
    right.
    """


class BoardError(RuntimeError):
    """Error of a store that cannot be reached."""


class RankLost(BaseException):
    """Another rank will not come; the message is a clause that names it. No test's ``except Exception`` may swallow it."""
