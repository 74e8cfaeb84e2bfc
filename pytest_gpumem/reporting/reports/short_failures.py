"""Short failures for tests whose causes another test has already explained in full. Pure.

For example, six tests fail because of ``blocks.*.attention``. The first failure has the full text, and the other five name the
first test's node id.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from pytest_gpumem.base.units import counted
from pytest_gpumem.facts.metrics import METRICS
from pytest_gpumem.facts.values.source_lines import file_and_line
from pytest_gpumem.judging.gate.growths import LEAST
from pytest_gpumem.judging.gate.verdict import FAILING
from pytest_gpumem.reporting.reports.causes import name_of
from pytest_gpumem.reporting.reports.values import difference
from pytest_gpumem.reporting.reports.view import headline

if TYPE_CHECKING:
    from collections.abc import Iterable, Sequence

    from pytest_gpumem.base.units import UnitSystem
    from pytest_gpumem.judging.gate.causes import Cause, Causes
    from pytest_gpumem.judging.gate.verdict import TestVerdict

MOST_NAMED = 2
"""A short failure names at most this many causes."""


def short_failure(test: TestVerdict, explained_causes: Sequence[tuple[Cause, str]], units: UnitSystem) -> str:
    """Return a failure text in at most six lines, for a test whose causes another failure text explains in full.

    Args:
        test: The failed test's verdict.
        explained_causes: The test's causes, each with the id of the test whose failure text explains it.
        units: The unit system for bytes.
    """
    accept = [f"  accept:   {test.accept}"] if test.accept else []
    causes = [f"  {line}" for line in cause_lines(test.nodeid, explained_causes, units)]
    return "\n".join([headline(test.failure or ""), *causes, *accept, "  -vv shows the full text"])


def cause_lines(test: str, explained_causes: Sequence[tuple[Cause, str]], units: UnitSystem) -> list[str]:
    """Return a line for each of a test's first causes, with the id of the test that explains the cause."""
    lines = []
    for cause, explained_in in explained_causes[:MOST_NAMED]:
        shares = (share for share in cause.shares if share.growth.test == test)
        largest = max(shares, key=lambda share: share.amount)
        grown = difference(largest.growth.metric, largest.amount, units)
        lines.append(f"cause:    {name_of(cause, units)}: {grown}, as in {explained_in}")
    more = len(explained_causes) - MOST_NAMED
    return [*lines, *([f"          and {counted(more, 'other')}"] if more > 0 else [])]


def explained_by_causes(causes: Causes, tests: Iterable[TestVerdict]) -> dict[str, list[Cause]]:
    """Return each test that fails only because of known causes, by node id, with these causes."""
    causes_by_test: dict[str, list[Cause]] = {}
    unexplained_tests = {share.growth.test for share in causes.unexplained}
    for cause in causes.causes:
        for test in cause.tests:
            causes_by_test.setdefault(test, []).append(cause)
    candidates = [test for test in tests if test.nodeid in causes_by_test]
    # If shards ran a test on several devices, the test has several verdicts. Each must have no other reason to fail.
    unexplained_tests |= {
        test.nodeid
        for test in candidates
        if test.missing or test.failed_by_itself or fails_for_more(test, causes_by_test[test.nodeid])
    }
    return {test.nodeid: causes_by_test[test.nodeid] for test in candidates if test.nodeid not in unexplained_tests}


def fails_for_more(test: TestVerdict, causes: Sequence[Cause]) -> bool:
    """Return whether a test also fails for reasons that ``causes`` do not explain.

    Examples are a slower step, a budget without a cause, or more operators at an unrelated line.
    """
    failing = {metric.metric for verdict in test.verdicts for metric in verdict.metrics if metric.outcome in FAILING}
    if any(METRICS[name].kind in ("time", "throughput") for name in failing):
        return True
    # A budget explains only its own metric. A line or a package may make other metrics grow as well.
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


def explained_before(session_causes: Causes, tests: Sequence[TestVerdict]) -> dict[str, list[tuple[Cause, str]]]:
    """Return the tests that need only a short failure, with each cause and the id of the test that explains the cause."""
    explained = explained_by_causes(session_causes, tests)
    explained_in: dict[Cause, str] = {}
    short_tests = {}
    for test in tests:
        causes = explained.get(test.nodeid, [])
        if causes and all(cause in explained_in for cause in causes):
            short_tests[test.nodeid] = [(cause, explained_in[cause]) for cause in causes]
            continue
        for cause in session_causes.of(test.nodeid):
            shares = [share for share in cause.shares if share.growth.test == test.nodeid]
            if any(share.amount >= LEAST * share.growth.amount for share in shares):
                explained_in.setdefault(cause, test.nodeid)
    return short_tests


def short_failures(causes: Causes, failed: Sequence[TestVerdict], units: UnitSystem) -> dict[str, str]:
    """Return, by node id, a short failure for each test whose causes an earlier test in ``failed`` explains."""
    explained_tests = explained_before(causes, failed)
    return {
        test.nodeid: short_failure(test, explained_tests[test.nodeid], units)
        for test in failed
        if test.nodeid in explained_tests
    }
