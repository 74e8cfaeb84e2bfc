"""Write a session's report as JSON, and read it back. Pure.

An error names the key with the mistake and the expected value.
"""

from __future__ import annotations

import functools
import json
import math
from dataclasses import asdict
from importlib.resources import files
from typing import TYPE_CHECKING, Any

from pytest_gpumem import __version__
from pytest_gpumem.base.errors import ReportError
from pytest_gpumem.base.units import counted, nearest
from pytest_gpumem.facts.metrics import METRICS, WHOLE
from pytest_gpumem.facts.values.operator_counts import MADE_OF_OPERATORS
from pytest_gpumem.facts.values.plain import from_plain, to_plain
from pytest_gpumem.reporting.reports.causes import plain_causes
from pytest_gpumem.reporting.reports.file_kinds import SESSION, STORED, kind_of, kind_of_json
from pytest_gpumem.reporting.reports.ranks import peaks_by_rank
from pytest_gpumem.reporting.reports.session_report import SessionReport

if TYPE_CHECKING:
    from collections.abc import Callable
    from typing import NoReturn

    from fastjsonschema import JsonSchemaValueException

    from pytest_gpumem.reporting.reports.ranks import RankPeaks

FORMAT = 1
"""The version number of the JSON format, whose schema is ``report.schema.json``."""
_OURS = ("accounting", "terms")
_RIGHT = "write a report with `pytest --gpumem-report=FILE.json`"


_FEW = 10
"""In an array of numbers, the schema checks only this many items."""
_LONGEST = 200


def to_json(report: SessionReport) -> str:
    r"""Return a session's report as JSON in format 1. Equal reports become equal texts.

    The text is ASCII, with a line for each key and each test. Bytes and counts are whole numbers, and times are in
    seconds. Infinite numbers and NaN, which JSON lacks, are written as ``"Infinity"``, ``"-Infinity"`` and ``"NaN"``. A lone
    surrogate, which only a file name can contain, is written as ``\udcff``.

    The rows of a composition are texts, as `Row.text` returns them. With ``--gpumem-explain=always``, ``| callers | named
    caller`` follows if a row has callers. For example, ``a.py:3 < b.py:8 ; a.py:3 < c.py:5`` are two call paths to ``a.py:3``.
    The operators behind counts are texts as in the [store](store-format.md#keys-of-a-measurement), followed by callers, named
    caller and reason if there are any.

    A report has every key in these tables and no other key, so a new key needs a new format number. The schema
    ``pytest_gpumem/reporting/reports/report.schema.json`` (JSON Schema 2020-12) allows any metric name, because a newer version
    may have more metrics. ``accounting``, ``passed``, ``problems``, ``ranks``, ``causes`` and ``not_explained`` are computed
    from the other keys.
    """
    plain = {
        "format": FORMAT,
        "accounting": report.accounting,
        "passed": report.passed,
        "problems": list(report.problems),
        "ranks": [_plain_ranks(row) for row in peaks_by_rank(report.results)],
        **plain_causes(report.causes),
        **to_plain(report),
    }
    lines = [
        f"{json.dumps(key)}: {_results(value) if key == 'results' else _dumped(value)}" for key, value in plain.items()
    ]
    return "{\n" + ",\n".join(lines) + "\n}\n"


def from_json(text: str, name: str) -> SessionReport:
    """Return the report that `to_json` wrote.

    Args:
        text: The JSON.
        name: The file's name, for errors.

    Raises:
        ReportError: The text is not a report. No other exception is raised.
    """
    try:
        return _read(text, name)
    except RecursionError:
        raise ReportError(f"{name}: its JSON is nested too deeply for a report; {_RIGHT}") from None


