"""Convert frozen values to JSON and back, by the type annotations of their fields.

A dataclass becomes a JSON object with a key for each field. A named tuple becomes an array, and a frozen set becomes a sorted
array. If an array was written by an older version and is too short for its named tuple, the last fields get their defaults. A
field whose annotation contains a `Form` is converted by this form's two functions. If a field's key in JSON differs from the
field's name, the entry `KEY` in the field's metadata contains the key.

Example: ``to_plain(PhaseSpan("forward", 0, 900))`` is ``{"name": "forward", "begin": 0, "end": 900}``.
"""

from __future__ import annotations

import functools
from collections.abc import Mapping
from dataclasses import fields, is_dataclass
from enum import Enum
from operator import attrgetter
from types import MappingProxyType, NoneType, UnionType
from typing import TYPE_CHECKING, Annotated, Any, NamedTuple, TypeVar, Union, get_args, get_origin, get_type_hints

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable

_T = TypeVar("_T")
KEY = "key"
"""The name of the metadata entry that contains a field's key in JSON: ``field(metadata={KEY: "idle_budgets"})``."""


class Form(NamedTuple):
    """Functions in ``Annotated[T, Form(...)]`` that convert a ``T`` to the type ``plain`` for JSON (``write``) and back
    (``read``).
    """

    plain: Any
    write: Callable[[Any], Any]
    read: Callable[[Any], Any]


def to_plain(value: Any) -> Any:
    """Convert a dataclass to dicts, lists, strings and numbers. `from_plain` converts them back."""
    kind: Any = type(value)
    return _codec(kind).write(value)


def from_plain(kind: Callable[..., _T], plain: Mapping[str, Any]) -> _T:
    """Convert the result of `to_plain` back to a dataclass of the class ``kind``.

    The strings ``"Infinity"``, ``"-Infinity"`` and ``"NaN"`` are accepted as numbers. Keys that are no field are ignored, and
    fields that are missing in ``plain`` get their defaults. Callers check a report against its JSON schema first.

    Args:
        kind: The dataclass to create.
        plain: The dicts, lists, strings and numbers.

    Raises:
        ValueError: A part of ``plain`` does not fit the field's type. Other misfits raise ``TypeError`` or ``KeyError``.
    """
    value: _T = _codec(kind).read(plain)
    return value


class FrozenValue:
    """Base class for frozen dataclasses with read-only mappings.

    Python cannot pickle a read-only mapping, so an object is pickled as the result of `to_plain`.
    """

    __slots__ = ()

    def _freeze(self, **mappings: Mapping[str, Any]) -> None:
        """Set each named field to a read-only copy of a mapping."""
        for name, mapping in mappings.items():
            object.__setattr__(self, name, MappingProxyType(dict(mapping)))

    def __reduce__(self) -> tuple[Any, ...]:
        return from_plain, (type(self), to_plain(self))


class _Codec(NamedTuple):
    read: Callable[[Any], Any]
    write: Callable[[Any], Any]


def _unchanged(value: Any) -> Any:
    return value


def _number(plain: float | str) -> float:
    return float(plain) if isinstance(plain, str) else plain


def _whole(plain: Any) -> Any:
    return int(plain) if isinstance(plain, float) and plain.is_integer() else plain


_UNCHANGED = _Codec(_unchanged, _unchanged)
# A JSON file may contain 2.0 for an int and 2 for a float.
_NUMBERS = {int: _Codec(int, _unchanged), float: _Codec(_number, _unchanged)}


@functools.cache
def _codec(kind: Any) -> _Codec:
    generic = _GENERIC.get(get_origin(kind))
    if generic is not None:
        return generic(*get_args(kind))
    if is_dataclass(kind):
        return _object(kind)
    if isinstance(kind, type) and issubclass(kind, Enum):
        return _Codec(kind, attrgetter("value"))
    if isinstance(kind, type) and issubclass(kind, tuple):
        hints = list(get_type_hints(kind, include_extras=True).values())
        return _array(lambda parts: kind(*parts), hints, defaults=len(getattr(kind, "_field_defaults", ())))
    return _NUMBERS.get(kind, _UNCHANGED)


def _object(kind: Any) -> _Codec:
    hints = get_type_hints(kind, include_extras=True)
    codecs = [
        (declared.name, declared.metadata.get(KEY, declared.name), _codec(hints[declared.name]))
        for declared in fields(kind)
    ]
    return _Codec(
        lambda plain: kind(**{name: codec.read(plain[key]) for name, key, codec in codecs if key in plain}),
        lambda value: {key: codec.write(getattr(value, name)) for name, key, codec in codecs},
    )


def _array(make: Callable[[Any], Any], kinds: Iterable[Any], defaults: int = 0) -> _Codec:
    codecs = list(map(_codec, kinds))

    def read(plain: Any) -> Any:
        present = codecs[: max(len(plain), len(codecs) - defaults)]
        return make([codec.read(part) for codec, part in zip(present, plain, strict=True)])

    return _Codec(
        read,
        lambda value: [codec.write(part) for codec, part in zip(codecs, value, strict=True)],
    )


def _tuple(*kinds: Any) -> _Codec:
    if kinds[-1] is not ...:
        return _array(tuple, kinds)
    read, write = _codec(kinds[0])
    return _Codec(lambda plain: tuple(map(read, plain)), lambda value: list(map(write, value)))


def _frozenset(kind: Any) -> _Codec:
    read, write = _codec(kind)
    return _Codec(lambda plain: frozenset(map(read, plain)), lambda value: sorted(map(write, value)))


def _mapping(_: Any, kind: Any) -> _Codec:
    read, write = _codec(kind)
    return _Codec(
        lambda plain: {name: read(value) for name, value in plain.items()},
        lambda value: {name: write(value) for name, value in value.items()},
    )


def _union(*kinds: Any) -> _Codec:
    """Return the codec for ``T | None``, or for a union of several types that JSON has itself, such as ``int | str``."""
    types = [kind for kind in kinds if kind is not NoneType]
    read, write = _codec(types[0]) if len(types) == 1 else _UNCHANGED
    if len(types) > 1 and int in types and float not in types:
        read = _whole
    return _Codec(
        lambda plain: None if plain is None else read(plain), lambda value: None if value is None else write(value)
    )


def _formed(_: Any, form: Form) -> _Codec:
    read, write = _codec(form.plain)
    return _Codec(lambda plain: form.read(read(plain)), lambda value: write(form.write(value)))


_GENERIC: dict[Any, Callable[..., _Codec]] = {
    Annotated: _formed,
    Mapping: _mapping,
    Union: _union,
    UnionType: _union,
    frozenset: _frozenset,
    tuple: _tuple,
}
