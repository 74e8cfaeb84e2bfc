"""Convert frozen values to JSON and back, by their fields' annotations.

A dataclass becomes a JSON object with a key for each field. A named tuple becomes an array, and a frozen set becomes a sorted
array. If an array was written by an older version and is too short for its named tuple, the last fields get their defaults. An
entry in ``Annotated`` changes this for a field, for example a `Form` or a `Range`. A field's metadata may have the key in JSON
(`KEY`), and may allow that the key is missing (`ADDED`). The JSON schema follows from the same annotations.

Example: ``to_plain(PhaseSpan("forward", 0, 900))`` is ``{"name": "forward", "begin": 0, "end": 900}``.
"""

from __future__ import annotations

import functools
import itertools
import re
import sys
from collections.abc import Callable, Mapping
from dataclasses import MISSING, Field, fields, is_dataclass
from enum import Enum
from types import MappingProxyType, NoneType, UnionType
from typing import (
    TYPE_CHECKING,
    Annotated,
    Any,
    Literal,
    NamedTuple,
    TypeVar,
    Union,
    get_args,
    get_origin,
    get_type_hints,
)

from pytest_gpumem.base.units import nearest
from pytest_gpumem.facts.values.annotations import ADDED, KEY, Excerpt, Form, Name, NotEmpty, Range
from pytest_gpumem.facts.values.plain_error import PlainError, expected, one_of

if TYPE_CHECKING:
    from collections.abc import Collection, Iterable

_T = TypeVar("_T")
Schema = dict[str, Any]
_MOST_OF_A_KEY = 200


def to_plain(value: Any) -> Any:
    """Convert a dataclass to dicts, lists, strings and numbers. `from_plain` converts them back."""
    kind: Any = type(value)
    return codec_of(kind).write(value)


def from_plain(kind: Callable[..., _T], plain: Any) -> _T:
    """Check a result from `to_plain`, and convert it back to a dataclass.

    The strings ``"Infinity"``, ``"-Infinity"`` and ``"NaN"`` are accepted as numbers, and ``2.0`` as an integer.

    Args:
        kind: The dataclass to create.
        plain: The dicts, lists, strings and numbers, from any source.

    Raises:
        PlainError: A part in ``plain`` does not fit its annotation. No other exception is raised.
    """
    value: _T = codec_of(kind).read(plain)
    return value


def json_schema(kind: type, describe: Callable[[type, str], str]) -> Schema:
    """Return the schema for a class's plain form, in JSON Schema 2020-12. Its definitions are in ``$defs``.

    Args:
        kind: The dataclass.
        describe: A function that returns the description for a class's field.
    """
    definitions = Definitions(describe)
    codec_of(kind).schema(definitions)
    schema = definitions.pop(_definition_name(kind))
    return {**schema, "$defs": dict(definitions)}


class FrozenValue:
    """Base class for frozen dataclasses with read-only mappings.

    Python cannot pickle a read-only mapping, so an object is pickled as its plain form.
    """

    __slots__ = ()

    def _freeze(self, **mappings: Mapping[str, Any]) -> None:
        """Set each named field to a read-only copy of a mapping."""
        for name, mapping in mappings.items():
            object.__setattr__(self, name, MappingProxyType(dict(mapping)))

    def __reduce__(self) -> tuple[Any, ...]:
        return from_plain, (type(self), to_plain(self))


class Definitions(dict[str, Schema]):
    """A schema's definitions by name. ``describe`` returns the description for a class's field."""

    def __init__(self, describe: Callable[[type, str], str]) -> None:
        super().__init__()
        self.describe = describe

    def refer(self, name: str, make: Callable[[], Schema]) -> Schema:
        """Return a reference to a definition. If the definition is missing, ``make`` returns it."""
        if name not in self:
            self[name] = {}  # keeps the order of the references
            self[name] = make()
        return {"$ref": f"#/$defs/{name}"}


