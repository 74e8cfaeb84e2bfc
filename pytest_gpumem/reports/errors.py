"""Reports that cannot be read or merged."""

from __future__ import annotations


class ReportError(ValueError):
    """A text that is not a report; the message names the file, what is wrong with it and what would be right."""


class MergeError(ValueError):
    """Reports are not of one session; the message says which differ in what, and what would be right."""
