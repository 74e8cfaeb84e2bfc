"""Reads plain values as a JSON Schema says: what does not hold is told by its path, with what would be right.

Of JSON Schema (2020-12) as much as `report.schema.json` uses. The package itself needs no validator installed for that; the
suite holds this one against a whole one.
"""

from __future__ import annotations

import functools
import json
import math
import re
from importlib.resources import files
from typing import TYPE_CHECKING, Any, NamedTuple

from pytest_gpumem.metrics import METRICS, WHOLE
from pytest_gpumem.units import nearest
from pytest_gpumem.values.operator_counts import MADE_OF_OPERATORS

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping

    Check = Callable[[Any, str], Any]
    """Takes a value and its path, and gives the value back, or raises `SchemaError`."""

NOT_FINITE = {"Infinity": math.inf, "-Infinity": -math.inf, "NaN": math.nan}
"""How a number that JSON does not have is written."""
_WORDS = {
    "object": "an object",
    "array": "an array",
    "string": "a text",
    "boolean": "true or false",
    "integer": "a whole number",
    "number": "a number",
    "null": "null",
}
_TYPES: dict[type, tuple[str, ...]] = {
    dict: ("object",),
    list: ("array",),
    str: ("string",),
    bool: ("boolean",),
    int: ("integer", "number"),
    float: ("number",),
    type(None): ("null",),
}
_LONGEST = 60


class SchemaError(ValueError):
    """A value is not what the schema says; the message names its path, what it is and what would be right."""


def report_schema() -> dict[str, Any]:
    """The schema of a report: ``report.schema.json``, which allows any name of a metric, with the names that there are."""
    schema: dict[str, Any] = json.loads(
        files("pytest_gpumem.reports").joinpath("report.schema.json").read_text("utf-8")
    )
    schema["$defs"] |= {
        "metric_name": {"enum": list(METRICS)},
        "whole_metric": {"enum": [name for name, metric in METRICS.items() if metric.unit in WHOLE]},
        "counted_metric": {"enum": list(MADE_OF_OPERATORS)},
    }
    return schema


@functools.cache
def report_reader() -> Check:
    """What reads values as the schema of a report says."""
    schema = report_schema()
    return _Compiler(schema).check(schema)


class _Compiler:
    """Turns schemas into checks. A reference is looked up in the schema's ``$defs`` when it is first followed."""

    def __init__(self, schema: Mapping[str, Any]) -> None:
        self._definitions = schema.get("$defs", {})
        self._checks: dict[str, Check] = {}

    def check(self, schema: Mapping[str, Any]) -> Check:
        if "$ref" in schema:
            return self._definition(schema["$ref"].rpartition("/")[2])
        if "anyOf" in schema:
            return _any_of([self.check(one) for one in schema["anyOf"]])
        if "const" in schema or "enum" in schema:
            return _one_of(schema["enum"] if "enum" in schema else [schema["const"]])
        kinds = schema["type"]
        if kinds == "object":
            return self._object(schema)
        if kinds == "array":
            return self._array(schema)
        kinds = kinds if isinstance(kinds, list) else [kinds]
        return _plain(kinds, schema.get("minimum"), schema.get("maximum"))

    def _definition(self, name: str) -> Check:
        if name not in self._checks:
            self._checks[name] = self.check(self._definitions[name])
        return self._checks[name]

    def _object(self, schema: Mapping[str, Any]) -> Check:
        required = schema.get("required", [])
        properties = {name: self.check(one) for name, one in schema.get("properties", {}).items()}
        additional = schema.get("additionalProperties")
        others = self.check(additional) if additional else None
        names = self.check(schema["propertyNames"]) if "propertyNames" in schema else None
        patterns = [
            (re.compile(pattern), self.check(one)) for pattern, one in schema.get("patternProperties", {}).items()
        ]
        then = self._conditional(schema)

        def check(value: Any, path: str) -> Any:
            if type(value) is not dict:
                raise _wrong(value, path, _WORDS["object"])
            for name in required:
                if name not in value:
                    raise SchemaError(f"{_at(path, name)} is missing")
            found = {}
            for name, one in value.items():
                matching = (one for pattern, one in patterns if pattern.search(name))
                rule = properties.get(name) or next(matching, others)
                if rule is None:
                    raise SchemaError(
                        f"{_at(path, name)} is no key of it; {nearest(name[:_LONGEST], sorted(properties))}"
                    )
                if names is not None:
                    names(name, _at(path, name))
                found[name] = rule(one, _at(path, name))
            return found if then is None else found | then(value, path)

        return check

    def _conditional(self, schema: Mapping[str, Any]) -> Check | None:
        """What reads some keys in another way where ``if`` holds. It and ``then`` name keys that are required."""
        if "if" not in schema:
            return None
        given, wanted = (
            {name: self.check(one) for name, one in schema[word]["properties"].items()} for word in ("if", "then")
        )

        def check(value: Any, path: str) -> Any:
            try:
                for name, rule in given.items():
                    rule(value[name], path)
            except SchemaError:
                return {}
            return {name: rule(value[name], _at(path, name)) for name, rule in wanted.items()}

        return check

    def _array(self, schema: Mapping[str, Any]) -> Check:
        parts = [self.check(one) for one in schema.get("prefixItems", ())]
        item = self.check(schema["items"]) if "items" in schema else None
        least = schema.get("minItems", 0)
        numbers = self._numbers(schema.get("items", {}))

        def check(value: Any, path: str) -> Any:
            if type(value) is not list:
                raise _wrong(value, path, _WORDS["array"])
            if numbers is not None and len(value) >= max(least, 1) and numbers.hold(value):
                return value
            if (parts and len(value) != len(parts)) or len(value) < least:
                wanted = len(parts) or f"at least {least}"
                raise SchemaError(f"{path or 'it'} has {len(value)} items, expected {wanted}")
            if item is None:
                return [part(one, f"{path}[{n}]") for n, (part, one) in enumerate(zip(parts, value, strict=True))]
            return [item(one, f"{path}[{n}]") for n, one in enumerate(value)]

        return check

    def _numbers(self, schema: Mapping[str, Any]) -> _Numbers | None:
        """What numbers a schema allows, whatever else it does."""
        if "$ref" in schema:
            return self._numbers(self._definitions[schema["$ref"].rpartition("/")[2]])
        if schema.get("type") in ("integer", "number") and "minimum" in schema:
            types = (int,) if schema["type"] == "integer" else (int, float)
            return _Numbers(frozenset(types), schema["minimum"], schema["maximum"])
        found = (self._numbers(one) for one in schema.get("anyOf", ()))
        return next((numbers for numbers in found if numbers is not None), None)