class Codec(NamedTuple):
    """Functions for all values with the same annotation."""

    read: Callable[[Any], Any]
    """Check a plain value, and convert it. Raises `PlainError` if it does not fit."""
    write: Callable[[Any], Any]
    """Convert a value to a plain value."""
    schema: Callable[[Definitions], Schema]
    """Return the schema for the plain values."""
    are_unchanged: Callable[[list[Any]], bool] = lambda _: False
    """Return True only if `read` would return each item in a list unchanged. This makes long lists with numbers fast."""
    names: Collection[str] = ()
    """The valid texts; empty if all texts are valid."""


@functools.cache
def codec_of(kind: Any) -> Codec:
    """Return the codec for an annotation."""
    generic = _GENERIC.get(get_origin(kind))
    if generic is not None:
        return generic(*get_args(kind))
    if is_dataclass(kind):
        codec, rule = _object(kind), getattr(kind, "PLAIN_RULE", None)
        return codec if rule is None else rule(codec)
    if isinstance(kind, type) and issubclass(kind, Enum):
        return _words([word.value for word in kind], kind)._replace(write=lambda word: word.value)
    if isinstance(kind, type) and issubclass(kind, tuple):
        hints = list(get_type_hints(kind, include_extras=True).values())
        array = _array(lambda parts: kind(*parts), hints, defaults=len(getattr(kind, "_field_defaults", ())))
        return array._replace(
            schema=lambda definitions: definitions.refer(_definition_name(kind), lambda: array.schema(definitions))
        )
    return _SIMPLE.get(kind, Codec(_unchanged, _unchanged, lambda _: {}))


def _definition_name(kind: type) -> str:
    """Return a class's name in the schema: ``test_verdict`` for ``TestVerdict``."""
    return re.sub(r"(?<!^)(?=[A-Z])", "_", kind.__name__).lower()


def _made(make: Callable[..., _T], *args: Any, **values: Any) -> _T:
    """Return ``make(*args, **values)``. An error in it becomes a `PlainError`."""
    try:
        return make(*args, **values)
    except PlainError:
        raise
    except (ArithmeticError, TypeError, ValueError) as error:
        # Annotations cannot check the texts of composition rows, or compare the lengths of two arrays.
        raise PlainError(f"is wrong: {error}") from None


def _integer(limits: Range) -> Codec:
    """Return the codec for integers. A JSON file may contain 2.0 for the integer 2."""
    least, most = limits

    def read(plain: Any) -> int:
        value = int(plain) if isinstance(plain, float) and plain.is_integer() else plain
        if not isinstance(value, int) or isinstance(value, bool):
            raise expected("an integer", plain)
        if not least <= value <= most:
            raise expected(f"at least {least}" if value < least else f"at most {most}", plain)
        return value

    return Codec(
        read,
        _unchanged,
        lambda _: {"type": "integer", "minimum": least, "maximum": most},
        lambda plain: set(map(type, plain)) == {int} and min(plain) >= least and max(plain) <= most,
    )


def _words(words: Iterable[Any], make: Callable[[Any], Any] | None = None) -> Codec:
    """Return the codec for some words. ``make`` converts a word; by default a word is not converted."""
    values = {word: word if make is None else make(word) for word in words}

    def read(plain: Any) -> Any:
        if isinstance(plain, (str, int)) and not isinstance(plain, bool) and plain in values:
            return values[plain]
        raise expected(one_of(values), plain)

    return Codec(read, _unchanged, lambda _: {"enum": list(values)}, names=values)


def mapping_codec(name: Codec, codec_at: Callable[[str], Codec], schema: Callable[[Definitions], Schema]) -> Codec:
    """Return the codec for a mapping from names to values.

    Args:
        name: The codec for the names.
        codec_at: Returns the codec for the value with a name.
        schema: Returns the mapping's schema.
    """

    def read(plain: Any) -> dict[str, Any]:
        _check_object(plain)
        if name.names and not plain.keys() <= set(name.names):
            raise _unknown(plain, name.names)
        return {key: _read_at(key, codec_at(key), value) for key, value in plain.items()}

    return Codec(read, lambda value: {key: codec_at(key).write(part) for key, part in value.items()}, schema)


def _unchanged(value: Any) -> Any:
    return value


