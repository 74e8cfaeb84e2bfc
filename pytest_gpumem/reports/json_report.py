"""A session's report as JSON, and back. Pure; every mistake in a text is told with its place and what would be right."""

from __future__ import annotations

import json
import math
from typing import TYPE_CHECKING, Any

from pytest_gpumem import __version__
from pytest_gpumem.reports.session_report import SessionReport
from pytest_gpumem.values.plain import from_plain, to_plain

if TYPE_CHECKING:
    from typing import NoReturn

FORMAT = 1
"""The number of the JSON's format; ``report.schema.json`` is its schema."""
_OURS = ("accounting", "terms")
_RIGHT = "a report is what `pytest --gpumem-report=FILE.json` writes"


class ReportError(ValueError):
    """A text that is not a report; the message names the file, what is wrong with it and what would be right."""


def to_json(report: SessionReport) -> str:
    """The whole report, the same bytes for the same report.

    ``accounting``, ``passed`` and ``problems`` follow from the rest, for those who only read. A line each key, and each test:
    so is a large report written in little time, and read by line-wise tools. All is ASCII; a number that JSON does not have
    is the text ``"Infinity"``, ``"-Infinity"`` or ``"NaN"``.
    """
    plain = {
        "format": FORMAT,
        "accounting": report.accounting,
        "passed": report.passed,
        "problems": list(report.problems),
        **to_plain(report),
    }
    lines = [
        f"{json.dumps(key)}: {_results(value) if key == 'results' else _dumped(value)}" for key, value in plain.items()
    ]
    return "{\n" + ",\n".join(lines) + "\n}\n"


def from_json(text: str, name: str) -> SessionReport:
    """The report that `to_json` wrote as ``text``; ``name`` is the file's. Raises `ReportError`, and nothing else."""
    try:
        return _read(text, name)
    except RecursionError:
        raise ReportError(f"{name}: it is nested too deeply for a report; {_RIGHT}") from None


def _read(text: str, name: str) -> SessionReport:
    from pytest_gpumem.reports.json_schema import SchemaError, report_reader

    try:
        plain = json.loads(text.removeprefix("\ufeff"), parse_constant=_no_number, parse_float=_finite)
    except ValueError as error:
        raise ReportError(f"{name}: {_not_json(text, error)}; {_RIGHT}") from None
    if not isinstance(plain, dict) or "format" not in plain or plain.keys().isdisjoint(_OURS):
        raise ReportError(f"{name}: it is JSON, but not a report of pytest-gpumem; {_RIGHT}")
    if plain["format"] != FORMAT or isinstance(plain["format"], bool):
        raise ReportError(
            f"{name}: its format is {json.dumps(plain['format'])[:40]}, this version of pytest-gpumem reads {FORMAT}; "
            "read it with the version that wrote it"
        )
    try:
        read = report_reader()(plain, "")
        return from_plain(SessionReport, read)
    except (SchemaError, ArithmeticError, AttributeError, LookupError, TypeError, ValueError) as error:
        # What a schema cannot say: rows of compositions, rounds that are as many as their paces.
        raise ReportError(f"{name}: {error}; {_other_version(plain) or _RIGHT}") from None


def _other_version(plain: dict[str, Any]) -> str | None:
    version = plain.get("version")
    if not isinstance(version, str) or version == __version__:
        return None
    return f"it is of pytest-gpumem {ascii(version[:40])[1:-1]}, this is {__version__}"


def _results(results: list[Any]) -> str:
    return "[\n" + ",\n".join(map(_dumped, results)) + "\n]" if results else "[]"


def _dumped(value: Any) -> str:
    try:
        return json.dumps(value, sort_keys=True, allow_nan=False)
    except ValueError:
        return json.dumps(without_infinity(value), sort_keys=True, allow_nan=False)


def without_infinity(value: Any) -> Any:
    """A plain value in which each number that JSON does not have is the text for it."""
    if isinstance(value, dict):
        return {key: without_infinity(one) for key, one in value.items()}
    if isinstance(value, (list, tuple)):
        return [without_infinity(one) for one in value]
    if isinstance(value, float) and not math.isfinite(value):
        return "NaN" if math.isnan(value) else "Infinity" if value > 0 else "-Infinity"
    return value


def _no_number(text: str) -> NoReturn:
    raise ValueError(f"{text} is no number in JSON")


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
        return f"it is cut off after {len(read.splitlines())} lines"
    return f"it is not JSON at line {error.lineno}, column {error.colno}: {error.msg}"
