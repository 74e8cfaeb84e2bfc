"""Exceptions for the ranks of a distributed job."""

from __future__ import annotations


class LaunchError(ValueError):
    """Raised if an environment variable from the launcher is missing or invalid. The message says how to fix it."""


class BoardError(RuntimeError):
    """Raised if a rank cannot reach the key/value store through which ranks share values."""


class RankLost(BaseException):
    """Raised if this rank waits for another rank, which has ended. The message names the other rank.

    The class does not derive from `Exception`, so a test's ``except Exception`` cannot swallow the error.
    """
