"""Metrics in JSON: their names and values. Bytes and counts are integers there, and other metrics are numbers."""

from __future__ import annotations

from dataclasses import replace
from typing import Annotated, Any, NamedTuple, get_args

from pytest_gpumem.facts.metrics import METRICS, WHOLE
from pytest_gpumem.facts.values.annotations import Name
from pytest_gpumem.facts.values.operator_counts import MADE_OF_OPERATORS
from pytest_gpumem.facts.values.plain import Codec, Definitions, Schema, codec_of, mapping_codec
from pytest_gpumem.facts.values.plain_error import PlainError

MetricName = Annotated[
    str,
    Name(
        "metric_name",
        METRICS,
        {
            "type": "string",
            "description": "The name of a metric. A later version of pytest-gpumem may have more metrics.",
        },
    ),
]
CountedMetric = Annotated[
    str,
    Name(
        "counted_metric",
        MADE_OF_OPERATORS,
        {"type": "string", "description": "The name of a metric that counts operators."},
    ),
]
_NOT_WHOLE = "^(.+_time|throughput|imbalance)$"
"""A pattern for the metrics that are not in bytes or counts. The schema names no metric, because a later version may have
more."""
_PEAK = "peak_allocated"


def _codec_at(metric: str) -> Codec:
    return codec_of(int if METRICS[metric].unit in WHOLE else float)


class Figures:
    """The entry in ``Annotated[Mapping[str, float], Figures()]`` for values by metric, among them ``peak_allocated``."""

    def codec(self, kind: Any) -> Codec:
        _, value = get_args(kind)
        names = codec_of(MetricName)
        mapping = mapping_codec(names, _codec_at if value is float else lambda _: codec_of(value), lambda _: {})

        def read(plain: Any) -> dict[str, float]:
            figures: dict[str, float] = mapping.read(plain)
            if _PEAK not in figures:
                raise PlainError("is missing", _PEAK)
            return figures

        def schema(definitions: Definitions) -> Schema:
            other = {"patternProperties": {_NOT_WHOLE: codec_of(float).schema(definitions)}} if value is float else {}
            return {
                "type": "object",
                "required": [_PEAK],
                "propertyNames": names.schema(definitions),
                **other,
                "additionalProperties": codec_of(int).schema(definitions),
            }

        return Codec(read, dict, schema)


class WholeByMetric(NamedTuple):
    """A class's ``PLAIN_RULE``: these fields are integers if the class's field ``metric`` names a metric in bytes or counts."""

    keys: tuple[str, ...]

    def __call__(self, codec: Codec) -> Codec:
        """Return the codec with this rule."""

        def read(plain: Any) -> Any:
            value = codec.read(plain)
            if METRICS[value.metric].unit not in WHOLE:
                return value
            integers = {}
            for key in self.keys:
                try:
                    integers[key] = None if plain[key] is None else codec_of(int).read(plain[key])
                except PlainError as error:
                    raise error.within(key) from None
            are_floats = any(isinstance(getattr(value, key), float) for key in self.keys)
            return replace(value, **integers) if are_floats else value

        def schema(definitions: Definitions) -> Schema:
            reference = codec.schema(definitions)
            definition = definitions[reference["$ref"].rpartition("/")[2]]
            if "if" not in definition:
                integer = codec_of(int | None).schema(definitions)
                definition |= {
                    "if": {"properties": {"metric": {"not": {"pattern": _NOT_WHOLE}}}},
                    "then": {"properties": dict.fromkeys(self.keys, integer)},
                }
            return reference

        return Codec(read, codec.write, schema)