def _text(plain: Any) -> str:
    if isinstance(plain, str):
        return plain
    raise expected("a string", plain)


def _boolean(plain: Any) -> bool:
    if isinstance(plain, bool):
        return plain
    raise expected("true or false", plain)


_INFINITE = ("Infinity", "-Infinity", "NaN")
_LARGEST = sys.float_info.max


def _number(plain: Any) -> float:
    if isinstance(plain, float):
        return plain
    if isinstance(plain, int) and not isinstance(plain, bool) and -_LARGEST <= plain <= _LARGEST:
        return plain
    if plain in _INFINITE:
        return float(plain)
    raise expected(f"a number or {one_of(_INFINITE)}", plain)


def _number_schema(definitions: Definitions) -> Schema:
    limits = {"type": "number", "minimum": -_LARGEST, "maximum": _LARGEST}
    return definitions.refer("number", lambda: {"anyOf": [limits, {"enum": list(_INFINITE)}]})


_SIMPLE: dict[Any, Codec] = {
    str: Codec(_text, _unchanged, lambda _: {"type": "string"}, lambda plain: set(map(type, plain)) == {str}),
    bool: Codec(_boolean, _unchanged, lambda _: {"type": "boolean"}),
    int: _integer(Range()),
    float: Codec(_number, _unchanged, _number_schema, lambda plain: set(map(type, plain)) == {float}),
}


def _object(kind: Any) -> Codec:
    hints = get_type_hints(kind, include_extras=True)
    keys = {field.metadata.get(KEY, field.name): field for field in fields(kind)}
    parts = [(key, field.name, codec_of(hints[field.name])) for key, field in keys.items()]
    required = [key for key, field in keys.items() if not _may_be_missing(kind, field)]

    def read(plain: Any) -> Any:
        _check_object(plain)
        if plain.keys() != keys.keys():
            _check_keys(plain, required, keys.keys() | plain.keys() if issubclass(kind, Excerpt) else keys.keys())
        return _made(kind, **{name: _read_at(key, codec, plain[key]) for key, name, codec in parts if key in plain})

    def definition(definitions: Definitions) -> Schema:
        properties = {
            key: {**codec.schema(definitions), "description": definitions.describe(kind, name)}
            for key, name, codec in parts
        }
        return {"type": "object", "additionalProperties": False, "required": required, "properties": properties}

    return Codec(
        read,
        lambda value: {key: codec.write(getattr(value, name)) for key, name, codec in parts},
        lambda definitions: definitions.refer(_definition_name(kind), lambda: definition(definitions)),
    )


def _may_be_missing(kind: type, field: Field[Any]) -> bool:
    return field.default is not MISSING if issubclass(kind, Excerpt) else field.metadata.keys() >= ADDED.keys()


def _check_object(plain: Any) -> None:
    if not isinstance(plain, dict):
        raise expected("an object", plain)


def _check_keys(plain: Mapping[str, Any], required: Iterable[str], known: Collection[str]) -> None:
    for key in required:
        if key not in plain:
            raise PlainError("is missing", key)
    if any(key not in known for key in plain):
        raise _unknown(plain, known)


def _unknown(plain: Iterable[str], known: Collection[str]) -> PlainError:
    key = next(key for key in plain if key not in known)
    return PlainError(f"is not a known key; {nearest(key[:_MOST_OF_A_KEY], sorted(known))}", key)


def _read_at(key: str, codec: Codec, plain: Any) -> Any:
    try:
        return codec.read(plain)
    except PlainError as error:
        raise error.within(key) from None


def _array(make: Callable[[Any], Any], kinds: Iterable[Any], defaults: int = 0) -> Codec:
    codecs = list(map(codec_of, kinds))
    least, most = len(codecs) - defaults, len(codecs)

    def read(plain: Any) -> Any:
        _check_array(plain)
        if not least <= len(plain) <= most:
            counts = f"{most}" if least == most else f"{least} to {most}"
            raise PlainError(f"must have {counts} items, but has {len(plain)}")
        return _made(make, _read_items(codecs, plain))

    return Codec(
        read,
        lambda value: [codec.write(part) for codec, part in zip(codecs, value, strict=True)],
        lambda definitions: {
            "type": "array",
            "prefixItems": [codec.schema(definitions) for codec in codecs],
            "minItems": least,
            "maxItems": most,
        },
    )


