"""Causes of what grew in a session, as every format shows them, and the short text of a test whose causes were told. Pure."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from pytest_gpumem.gate.causes import LEAST, Causes, causes_of
from pytest_gpumem.metrics import METRICS
from pytest_gpumem.reports import escaping
from pytest_gpumem.reports.layout import Column, Span, Table, without_empty
from pytest_gpumem.reports.values import difference, shown
from pytest_gpumem.reports.view import headline
from pytest_gpumem.units import counted

if TYPE_CHECKING:
    from collections.abc import Iterable, Sequence

    from pytest_gpumem.gate.causes import Cause
    from pytest_gpumem.gate.verdict import TestVerdict
    from pytest_gpumem.reports.session_report import SessionReport
    from pytest_gpumem.units import UnitSystem

MOST_CAUSES = 10
"""Causes that are shown unless all are asked for."""
HEADER = ("cause", "tests", "in all", "most", "module", "operator", "tensors", "first test")


@dataclass(frozen=True, slots=True)
class CausesOf:
    """The causes of what grew in some tests, of so many that were measured."""

    causes: Causes
    measured: int

    @property
    def tell(self) -> bool:
        """True if there are several tests to tell of: a single one says itself what grew."""
        found = self.causes
        shares = (*(share for cause in found.causes for share in cause.shares), *found.unexplained)
        return bool(found.causes) and len({share.growth.test for share in shares}) > 1


def causes_in(report: SessionReport) -> CausesOf:
    """Return the causes of a session, but of what became the baseline."""
    grown = [one.verdict for one in report.results if not one.is_accepted_by(report.terms.update)]
    return CausesOf(
        causes_of(one for one in grown if not one.unmeasured), _measured(one.verdict for one in report.results)
    )


def _measured(tests: Iterable[TestVerdict]) -> int:
    return sum(bool(test.verdicts) and not test.unmeasured for test in tests)


def name_of(cause: Cause, units: UnitSystem) -> str:
    """Return what a cause is, in a few words: its line, or else its module, the packages that differ, or the budget."""
    if cause.kind == "packages":
        return "; ".join(cause.packages)
    if cause.kind == "budget":
        metric, _, limit = cause.what.partition(" ")
        return f"budget of {METRICS[metric].title}: {shown(metric, float(limit), units)}"
    return cause.lines[0] if cause.lines else cause.module


def cause_cells(found: CausesOf, units: UnitSystem, most: int | None = MOST_CAUSES) -> list[tuple[str, ...]]:
    """Return a row of texts for each cause, under `HEADER`."""
    return [
        (
            name_of(cause, units),
            f"{len(cause.tests)} of {found.measured}",
            difference(cause.metric, cause.total, units),
            difference(cause.metric, cause.largest.amount, units),
            cause.module if cause.lines else "",
            cause.operator,
            cause.what if cause.kind == "line" else "",
            cause.tests[0],
        )
        for cause in found.causes.causes[:most]
    ]


def cause_notes(found: CausesOf, units: UnitSystem, most: int | None = MOST_CAUSES) -> list[str]:
    """Return a line for what else is known of a cause, of those that are not shown, and of what is not explained."""
    lines = []
    causes = found.causes.causes
    for cause in causes[:most]:
        more = [
            *([f"also {', '.join(cause.lines[1:])}"] if len(cause.lines) > 1 else []),
            *([cause.reason] if cause.reason else []),
            *(f"kept in: {holder}" for holder in cause.holders),
            *([f"packages: {', '.join(cause.packages)}"] if cause.packages and cause.kind == "line" else []),
        ]
        lines += [f"{name_of(cause, units)}: {'; '.join(more)}"] if more else []
    if most is not None and len(causes) > most:
        lines.append(f"... and {counted(len(causes) - most, 'other cause')} (-v shows all)")
    left = found.causes.unexplained
    if left:
        tests = sorted({share.growth.test for share in left})
        others = f" and {counted(len(tests) - 1, 'other')}" if len(tests) > 1 else ""
        lines.append(f"not explained: {_sums(left, units)} in {counted(len(tests), 'test')}: {tests[0]}{others}")
    return lines


def _sums(shares: Sequence[Any], units: UnitSystem) -> str:
    metrics = dict.fromkeys(share.growth.metric for share in shares)
    return ", ".join(
        f"{METRICS[name].title} {difference(name, sum(one.amount for one in shares if one.growth.metric == name), units)}"
        for name in sorted(metrics, key=lambda name: METRICS[name].precedence)
    )


def cause_table(found: CausesOf, units: UnitSystem, most: int | None = MOST_CAUSES) -> Table:
    """Return the causes for a terminal, of which a narrow one leaves out columns from the right."""
    columns = (
        Column(HEADER[0], left=True, least=24),
        Column(HEADER[1]),
        Column(HEADER[2]),
        Column(HEADER[3], weight=3),
        Column(HEADER[4], left=True, weight=4),
        Column(HEADER[5], left=True, weight=2),
        Column(HEADER[6], left=True, weight=0),
        Column(HEADER[7], left=True, weight=1),
    )
    rows = cause_cells(found, units, most)
    return Table(columns, tuple(tuple(map(Span, row)) for row in rows)).without_empty(range(4))


def causes_in_markdown(found: CausesOf, units: UnitSystem) -> str:
    """Return the causes as a table in GitHub's Markdown, and what else is known of them as a list."""
    rows = [
        [
            escaping.code_in_table(cells[0]),
            *map(escaping.plain, cells[1:4]),
            *(escaping.code_in_table(cell) if cell else "" for cell in cells[4:]),
        ]
        for cells in cause_cells(found, units)
    ]
    header, rows = without_empty(HEADER, rows, range(4))
    notes = [f"- {escaping.plain(note)}" for note in cause_notes(found, units)]
    text = escaping.table(list(header), rows, (0, *range(4, len(header))))
    return "\n".join([text, "", *notes]) if notes else text


