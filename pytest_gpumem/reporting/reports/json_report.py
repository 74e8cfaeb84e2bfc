"""Write a session's report as JSON, and read it back. Pure.

An error names the key with the mistake and the expected value.
"""

from __future__ import annotations

import json
import math
from dataclasses import fields
from typing import TYPE_CHECKING, Any

from pytest_gpumem import __version__
from pytest_gpumem.base.errors import ReportError
from pytest_gpumem.base.units import counted
from pytest_gpumem.facts.values.plain import from_plain, to_plain
from pytest_gpumem.facts.values.plain_error import PlainError
from pytest_gpumem.reporting.reports.derived_keys import FORMAT, DerivedKeys, derived_keys
from pytest_gpumem.reporting.reports.file_kinds import SESSION, STORED, kind_of, kind_of_json
from pytest_gpumem.reporting.reports.session_report import SessionReport

if TYPE_CHECKING:
    from typing import NoReturn

_OURS = ("accounting", "terms")
_DERIVED = frozenset(field.name for field in fields(DerivedKeys))
_RIGHT = "write a report with `pytest --gpumem-report=FILE.json`"


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
    ``pytest_gpumem/reporting/reports/report.schema.json`` (JSON Schema 2020-12) allows any metric name, because a later version
    may have more metrics. ``accounting``, ``passed``, ``problems``, ``ranks``, ``causes`` and ``not_explained`` are computed
    from the other keys.
    """
    plain = {**to_plain(derived_keys(report)), **to_plain(report)}
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
    try:
        from_plain(DerivedKeys, {key: plain.pop(key) for key in _DERIVED & plain.keys()})
        return from_plain(SessionReport, plain)
    except PlainError as error:
        raise ReportError(f"{name}: {error}; {_other_version(plain) or _RIGHT}") from None


def _other_version(plain: dict[str, Any]) -> str | None:
    version = plain.get("version")
    if not isinstance(version, str) or version == __version__:
        return None
    return f"it comes from pytest-gpumem {ascii(version[:40])[1:-1]}, this is {__version__}"


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
