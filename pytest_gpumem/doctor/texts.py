"""Findings as lines for people, and with all facts as JSON for programs. Pure."""

from __future__ import annotations

import json
from collections import Counter
from dataclasses import asdict
from typing import TYPE_CHECKING

from pytest_gpumem.doctor.findings import STATUSES, exit_status
from pytest_gpumem.reports.layout import Span
from pytest_gpumem.values.plain import to_plain

if TYPE_CHECKING:
    from collections.abc import Sequence

    from pytest_gpumem.doctor.facts import Facts
    from pytest_gpumem.doctor.findings import Finding, Status
    from pytest_gpumem.reports.layout import Line, Screen, Style

FORMAT = 1
"""The number of the JSON's format."""
_STYLES: dict[Status, Style] = {"ok": "good", "limited": "doubtful", "no": "bad"}


def lines(found: Sequence[Finding], screen: Screen) -> list[Line]:
    """Return a line for each finding: status, subject and fact, and below what mends it; then how many there are of each."""
    wide = max(map(len, STATUSES))
    widest = max(len(one.subject) for one in found)
    shown: list[Line] = []
    for one in found:
        rest = screen.legible(f"{'':{wide - len(one.status)}}  {one.subject:{widest}}  {one.fact}")
        shown.append((Span(one.status, _STYLES[one.status]), Span(rest)))
        if one.mend is not None:
            shown.append((Span(screen.legible(f"{'':{wide + 2}}fix: {one.mend}")),))
    counts = Counter(one.status for one in found)
    total = ", ".join(f"{counts[status]} {status}" for status in STATUSES if counts[status])
    return [*shown, (), (Span(screen.legible(f"gpumem: {total}; {found[-1].fact}")),)]


def to_json(facts: Facts, found: Sequence[Finding]) -> str:
    """Return the findings and the facts that they were made of."""
    report = {
        "format": FORMAT,
        "exit_status": exit_status(facts),
        "findings": [asdict(one) for one in found],
        "facts": to_plain(facts),
    }
    return json.dumps(report, indent=2) + "\n"
