"""Values as JSON has them, and back, as the annotations of their types say.

A dataclass is an object with a key for each field, a named tuple an array, and a frozen set a sorted one. If an
array from an older version lacks the last fields of a named tuple, they have their defaults. `Form` in an
annotation says what is otherwise, and `KEY` in a field's metadata names the key where that is not the field's name.
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
"""The entry of a field's metadata that names its key."""


class Form(NamedTuple):
    """A codec in ``Annotated``: a value is written as one of the type ``plain``, by ``write``, and read by ``read``."""

    plain: Any
    write: Callable[[Any], Any]
    read: Callable[[Any], Any]


def to_plain(value: Any) -> Any:
    """Return a dataclass as dicts, lists, texts and numbers only; `from_plain` is the inverse."""
    kind: Any = type(value)
    return _codec(kind).write(value)


def from_plain(kind: Callable[..., _T], plain: Mapping[str, Any]) -> _T:
    """Return the ``kind`` that `to_plain` turned into plain values.

    Numbers may be the texts ``"Infinity"``, ``"-Infinity"`` and ``"NaN"``. Keys that the class has no field for are left out,
    and fields without a key are what they are by default. Raises ``ValueError``, ``TypeError`` or ``KeyError`` for what is no
    such value: a report is checked before, by its schema.
    """
    value: _T = _codec(kind).read(plain)
    return value


class FrozenValue:
    """A frozen dataclass with read-only mappings, which is pickled as `to_plain` has it: those mappings cannot be."""

    __slots__ = ()

    def _freeze(self, **mappings: Mapping[str, Any]) -> None:
        """Set fields to copies that cannot be changed."""
        for name, mapping in mappings.items():
            object.__setattr__(self, name, MappingProxyType(dict(mapping)))

    def __reduce__(self) -> tuple[Any, ...]:
        return from_plain, (type(self), to_plain(self))


class _Codec(NamedTuple):
    read: Callable[[Any], Any]
    write: Callable[[Any], Any]


def _same(value: Any) -> Any:
    return value


def _number(plain: float | str) -> float:
    return float(plain) if isinstance(plain, str) else plain


def _whole(plain: Any) -> Any:
    return int(plain) if isinstance(plain, float) and plain.is_integer() else plain


_AS_IT_IS = _Codec(_same, _same)
# To JSON 2.0 is a whole number.
_NUMBERS = {int: _Codec(int, _same), float: _Codec(_number, _same)}


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
    return _NUMBERS.get(kind, _AS_IT_IS)


def _object(kind: Any) -> _Codec:
    hints = get_type_hints(kind, include_extras=True)
    codecs = [(one.name, one.metadata.get(KEY, one.name), _codec(hints[one.name])) for one in fields(kind)]
    return _Codec(
        lambda plain: kind(**{name: codec.read(plain[key]) for name, key, codec in codecs if key in plain}),
        lambda value: {key: codec.write(getattr(value, name)) for name, key, codec in codecs},
    )


def _array(make: Callable[[Any], Any], kinds: Iterable[Any], defaults: int = 0) -> _Codec:
    codecs = list(map(_codec, kinds))

    def read(plain: Any) -> Any:
        present = codecs[: max(len(plain), len(codecs) - defaults)]
        return make([codec.read(one) for codec, one in zip(present, plain, strict=True)])

    return _Codec(
        read,
        lambda value: [codec.write(one) for codec, one in zip(codecs, value, strict=True)],
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
        lambda plain: {name: read(one) for name, one in plain.items()},
        lambda value: {name: write(one) for name, one in value.items()},
    )


def _union(*kinds: Any) -> _Codec:
    """Return a codec of one type and ``None``, or of types that are plain as they are."""
    others = [kind for kind in kinds if kind is not NoneType]
    read, write = _codec(others[0]) if len(others) == 1 else _AS_IT_IS
    if len(others) > 1 and int in others and float not in others:
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
