"""Exceptions for requirements that cannot be read or installed."""

from __future__ import annotations


class RequirementError(ValueError):
    """A requirement cannot be read. The message shows a valid requirement."""


class InstallationError(Exception):
    """A virtual environment could not be made. The message quotes the reason from pip, uv or the system."""