def _list(make: Callable[[Any], Any], order: Callable[[Any], Any], kind: Any) -> Codec:
    item = codec_of(kind)

    def read(plain: Any) -> Any:
        _check_array(plain)
        return make(plain if item.are_unchanged(plain) else _read_items(itertools.repeat(item), plain))

    return Codec(
        read,
        lambda value: order(map(item.write, value)),
        lambda definitions: {"type": "array", "items": item.schema(definitions)},
    )


def _check_array(plain: Any) -> None:
    if not isinstance(plain, list):
        raise expected("an array", plain)


def _read_items(codecs: Iterable[Codec], plain: list[Any]) -> list[Any]:
    values: list[Any] = []
    try:
        for codec, part in zip(codecs, plain, strict=False):
            values.append(codec.read(part))
    except PlainError as error:
        raise error.within(len(values)) from None
    return values


def _tuple(*kinds: Any) -> Codec:
    return _list(tuple, list, kinds[0]) if kinds[-1] is ... else _array(tuple, kinds)


def _mapping(name: Any, kind: Any) -> Codec:
    names, value = codec_of(name), codec_of(kind)

    def schema(definitions: Definitions) -> Schema:
        valid = {"propertyNames": names.schema(definitions)} if names.names else {}
        return {"type": "object", **valid, "additionalProperties": value.schema(definitions)}

    return mapping_codec(names, lambda _: value, schema)


def _union(*kinds: Any) -> Codec:
    """Return the codec for ``T | None``, or for a union of several types that JSON has itself, such as ``int | str``."""
    codecs = [codec_of(kind) for kind in kinds if kind is not NoneType]
    null = ["null"] if NoneType in kinds else []

    def read(plain: Any) -> Any:
        if plain is None and null:
            return None
        kinds_expected = []
        for codec in codecs:
            try:
                return codec.read(plain)
            except PlainError as error:
                if error.keys or not error.expected:
                    raise
                kinds_expected.append(error.expected)
        raise expected(" or ".join([*kinds_expected, *null]), plain)

    write = codecs[0].write if len(codecs) == 1 else _unchanged
    return Codec(
        read,
        lambda value: None if value is None else write(value),
        lambda definitions: {
            "anyOf": [*(codec.schema(definitions) for codec in codecs), *({"type": name} for name in null)]
        },
    )


def _formed(_: Any, form: Form) -> Codec:
    plain = codec_of(form.plain)
    return Codec(
        lambda value: _made(form.read, plain.read(value)),
        lambda value: plain.write(form.write(value)),
        plain.schema,
    )


def _named(_: Any, name: Name) -> Codec:
    words = _words(name.valid)

    def schema(definitions: Definitions) -> Schema:
        return definitions.refer(name.definition, lambda: name.published or words.schema(definitions))

    return words._replace(schema=schema)


def _not_empty(kind: Any, _: NotEmpty) -> Codec:
    array = codec_of(kind)

    def read(plain: Any) -> Any:
        if plain == []:
            raise PlainError("must have at least 1 item, but has 0")
        return array.read(plain)

    return array._replace(read=read, schema=lambda definitions: {**array.schema(definitions), "minItems": 1})


_ENTRIES: dict[type, Callable[[Any, Any], Codec]] = {
    Form: _formed,
    Name: _named,
    NotEmpty: _not_empty,
    Range: lambda _, limits: _integer(limits),
}
_GENERIC: dict[Any, Callable[..., Codec]] = {
    Annotated: lambda kind, entry: _ENTRIES[type(entry)](kind, entry) if type(entry) in _ENTRIES else entry.codec(kind),
    Literal: lambda *words: _words(words),
    Mapping: _mapping,
    Union: _union,
    UnionType: _union,
    frozenset: functools.partial(_list, frozenset, sorted),
    tuple: _tuple,
}
