"""Exceptions for what is no step, or none under its config."""

from __future__ import annotations


class ConfigError(ValueError):
    """Raised for a step config that cannot be read or has nothing to act on. The message says what would be right."""


class NotAStep(ValueError):
    """Model, batch, loss and optimizer do not make a step; the message says what is missing."""
