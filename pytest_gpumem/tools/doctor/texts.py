"""Write findings as lines of text, or as JSON together with all facts. All functions are pure."""

from __future__ import annotations

import json
from collections import Counter
from dataclasses import asdict
from typing import TYPE_CHECKING

from pytest_gpumem.facts.values.plain import to_plain
from pytest_gpumem.reporting.reports.layout import Span
from pytest_gpumem.tools.doctor.findings import STATUSES, exit_status

if TYPE_CHECKING:
    from collections.abc import Sequence

    from pytest_gpumem.reporting.reports.layout import Line, Screen, Style
    from pytest_gpumem.tools.doctor.facts import Facts
    from pytest_gpumem.tools.doctor.findings import Finding, Status

FORMAT = 1
"""The version of the JSON format, which is the value of the key ``format``."""
_STYLES: dict[Status, Style] = {"ok": "good", "limited": "doubtful", "no": "bad"}


def lines(findings: Sequence[Finding], screen: Screen) -> list[Line]:
    """Return the output of ``gpumem doctor``.

    For each finding there is a line with its status, subject and fact, and a line below with the fix. The last line counts the
    findings by status.

    Example:
        ``limited  torch    torch 2.13.0+cpu without CUDA: no GPU can be measured, real or emulated``
    """
    status_width = max(map(len, STATUSES))
    subject_width = max(len(finding.subject) for finding in findings)
    shown: list[Line] = []
    for finding in findings:
        rest = screen.legible(
            f"{'':{status_width - len(finding.status)}}  {finding.subject:{subject_width}}  {finding.fact}"
        )
        shown.append((Span(finding.status, _STYLES[finding.status]), Span(rest)))
        if finding.mend is not None:
            shown.append((Span(screen.legible(f"{'':{status_width + 2}}fix: {finding.mend}")),))
    counts = Counter(finding.status for finding in findings)
    total = ", ".join(f"{counts[status]} {status}" for status in STATUSES if counts[status])
    return [*shown, (), (Span(screen.legible(f"gpumem: {total}; {findings[-1].fact}")),)]


def to_json(facts: Facts, findings: Sequence[Finding]) -> str:
    """Return the findings and all facts as a JSON object."""
    report = {
        "format": FORMAT,
        "exit_status": exit_status(facts),
        "findings": [asdict(finding) for finding in findings],
        "facts": to_plain(facts),
    }
    return json.dumps(report, indent=2) + "\n"
