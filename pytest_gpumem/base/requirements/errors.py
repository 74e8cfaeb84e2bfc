"""Exceptions from reading and installing requirements."""

from __future__ import annotations


class RequirementError(ValueError):
    """A requirement cannot be read. The message shows a valid requirement."""


class InstallationError(Exception):
    """An environment could not be made. The message quotes the installer's reason."""
