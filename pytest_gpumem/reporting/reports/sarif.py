"""A session as SARIF 2.1.0, for code scanning: a result for each failing or uncertain test, at the line that grew."""

from __future__ import annotations

import json
import re
from typing import TYPE_CHECKING, Any
from urllib.parse import quote

from pytest_gpumem.judging.gate.verdict import Outcome
from pytest_gpumem.reporting.reports.escaping import visible
from pytest_gpumem.reporting.reports.places import grown_lines
from pytest_gpumem.reporting.reports.view import rows_of

if TYPE_CHECKING:
    from collections.abc import Iterable

    from pytest_gpumem.reporting.reports.session_report import SessionReport
    from pytest_gpumem.reporting.reports.view import ReportRow

SCHEMA = "https://docs.oasis-open.org/sarif/sarif/v2.1.0/errata01/os/schemas/sarif-schema-2.1.0.json"
MOST_RELATED = 20
"""A result has at most this many related lines, because code scanning lists them one below the other."""
ROOT = "%SRCROOT%"
"""The root directory, to which all paths are relative. ``checkout_path`` of GitHub's upload action says where this is."""
_ACTIVE = re.compile(r"[\\\[\]]")
"""The characters that make a link in a message, ``[text](target)`` (section 3.11.6 of the SARIF standard)."""


def sarif(report: SessionReport) -> str:
    """Return [SARIF 2.1.0](https://docs.oasis-open.org/sarif/sarif/v2.1.0/sarif-v2.1.0.html) for code scanning.

    Each test that failed (level ``error``) or is ``uncertain`` (``warning``) has a result with the text of the failure.

    - ``locations``: the project's line with the largest growth in bytes. If no bytes grew, the first line with more operators.
      If no operators were added either, the line of the test.
    - ``relatedLocations``: up to 20 other lines that grew, and the test.
    - ``ruleId``: the verdict, such as ``gpumem/regressed`` or ``gpumem/over-budget``.
    - ``partialFingerprints``: the test and its verdict, so a result stays the same alert if lines move.
    - ``toolExecutionNotifications``: other reasons for a red session.

    Paths are relative to pytest's root directory (``%SRCROOT%``). Lines in libraries are omitted, because libraries are
    not in the repository.
    """
    rows = [row for row in rows_of(report) if row.status.fails or row.status.words == Outcome.UNCERTAIN.words]
    problems = [{"level": "error", "message": _message(visible(problem))} for problem in report.problems]
    run = {
        "tool": {
            "driver": {
                "name": "pytest-gpumem",
                "semanticVersion": visible(report.version),
                "rules": [_rule(words) for words in sorted({row.status.words for row in rows})],
            }
        },
        "columnKind": "unicodeCodePoints",
        "invocations": [
            {"executionSuccessful": report.passed, "endTimeUtc": visible(report.ended)}
            | ({"toolExecutionNotifications": problems} if problems else {})
        ],
        "results": [_result(row) for row in rows],
    }
    return json.dumps({"$schema": SCHEMA, "version": "2.1.0", "runs": [run]}, indent=1, ensure_ascii=True) + "\n"


def _rule(words: str) -> dict[str, Any]:
    return {
        "id": _rule_id(words),
        "name": "".join(word.capitalize() for word in words.split()),
        "shortDescription": {"text": f"GPU memory and throughput: {words}"},
    }


def _message(text: str) -> dict[str, str]:
    r"""Return a message in which links and placeholders are escaped: ``test_a[0](x)`` becomes ``test_a\[0\](x)``."""
    # Section 3.11.5 of the SARIF standard escapes braces by doubling them.
    return {"text": _ACTIVE.sub(r"\\\g<0>", text).replace("{", "{{").replace("}", "}}")}


def _rule_id(words: str) -> str:
    return f"gpumem/{words.replace(' ', '-')}"


def _result(row: ReportRow) -> dict[str, Any]:
    lines = _with_line_of_test(row, dict.fromkeys(grown_lines(row)))
    first, *related = lines
    text = row.why or "; ".join(row.notes) or row.status.words
    result: dict[str, Any] = {
        "ruleId": _rule_id(row.status.words),
        "level": "error" if row.status.fails else "warning",
        "message": _message(f"{visible(row.title)}: {visible(text, keep=chr(10))}"),
        "locations": [_location(*first)],
        # The same test and outcome stay a single alert, even if lines move.
        "partialFingerprints": {"gpumemTest/v1": f"{visible(row.title)} {row.status.slug}"},
    }
    if related:
        result["relatedLocations"] = [
            {"id": number, **_location(*place)} for number, place in enumerate(related[:MOST_RELATED])
        ]
    return result


def _with_line_of_test(row: ReportRow, grown: Iterable[tuple[str, int]]) -> list[tuple[str, int]]:
    """Return the lines that grew, the most bytes first, followed by the test's own line."""
    place = row.result.verdict.location if row.result is not None else None
    return [*grown, (place.file, place.line) if place is not None else (row.file, 1)]


def _location(file: str, line: int) -> dict[str, Any]:
    artifact = {"uri": quote(visible(file.replace("\\", "/"))), "uriBaseId": ROOT}
    return {"physicalLocation": {"artifactLocation": artifact, "region": {"startLine": line}}}
