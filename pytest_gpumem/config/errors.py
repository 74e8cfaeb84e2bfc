"""Mistakes in settings and markers."""

from __future__ import annotations


class SettingsError(ValueError):
    """A mistake in ``[tool.gpumem]`` or an option; the message names the file, the key, and what would be right."""


class BudgetError(ValueError):
    """A wrong argument of a budget; the message names it, and what would be right."""