def _read(text: str, name: str) -> SessionReport:
    try:
        plain = json.loads(text.removeprefix("\ufeff"), parse_constant=_no_number, parse_float=_finite)
    except ValueError as error:
        kind = kind_of(text)
        wrong = f"it is {kind}" if kind == STORED else _not_json(text, error)
        raise ReportError(f"{name}: {wrong}; {_RIGHT}") from None
    kind = kind_of_json(plain)
    if kind not in (None, SESSION):
        raise ReportError(f"{name}: it is {kind}; {_RIGHT}")
    if not isinstance(plain, dict) or "format" not in plain or plain.keys().isdisjoint(_OURS):
        raise ReportError(f"{name}: it is JSON, but not a report of pytest-gpumem; {_RIGHT}")
    if plain["format"] != FORMAT or isinstance(plain["format"], bool):
        raise ReportError(
            f"{name}: its format is {json.dumps(plain['format'])[:40]}, this version of pytest-gpumem reads {FORMAT}; "
            "read the report with the version that wrote it"
        )
    right = _other_version(plain) or _RIGHT
    mistake = mistake_in(plain)
    if mistake is not None:
        raise ReportError(f"{name}: {mistake}; {right}")
    try:
        return from_plain(SessionReport, _with_ints(plain))
    except (ArithmeticError, TypeError, ValueError) as error:
        # The schema cannot check the texts of composition rows, or compare the lengths of two arrays.
        raise ReportError(f"{name}: {error}; {right}") from None


def _with_ints(plain: dict[str, Any]) -> dict[str, Any]:
    """Return a valid report with bytes and counts as ints, because other programs may write 12.0 instead of 12."""
    for verdict in (verdict for result in plain["results"] for verdict in result["verdict"]["verdicts"]):
        by_device = verdict["measurement"].get("by_device", {})
        for values in (verdict["measurement"]["metrics"], *by_device.values()):
            values |= {name: int(value) for name, value in values.items() if METRICS[name].unit in WHOLE}
        for metric in verdict["metrics"]:
            if METRICS[metric["metric"]].unit in WHOLE:
                metric |= {key: int(metric[key]) for key in ("value", "baseline", "budget") if metric[key] is not None}
    return plain


def report_schema() -> dict[str, Any]:
    """Return the schema for reports from this version: ``report.schema.json`` with the names of this version's metrics."""
    schema: dict[str, Any] = json.loads(
        files("pytest_gpumem.reporting.reports").joinpath("report.schema.json").read_text("utf-8")
    )
    schema["$defs"] |= {
        "metric_name": {"enum": list(METRICS)},
        "whole_metric": {"enum": [name for name, metric in METRICS.items() if metric.unit in WHOLE]},
        "counted_metric": {"enum": list(MADE_OF_OPERATORS)},
    }
    return schema


def mistake_in(plain: Any) -> str | None:
    """Return the first violation of the report schema, with its path and the expected value; ``None`` if ``plain`` is valid."""
    from fastjsonschema import JsonSchemaValueException

    try:
        _validator()(_outlined(plain))
    except JsonSchemaValueException as error:
        return _mistake(error)
    return None


@functools.cache
def _validator() -> Callable[[Any], Any]:
    import fastjsonschema

    validator: Callable[[Any], Any] = fastjsonschema.compile(_draft_7(report_schema()), use_default=False)
    return validator


def _draft_7(schema: Any) -> Any:
    """Return the same schema in draft 7, which fastjsonschema can read.

    A nullable value becomes ``if``/``else``, because an error in ``anyOf`` would not name the mistake within the value.
    """
    if isinstance(schema, list):
        return [_draft_7(subschema) for subschema in schema]
    if not isinstance(schema, dict):
        return schema
    converted = {"items" if word == "prefixItems" else word: _draft_7(subschema) for word, subschema in schema.items()}
    null = {"type": "null"}
    if null in converted.get("anyOf", ()):
        (not_null,) = (subschema for subschema in converted.pop("anyOf") if subschema != null)
        converted |= {"if": null, "else": not_null}
    return converted


def _outlined(plain: Any) -> Any:
    """Return ``plain`` with only the first items of long number lists, which makes the check against the schema fast.

    The result is valid if and only if ``plain`` is valid.
    """
    if isinstance(plain, dict):
        return {key: _outlined(value) for key, value in plain.items()}
    if not isinstance(plain, list):
        return plain
    kinds = set(map(type, plain))
    are_equal_kinds = kinds == {int} or (kinds == {float} and len(set(map(float.is_integer, plain))) == 1)
    if are_equal_kinds and min(plain) >= -(2**63) and max(plain) < 2**63:
        return plain[:_FEW]
    return [_outlined(value) for value in plain]


