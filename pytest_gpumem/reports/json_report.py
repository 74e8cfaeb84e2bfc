"""A session's report as JSON, and back. Pure; every mistake in a text names what would be right."""

from __future__ import annotations

import json
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from pytest_gpumem.session_report import SessionReport

FORMAT = 1
"""The number of the JSON's format."""


def to_json(report: SessionReport) -> str:
    """The whole report; ``accounting``, ``passed`` and ``problems`` follow from the rest, for those who only read."""
    plain = {
        "format": FORMAT,
        "accounting": report.accounting,
        "passed": report.passed,
        "problems": list(report.problems),
        **report.to_plain(),
    }
    return json.dumps(plain, indent=1, sort_keys=True, allow_nan=False) + "\n"
