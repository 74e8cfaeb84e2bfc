"""Errors from reading and merging reports."""

from __future__ import annotations


class ReportError(ValueError):
    """Raised if a file does not contain a valid report. The message names the file, the mistake and the expected content."""


class MergeError(ValueError):
    """Raised if reports cannot be merged because their commits, versions or options differ.

    The message names the reports and the difference, and says what to do.
    """