class _Numbers(NamedTuple):
    """Numbers of these types, within bounds. Most of a report are series of them, which are not read one by one."""

    types: frozenset[type]
    least: float
    most: float

    def hold(self, values: list[Any]) -> bool:
        """Whether all ``values`` are such numbers."""
        return self.types.issuperset(map(type, values)) and self.least <= min(values) and max(values) <= self.most


def _any_of(checks: list[Check]) -> Check:
    def check(value: Any, path: str) -> Any:
        told: list[SchemaError] = []
        for one in checks:
            try:
                return one(value, path)
            except SchemaError as error:
                told.append(error)
        # The one that got furthest says most: what is wrong within an object, rather than that it is not null.
        raise max(told, key=lambda error: len(str(error).partition(" ")[0]))

    return check


def _one_of(allowed: list[Any]) -> Check:
    def check(value: Any, path: str) -> Any:
        if not any(value == one and type(value) is type(one) for one in allowed):
            raise _wrong(value, path, " or ".join(json.dumps(one) for one in allowed))
        return NOT_FINITE[value] if allowed == list(NOT_FINITE) else value

    return check


def _plain(kinds: list[str], least: float | None, most: float | None) -> Check:
    def check(value: Any, path: str) -> Any:
        if kinds == ["integer"] and type(value) is float and value.is_integer():
            # To JSON Schema 2.0 is a whole number.
            value = int(value)
        if not any(kind in kinds for kind in _TYPES.get(type(value), ())):
            raise _wrong(value, path, " or ".join(_WORDS[kind] for kind in kinds))
        if least is not None and most is not None and not isinstance(value, str) and not least <= value <= most:
            raise _wrong(value, path, f"a number from {least} to {most}")
        return value

    return check


def _at(path: str, name: str) -> str:
    shown = name if name.isidentifier() and len(name) <= _LONGEST else _shown(name)
    return f"{path}.{shown}" if path else shown


def _wrong(value: Any, path: str, right: str) -> SchemaError:
    text = _shown(value)
    return SchemaError(f"{path or 'it'} is {text}, expected {right}")


def _shown(value: Any) -> str:
    if isinstance(value, (dict, list)):
        return _WORDS["object" if isinstance(value, dict) else "array"]
    if isinstance(value, int) and abs(value) >= 10**_LONGEST:
        # Python refuses to write out the longest of them.
        return "a number of very many digits"
    text = json.dumps(value)
    return text if len(text) <= _LONGEST else f"{text[:_LONGEST]}..."