MOST_NAMED = 2
"""Causes that the short text of a test names."""


def short_failure(test: TestVerdict, told_at: Sequence[tuple[Cause, str]], units: UnitSystem) -> str:
    """Return the text of a test whose causes were told in full before, in at most six lines.

    Args:
        test: The verdict that failed it.
        told_at: Its causes, each with the id of the test whose text has told it.
        units: How bytes are shown.
    """
    accept = [f"  accept:   {test.accept}"] if test.accept else []
    causes = [f"  {line}" for line in cause_lines(test.nodeid, told_at, units)]
    return "\n".join([headline(test.failure or ""), *causes, *accept, "  -vv shows all of it"])


def cause_lines(test: str, told_at: Sequence[tuple[Cause, str]], units: UnitSystem) -> list[str]:
    """Return a line for each of the first causes of a test, with the id of the test that tells it in full."""
    lines = []
    for cause, where in told_at[:MOST_NAMED]:
        share = max((one for one in cause.shares if one.growth.test == test), key=lambda one: one.amount)
        grown = difference(share.growth.metric, share.amount, units)
        lines.append(f"cause:    {name_of(cause, units)}: {grown}, as in {where}")
    more = len(told_at) - MOST_NAMED
    return [*lines, *([f"          and {counted(more, 'other')}"] if more > 0 else [])]


def explained_by_causes(found: Causes, tests: Iterable[TestVerdict]) -> dict[str, list[Cause]]:
    """Return the causes of those tests that lines of code explain and that have no other reason to fail, by test."""
    of_test: dict[str, list[Cause]] = {}
    unexplained = {share.growth.test for share in found.unexplained}
    for cause in found.causes:
        if cause.kind != "line":
            unexplained.update(cause.tests)
        for test in cause.tests:
            of_test.setdefault(test, []).append(cause)
    return {
        test.nodeid: of_test[test.nodeid]
        for test in tests
        if test.nodeid in of_test.keys() - unexplained and not test.missing and not test.failed_by_itself
    }


def told_before(found: Causes, tests: Sequence[TestVerdict]) -> dict[str, list[tuple[Cause, str]]]:
    """Return the tests that need not be told in full, since earlier ones tell their causes, each with the id of that test."""
    explained = explained_by_causes(found, tests)
    told: dict[Cause, str] = {}
    short = {}
    for test in tests:
        causes = explained.get(test.nodeid, [])
        if causes and all(cause in told for cause in causes):
            short[test.nodeid] = [(cause, told[cause]) for cause in causes]
            continue
        for cause in found.of(test.nodeid):
            mine = [one for one in cause.shares if one.growth.test == test.nodeid]
            if any(one.amount >= LEAST * one.growth.amount for one in mine):
                told.setdefault(cause, test.nodeid)
    return short


def short_failures(found: Causes, failed: Sequence[TestVerdict], units: UnitSystem) -> dict[str, str]:
    """Return the short texts of those tests whose causes an earlier one of ``failed`` tells in full, by test."""
    before = told_before(found, failed)
    return {test.nodeid: short_failure(test, before[test.nodeid], units) for test in failed if test.nodeid in before}


def plain_causes(found: CausesOf) -> dict[str, Any]:
    """Return the causes for JSON: amounts are in the metric's unit, bytes or counts."""

    def shares(some: Iterable[Any]) -> list[dict[str, Any]]:
        return [
            {"test": one.growth.test, "name": one.growth.name, "metric": one.growth.metric, "amount": one.amount}
            for one in some
        ]

    return {
        "causes": [
            {
                "kind": cause.kind,
                "lines": list(cause.lines),
                "module": cause.module,
                "operator": cause.operator,
                "tensors": cause.what,
                "reason": cause.reason,
                "kept_in": list(cause.holders),
                "packages": list(cause.packages),
                "metric": cause.metric,
                "total": cause.total,
                "largest": cause.largest.amount,
                "tests": list(cause.tests),
                "shares": shares(cause.shares),
            }
            for cause in found.causes.causes
        ],
        "not_explained": shares(found.causes.not_explained),
    }
