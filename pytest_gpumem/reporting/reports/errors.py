"""Errors in reading and merging reports."""

from __future__ import annotations


class ReportError(ValueError):
    """Raised if a text is not a report. The message names the file, the mistake and the expected content."""


class MergeError(ValueError):
    """Raised for reports from different sessions. The message names the reports, the difference and the remedy."""