def _mistake(error: JsonSchemaValueException) -> str:
    path = str(error.name)
    if error.rule in ("additionalProperties", "propertyNames"):
        valid = error.definition["properties"] if error.rule_definition is False else error.rule_definition["enum"]
        unknown = next(name for name in error.value if name not in valid)
        return f"{_shown(f'{path}.{unknown}')} is not a known key; {nearest(unknown[:_LONGEST], sorted(valid))}"
    if error.rule == "required":
        return (
            f"{_shown(f'{path}.' + next(name for name in error.rule_definition if name not in error.value))} is missing"
        )
    expected = error.message.removeprefix(f"{path} ")
    if error.rule in ("anyOf", "enum"):
        expected = f"must be {_kind(error.definition)}"
    but = f"has {len(error.value)}" if error.rule in ("minItems", "maxItems") else f"is {_value(error.value)}"
    return f"{_shown(path)} {expected}, but {but}"


def _kind(schema: dict[str, Any]) -> str:
    if "anyOf" in schema:
        return " or ".join(map(_kind, schema["anyOf"]))
    if "enum" in schema:
        return f"one of {', '.join(map(json.dumps, schema['enum']))}"
    return str(schema.get("type") or schema["$ref"].rpartition("/")[2])


def _value(value: Any) -> str:
    if isinstance(value, (dict, list)):
        return "an object" if isinstance(value, dict) else "an array"
    if isinstance(value, int) and abs(value) >= 10**_LONGEST:
        # Python refuses to convert integers with thousands of digits to text.
        return "a number with very many digits"
    return _cut(json.dumps(value))


def _shown(path: str) -> str:
    return _cut(json.dumps(path.removeprefix("data").removeprefix("."))[1:-1]) or "it"


def _cut(text: str) -> str:
    return text if len(text) <= _LONGEST else f"{text[:_LONGEST]}..."


def _other_version(plain: dict[str, Any]) -> str | None:
    version = plain.get("version")
    if not isinstance(version, str) or version == __version__:
        return None
    return f"it comes from pytest-gpumem {ascii(version[:40])[1:-1]}, this is {__version__}"


def _plain_ranks(row: RankPeaks) -> dict[str, Any]:
    plain = asdict(row)
    del plain["several"]
    return {**plain, "smallest": row.smallest[0], "largest": row.largest[0], "imbalance": row.imbalance}


def _results(results: list[Any]) -> str:
    return "[\n" + ",\n".join(map(_dumped, results)) + "\n]" if results else "[]"


def _dumped(value: Any) -> str:
    try:
        return json.dumps(value, sort_keys=True, allow_nan=False)
    except ValueError:
        return json.dumps(without_infinity(value), sort_keys=True, allow_nan=False)


def without_infinity(value: Any) -> Any:
    """Return a plain value with infinite numbers and NaN as texts, because JSON has no such numbers."""
    if isinstance(value, dict):
        return {key: without_infinity(part) for key, part in value.items()}
    if isinstance(value, (list, tuple)):
        return [without_infinity(part) for part in value]
    if isinstance(value, float) and not math.isfinite(value):
        return "NaN" if math.isnan(value) else "Infinity" if value > 0 else "-Infinity"
    return value


def _no_number(text: str) -> NoReturn:
    raise ValueError(f"JSON has no number {text}")


def _finite(text: str) -> float:
    number = float(text)
    if not math.isfinite(number):
        raise ValueError(f"the number {text[:40]} is too large")
    return number


def _not_json(text: str, error: ValueError) -> str:
    if not text.strip():
        return "it is empty"
    if not isinstance(error, json.JSONDecodeError):
        return f"it is not JSON: {error}"
    read = text.strip()
    if read.startswith("{") and (not read.endswith("}") or error.pos >= len(text.rstrip())):
        return f"it is cut off after {counted(len(read.splitlines()), 'line')}"
    return f"it is not JSON at line {error.lineno}, column {error.colno}: {error.msg}"
