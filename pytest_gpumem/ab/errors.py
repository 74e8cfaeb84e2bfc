"""Exceptions that end a comparison early."""

from __future__ import annotations


class RunFailed(Exception):
    """A run has nothing that can be compared; the message says why, and what to do."""
