"""Errors for reports that cannot be read or merged."""

from __future__ import annotations


class ReportError(ValueError):
    """Raised for a text that is not a report. The message names the file, the mistake and the expected content."""


class MergeError(ValueError):
    """Raised for reports from different sessions. The message names the reports, the difference and what to do."""
