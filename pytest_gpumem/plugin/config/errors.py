"""Errors for mistakes in settings and markers."""

from __future__ import annotations


class SettingsError(ValueError):
    """Raised for a mistake in ``[tool.gpumem]`` or in an option.

    The message names the file or option, the key, and an example of a valid value.
    """


class BudgetError(ValueError):
    """Raised for a wrong argument of the marker or of a budget entry.

    The message names the argument and an example of a valid value.
    """
