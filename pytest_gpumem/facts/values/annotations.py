"""Annotations and metadata for the fields of values, which decide their form in JSON. `plain` carries them out."""

from __future__ import annotations

from types import MappingProxyType
from typing import TYPE_CHECKING, Annotated, Any, NamedTuple

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable

KEY = "key"
"""The metadata entry with a field's key in JSON: ``field(metadata={KEY: "idle_budgets"})``."""
ADDED = MappingProxyType({"added": True})
"""The metadata for a field that the first reports did not have. If its key is missing, the field gets its default. No other key
may be missing, even if its field has a default."""


class Excerpt:
    """Base class for dataclasses that read some keys from a JSON object. Other keys are ignored, and defaults replace missing
    keys.
    """

    __slots__ = ()


class Form(NamedTuple):
    """Functions in ``Annotated[T, Form(...)]`` that convert a ``T`` to the type ``plain`` for JSON (``write``) and back
    (``read``).
    """

    plain: Any
    write: Callable[[Any], Any]
    read: Callable[[Any], Any]


class Range(NamedTuple):
    """The smallest and the largest valid integer, in ``Annotated[int, Range(0, 100)]``."""

    least: int = -(2**63)
    most: int = 2**63 - 1


Count = Annotated[int, Range(0)]
"""A count, or a size in bytes."""


class Name:
    """The valid texts, in ``Annotated[str, Name("category", CATEGORIES)]``.

    Args:
        definition: The definition's name in the schema.
        valid: The valid texts.
        published: The definition, if a later version may have more texts. By default it lists the valid texts.
    """

    def __init__(self, definition: str, valid: Iterable[str], published: dict[str, Any] | None = None) -> None:
        self.definition, self.valid, self.published = definition, tuple(valid), published


class NotEmpty(NamedTuple):
    """The entry in ``Annotated[tuple[float, ...], NotEmpty()]`` for an array with at least one item."""
