"""Failures of tests whose causes another test tells in full. Pure."""

from __future__ import annotations

from typing import TYPE_CHECKING

from pytest_gpumem.gate.growths import LEAST
from pytest_gpumem.gate.verdict import FAILING
from pytest_gpumem.metrics import METRICS
from pytest_gpumem.reports.causes import name_of
from pytest_gpumem.reports.values import difference
from pytest_gpumem.reports.view import headline
from pytest_gpumem.units import counted
from pytest_gpumem.values.source_lines import file_and_line

if TYPE_CHECKING:
    from collections.abc import Iterable, Sequence

    from pytest_gpumem.gate.causes import Cause, Causes
    from pytest_gpumem.gate.verdict import TestVerdict
    from pytest_gpumem.units import UnitSystem

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
    """Return the causes of those tests that they explain and that have no other reason to fail, by test."""
    of_test: dict[str, list[Cause]] = {}
    others = {share.growth.test for share in found.unexplained}
    for cause in found.causes:
        for test in cause.tests:
            of_test.setdefault(test, []).append(cause)
    mine = [test for test in tests if test.nodeid in of_test]
    # A test has a verdict for each device that shards measured it on.
    others |= {
        test.nodeid
        for test in mine
        if test.missing or test.failed_by_itself or fails_for_more(test, of_test[test.nodeid])
    }
    return {test.nodeid: of_test[test.nodeid] for test in mine if test.nodeid not in others}


def fails_for_more(test: TestVerdict, causes: Sequence[Cause]) -> bool:
    """Return whether a test fails also by time, by what no budget among its causes is of, or does more work elsewhere."""
    failing = {one.metric for verdict in test.verdicts for one in verdict.metrics if one.outcome in FAILING}
    if any(METRICS[name].kind in ("time", "throughput") for name in failing):
        return True
    # A budget explains its own metric; by what lines or packages take, other metrics grow, too.
    by_causes = {share.growth.metric for cause in causes for share in cause.shares if share.growth.test == test.nodeid}
    if any(cause.kind == "budget" for cause in causes) and not failing <= by_causes:
        return True
    files = {file_and_line(line)[0] for cause in causes for line in cause.lines}
    modules = {module for cause in causes for module in cause.modules}
    grown = (
        tally.place
        for verdict in test.verdicts
        for name, tallies in verdict.count_changes.items()
        for tally in tallies
        if name in failing and tally.amount > 0
    )
    lines = ((place.named or place.library or place.site, place.module) for place in grown)
    return any(line and file_and_line(line)[0] not in files and module not in modules for line, module in lines)


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
