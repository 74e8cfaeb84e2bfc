"""Kinds of values for options and for keys in ``[tool.gpumem]``.

Every pytest run loads this module, so value checks are in `conversions`, which only a run with values loads.
"""

from __future__ import annotations


class Kind:
    """A kind of value.

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
        """The value's types in TOML."""
        self.expected = expected
        """The words for the kind in messages: ``"a string"``."""
        self.choices = choices
        self.is_array = is_array
        """True for an array of nonempty strings. Such an option may be repeated."""
        self.is_path = is_path
        """True for a path.

        A relative path in pyproject.toml starts in the root directory. A typed relative path starts in the current folder.

        `Settings` stores this folder in a second field, for example ``store_base`` for ``store``.
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
