"""Conversion of values to and from JSON, by the annotations of their types.

A dataclass becomes an object with a key for each field, a named tuple an array, and a frozen set a sorted array. If an array
from an older version lacks the last fields of a named tuple, they get their defaults. A `Form` in an annotation replaces these
rules. `KEY` in a field's metadata names a key that differs from the field's name.

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
"""The entry in a field's metadata with the field's key in JSON."""


class Form(NamedTuple):
    """A codec in ``Annotated``: ``write`` converts a value to the type ``plain``, and ``read`` converts it back."""

    plain: Any
    write: Callable[[Any], Any]
    read: Callable[[Any], Any]


def to_plain(value: Any) -> Any:
    """Return a dataclass as dicts, lists, texts and numbers. `from_plain` is the inverse."""
    kind: Any = type(value)
    return _codec(kind).write(value)


def from_plain(kind: Callable[..., _T], plain: Mapping[str, Any]) -> _T:
    """Return the ``kind`` that `to_plain` turned into plain values.

    The texts ``"Infinity"``, ``"-Infinity"`` and ``"NaN"`` are accepted as numbers. Keys without a field are ignored, and
    fields without a key get their defaults. A report is checked against its schema before this function is called.

    Args:
        kind: The class of the value.
        plain: The plain value.

    Raises:
        ValueError: The plain value does not fit. ``TypeError`` and ``KeyError`` are raised as well.
    """
    value: _T = _codec(kind).read(plain)
    return value


class FrozenValue:
    """A frozen dataclass with read-only mappings. It is pickled in its plain form, because these mappings cannot be pickled."""

    __slots__ = ()

    def _freeze(self, **mappings: Mapping[str, Any]) -> None:
        """Set fields to copies of mappings that cannot be changed."""
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
# JSON does not distinguish 2.0 from 2.
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
    """Return the codec for a type or ``None``, or for several JSON types."""
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
