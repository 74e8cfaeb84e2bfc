"""The schema of JSON reports, made from the classes of their values."""

from __future__ import annotations

import json
from typing import TYPE_CHECKING

from pytest_gpumem.facts.values.plain import json_schema
from pytest_gpumem.reporting.reports.derived_keys import FORMAT, DerivedKeys
from pytest_gpumem.reporting.reports.session_report import SessionReport
from reference.markdown import attribute_docstrings, flat

if TYPE_CHECKING:
    from pytest_gpumem.facts.values.plain import Schema

FILE = "pytest_gpumem/reporting/reports/report.schema.json"
_WIDTH = 120


def report_schema() -> Schema:
    """Return the schema. It describes each key by the docstring of the class's field."""
    derived, report = (json_schema(kind, _description) for kind in (DerivedKeys, SessionReport))
    return {
        "$schema": "https://json-schema.org/draft/2020-12/schema",
        "$id": f"urn:pytest-gpumem:report:{FORMAT}",
        "title": "A session's report of pytest-gpumem",
        "description": "The report of --gpumem-report=FILE.json, which gpumem merge reads.",
        **report,
        "required": [*derived["required"], *report["required"]],
        "properties": derived["properties"] | report["properties"],
        "$defs": derived["$defs"] | report["$defs"],
    }


def schema_text() -> str:
    """Return the schema as JSON, with a line for each short value."""
    return _text(report_schema()) + "\n"


def _description(owner: type, field: str) -> str:
    return flat(attribute_docstrings(owner)[field])


def _text(node: object, indent: str = "") -> str:
    line = json.dumps(node)
    if not isinstance(node, dict) or len(indent) + len(line) <= _WIDTH:
        return line
    inner = f"{indent}  "
    parts = (f"{inner}{json.dumps(key)}: {_text(value, inner)}" for key, value in node.items())
    return "{\n" + ",\n".join(parts) + f"\n{indent}}}"
