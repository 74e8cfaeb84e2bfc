"""Exceptions for invalid steps and step configs."""

from __future__ import annotations


class ConfigError(ValueError):
    """Raised for a step config that cannot be read or has nothing to act on. The message suggests a correction."""


class NotAStep(ValueError):
    """Raised if model, batch, loss and optimizer do not form a step. The message suggests a correction."""
