"""Mistakes in settings and markers."""

from __future__ import annotations


class SettingsError(ValueError):
    """Error for a mistake in ``[tool.gpumem]`` or an option. The message names the file, the key, and a right value."""


class BudgetError(ValueError):
    """Error for a wrong budget argument. The message names the argument and a right value."""
