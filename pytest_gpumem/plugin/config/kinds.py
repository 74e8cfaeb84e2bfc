"""Kinds of values for options and for keys in ``[tool.gpumem]``.

Every pytest run loads this module, so value checks are in `conversions`, which only a run with values loads.
"""

from __future__ import annotations


class Kind:
    """A type of value for an option or a setting, such as a duration or a path.

    For example, ``DURATION`` is a string in TOML, and `conversions.convert` turns ``"500 ms"`` into 0.5.
    """

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
        """The possible Python types of a value from TOML."""
        self.expected = expected
        """The words for this kind of value in messages: ``"a string"``."""
        self.choices = choices
        self.is_array = is_array
        """True if the value is an array of nonempty strings. On the command line, such an option may be repeated."""
        self.is_path = is_path
        """True if the value is a path.

        A relative path in pyproject.toml is relative to pytest's root directory (`rootdir`). A typed relative path starts in
        the current folder.

        A second field in `Settings` stores the folder in which the relative path starts: ``store_base`` for ``store``.
        """


def one_of(choices: tuple[str, ...]) -> Kind:
    """Return the kind for a value among the strings in ``choices``."""
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
"""A duration such as ``"5 min"``, or a number of seconds."""
TABLE = Kind(dict, "a table")
TABLES = Kind(list, "an array of tables")
