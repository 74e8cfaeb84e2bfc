"""Select tests from a report, and find the reasons why a test is not accepted. Pure."""

from __future__ import annotations

import re
from typing import TYPE_CHECKING, NamedTuple

from pytest_gpumem.base.command_name import command_name
from pytest_gpumem.base.errors import UnfitReport, UnknownTest
from pytest_gpumem.facts.metrics import METRICS
from pytest_gpumem.judging.baselines.selecting import nearest_tests, selected_keys
from pytest_gpumem.judging.baselines.update import ACCEPTS
from pytest_gpumem.judging.gate.baseline import Key
from pytest_gpumem.judging.gate.failing import failing_outcomes
from pytest_gpumem.judging.gate.verdict import WHY_FAILED, Outcome
from pytest_gpumem.reporting.reports.values import on_device, shown
from pytest_gpumem.reporting.reports.view import headline

if TYPE_CHECKING:
    from collections.abc import Iterable, Sequence

    from pytest_gpumem.base.units import UnitSystem
    from pytest_gpumem.judging.gate.verdict import TestVerdict
    from pytest_gpumem.reporting.reports.results import TestResult
    from pytest_gpumem.reporting.reports.session_report import SessionReport, Terms

_DATE = re.compile(r"\d{4}-\d{2}-\d{2}", re.ASCII)
_HASH = re.compile(r"[0-9a-f]{4,64}", re.ASCII)


class Refusal(NamedTuple):
    """The reason why a test is not accepted: its ``kind`` in two or three words, and ``why`` as a clause with figures."""

    kind: str
    why: str


def check_report(report: SessionReport, name: str) -> None:
    """Raise an error unless the report's session compared its tests with baselines for the session's own device.

    Args:
        report: The report.
        name: The report's file, for the message.

    Raises:
        UnfitReport: The session did not compare with baselines, or the report is not valid.
    """
    terms = report.terms
    if not (terms.baseline or terms.update):
        raise UnfitReport(
            f"{name}: its session did not compare with baselines; write the report with `pytest --gpumem-baseline`"
        )
    if terms.against is not None:
        raise UnfitReport(
            f"{name}: its figures come from an emulated GPU and were compared with the baselines of {terms.against} "
            "(--gpumem-against), which cannot be replaced by emulated figures; accept a report from a run without this option"
        )
    if _DATE.fullmatch(report.ended[:10]) is None:
        raise UnfitReport(f"{name}: ended is {report.ended[:40]!r}, expected a time like 2026-11-21T16:20:05Z")
    if report.commit is not None and _HASH.fullmatch(report.commit) is None:
        raise UnfitReport(f"{name}: commit is {report.commit[:80]!r}, expected an abbreviated hash like 1f2e3d4c5")


def selected_results(report: SessionReport, tests: Sequence[str]) -> list[TestResult]:
    """Return the named tests' results in the report's order, or all results if no test is named.

    Args:
        report: The report.
        tests: Test ids, parts of test ids, or patterns for test ids.

    Raises:
        UnknownTest: The report does not have a named test.
    """
    if not tests:
        return list(report.results)
    keys = {_key(result.verdict.file, result.verdict.test) for result in report.results}
    unfinished = {_key(*test) for test in report.not_run}
    named: set[Key] = set()
    for test in tests:
        matching = selected_keys(keys, test)
        if not matching:
            raise UnknownTest(_unknown(test, keys, unfinished))
        named.update(matching)
    return [result for result in report.results if _key(result.verdict.file, result.verdict.test) in named]


def _key(file: str, test: str) -> Key:
    return Key(file, test, "")


def _unknown(test: str, keys: Iterable[Key], unfinished: Iterable[Key]) -> str:
    if selected_keys(unfinished, test):
        return f"{test} did not finish, so the report does not contain its figures"
    near = nearest_tests(keys, test)
    return f"the report has no result for {test}" + (f"; there is {' and '.join(near)}" if near else "")


def refusal(result: TestResult, terms: Terms) -> Refusal | None:
    """Return the reason why ``--gpumem-update=all`` would not write a test's baselines; ``None`` if it would."""
    verdict = result.verdict
    if verdict.unmeasured or not verdict.verdicts:
        return _nothing_measured(result)
    # Check the budget first, because a baseline cannot raise the budget.
    failing = failing_outcomes(verdict, strict=terms.strict, compares=terms.baseline, accepts=ACCEPTS["all"])
    if Outcome.OVER_BUDGET in failing:
        return Refusal("over budget", _over_budget(verdict, terms.units))
    if result.failed and not result.failed_by_gate:
        return Refusal("failed by itself", _why_failed(result))
    if not result.failed and not result.passed:
        return Refusal("did not pass", "the test was skipped, or failed as expected (xfail)")
    if failing or (result.failed and verdict.accept is None):
        # The last line of the failure text names limits that had no effect.
        *_, last = (verdict.failure or "").strip().split("\n")
        why = headline(verdict.failure or "") if failing else last
        return Refusal("not by baselines", f"a new baseline would not fix it: {why}")
    return None


def _nothing_measured(result: TestResult) -> Refusal:
    verdict = result.verdict
    if verdict.missing_text is not None:
        return Refusal("not measured", f"{verdict.missing_text}; `{command_name()} prune` removes unused baselines")
    if verdict.unmeasured and not verdict.failed_by_itself:
        return Refusal("not measured", f"the test was not measured: {verdict.unmeasured}")
    if result.failed:
        return Refusal("failed by itself", _why_failed(result))
    return Refusal("not measured", "the test measured nothing")


def _why_failed(result: TestResult) -> str:
    if result.failed_in == "call" and result.verdict.failure is not None:
        return "the gate failed the test, and the tear-down also failed or did not end"
    return WHY_FAILED[result.failed_in or ("call" if result.verdict.failed_by_itself else None)]


def _over_budget(verdict: TestVerdict, units: UnitSystem) -> str:
    """Return a clause with each figure that exceeds its budget."""
    over = [
        f"{METRICS[metric.metric].title}{on_device(metric)} {shown(metric.metric, metric.value, units, metric.of)}, "
        f"budget {shown(metric.metric, metric.budget, units, metric.of)}"
        for measured in verdict.verdicts
        for metric in measured.metrics
        if metric.outcome is Outcome.OVER_BUDGET
    ]
    return f"the test is over its budget, which a baseline does not change ({'; '.join(over)})"
