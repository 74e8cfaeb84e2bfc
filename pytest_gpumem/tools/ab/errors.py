"""Exceptions that end a comparison early."""

from __future__ import annotations


class RunFailed(Exception):
    """A run has no results to compare. The message says why, and what to do."""
