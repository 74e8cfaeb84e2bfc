"""Short failures for tests whose causes another test has already explained in full. Pure.

For example, six tests fail because of ``blocks.*.attention``. The first failure has the full text, and the other five name the
first test's node id.
"""

from __future__ import annotations

from dataclasses import replace
from typing import TYPE_CHECKING

from pytest_gpumem.base.units import counted
from pytest_gpumem.facts.metrics import METRICS
from pytest_gpumem.judging.gate.growths import LEAST
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
        # A peak may have the tensors of many steps, and another metric those of a step. So the line names the metric.
        in_test = replace(cause, shares=tuple(share for share in cause.shares if share.growth.test == test))
        grown = f"{difference(in_test.metric, in_test.largest.amount, units)} {METRICS[in_test.metric].title}"
        lines.append(f"cause:    {name_of(cause, units)}: {grown}, as in {explained_in}")
    more = len(explained_causes) - MOST_NAMED
    return [*lines, *([f"          and {counted(more, 'other')}"] if more > 0 else [])]


def explained_before(causes: Causes, tests: Iterable[TestVerdict]) -> dict[str, list[tuple[Cause, str]]]:
    """Return the tests that need only a short failure, with each cause and the id of the test that explains the cause.

    Args:
        causes: The session's causes.
        tests: The failed tests, in the order in which their failures are shown.
    """
    explained_in: dict[Cause, str] = {}
    short_tests = {}
    for test in dict.fromkeys(verdict.nodeid for verdict in tests):
        if test in causes.explained and all(cause in explained_in for cause in causes.of(test)):
            short_tests[test] = [(cause, explained_in[cause]) for cause in causes.of(test)]
            continue
        for cause in causes.of(test):
            shares = [share for share in cause.shares if share.growth.test == test]
            if any(share.amount >= LEAST * share.growth.amount for share in shares):
                explained_in.setdefault(cause, test)
    return short_tests


def short_failures(causes: Causes, failed: Sequence[TestVerdict], units: UnitSystem) -> dict[str, str]:
    """Return, by node id, a short failure for each test whose causes an earlier test in ``failed`` explains."""
    explained_tests = explained_before(causes, failed)
    return {
        test.nodeid: short_failure(test, explained_tests[test.nodeid], units)
        for test in failed
        if test.nodeid in explained_tests
    }
