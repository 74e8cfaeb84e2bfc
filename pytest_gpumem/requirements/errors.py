"""Exceptions of requirements and of environments that hold them."""

from __future__ import annotations


class RequirementError(ValueError):
    """A requirement cannot be read; the message says what would be right."""


class NotInstalled(Exception):
    """An environment could not be made; the message has the installer's reason."""
