"""Kinds of values for options and for keys of ``[tool.gpumem]``.

Every pytest run loads this module. So `conversions` checks and converts the values: only a run that has values loads it.
"""

from __future__ import annotations


class Kind:
    """A kind of value."""

    def __init__(
        self,
        types: type | tuple[type, ...],
        expected: str,
        *,
        choices: tuple[str, ...] | None = None,
        is_array: bool = False,
        is_path: bool = False,
    ) -> None:
        self.types = types
        """The types of the value in TOML."""
        self.expected = expected
        """The words for the value in messages."""
        self.choices = choices
        self.is_array = is_array
        """True for an array of strings that are not empty. Such an option may be repeated."""
        self.is_path = is_path
        """True for a path. A relative path starts in the root directory in pyproject.toml, and in the current folder if typed.

        `Settings` has this folder in a second field, for example ``store_base`` for ``store``.
        """


def one_of(choices: tuple[str, ...]) -> Kind:
    """Return the kind for a string among ``choices``."""
    return Kind(str, "a string", choices=choices)


FLAG = Kind(bool, "true or false")
TEXT = Kind(str, "a string")
LINE = Kind(str, "a string")
FOLDER = Kind(str, "a string", is_path=True)
STORE = Kind(str, "a string", is_path=True)
REPORTS = Kind(list, "an array of file names", is_array=True, is_path=True)
PATTERNS = Kind(list, "an array of patterns of tests", is_array=True)
MODELS = Kind(list, "an array of models", is_array=True, is_path=True)
DURATION = Kind(str, "a string")
SECONDS = Kind((int, float, str), "a number of seconds or a string")
"""A duration, or a number of seconds."""
TABLE = Kind(dict, "a table")
TABLES = Kind(list, "an array of tables")
