"""Record a test's verdict in its report, and keep the failure that the verdict raised."""

from __future__ import annotations

import json
from typing import TYPE_CHECKING, NoReturn

import pytest

from pytest_gpumem.base.errors import MeasuringError
from pytest_gpumem.facts.values.plain import to_plain
from pytest_gpumem.judging.gate.verdict import SKIPPED, WHY_FAILED
from pytest_gpumem.reporting.reports.escaping import visible
from pytest_gpumem.reporting.reports.results import PROPERTY

if TYPE_CHECKING:
    from pytest_gpumem.judging.gate.verdict import FailedIn, TestVerdict
    from pytest_gpumem.plugin.config.selection import MeasuredTest

_FAILURE = pytest.StashKey[BaseException]()
"""The key for the exception with which the gate failed a test."""


def _shorten_summary(item: pytest.Item, call: pytest.CallInfo[None], report: pytest.TestReport) -> None:
    """If the gate failed the test, shorten the message for pytest's summary and for JUnit to the failure's first line.

    In CI, pytest's summary shows messages in full, so the whole failure would be printed twice.
    """
    if call.excinfo is None or call.excinfo.value is not item.stash.get(_FAILURE, None):
        return
    crash = getattr(report.longrepr, "reprcrash", None)
    if crash is not None:
        crash.message = str(call.excinfo.value).partition("\n")[0]


def complete_report(
    item: pytest.Item, measured: MeasuredTest, call: pytest.CallInfo[None], report: pytest.TestReport
) -> None:
    """Shorten the gate's failure in a test's report. If the test ended before the gate judged it, record a verdict.

    This can happen if another plugin's hook ends the test before this plugin's hooks run.
    """
    _shorten_summary(item, call, report)
    if call.excinfo is not None and not _has_verdict(item):
        record_verdict(item, verdict_after(measured, call.excinfo.value, "setup" if call.when == "setup" else "call"))
        report.user_properties = list(item.user_properties)


def verdict_after(measured: MeasuredTest, error: BaseException, when: FailedIn) -> TestVerdict:
    """Return the verdict on a test after it ended with ``error`` in the phase ``when``."""
    if isinstance(error, pytest.skip.Exception):
        return measured.not_measured(SKIPPED)
    why = str(error) if isinstance(error, MeasuringError) else WHY_FAILED[when]
    return measured.not_measured(why, failed_by_itself=True)


def unittest_errors(item: pytest.Item) -> list[BaseException]:
    """Return the errors and skips in a ``unittest.TestCase`` test. unittest does not raise them, but stores them in the
    item.

    pytest puts the first error into the call's report, and the next error into the teardown's report.
    """
    return [excinfo.value for excinfo in getattr(item, "_excinfo", None) or ()]


def failure_of(item: pytest.Item) -> BaseException | None:
    """Return the exception with which the gate failed the test; ``None`` if the gate did not fail it."""
    return item.stash.get(_FAILURE, None)


def fail(item: pytest.Item, text: str) -> NoReturn:
    """Fail a test by the gate. The exception is the same as from `pytest.fail`, so pytest treats it like any other failure."""
    item.stash[_FAILURE] = failure = pytest.fail.Exception(text, pytrace=False)
    raise failure from None


def raise_failure_again(item: pytest.Item) -> None:
    """Raise the gate's failure again, because the test's code may have caught it."""
    failure = failure_of(item)
    if failure is not None:
        raise failure


def forget_verdict(item: pytest.Item) -> None:
    """Remove the gate's failure and the verdict from an earlier run of the same test."""
    if _FAILURE in item.stash:
        del item.stash[_FAILURE]
    _forget_properties(item)


def _forget_properties(item: pytest.Item) -> None:
    item.user_properties[:] = [
        (name, value)
        for name, value in item.user_properties
        if name != PROPERTY and not name.startswith(f"{PROPERTY}.")
    ]


def record_verdict(item: pytest.Item, verdict: TestVerdict) -> None:
    """Store a verdict in the test's ``user_properties``.

    - ``gpumem``: the verdict on the test as JSON, with the same keys as ``verdict`` in the JSON report. Only the largest
      rows of explanations are included.
    - ``gpumem.<measurement>.<metric>``: a number, in bytes, calls, seconds or items/s, or a ratio. For example,
      ``gpumem.train_step.peak_allocated`` is 303410. Invisible characters in the measurement's name are written as in Python.

    If the verdict fails the test, ``xfail``, ``--last-failed``, ``--maxfail`` and reruns treat this failure like an error
    in the test. If a plugin reruns a test, the last run counts. If a test runs several times for another reason
    (``--keep-duplicates``, ``--dist each``), its worst result counts. If a test's own code fails, the report section
    ``gpumem`` shows the measurements before the error. After an out-of-memory error, the section ``gpumem out of memory``
    shows what was allocated.
    """
    _forget_properties(item)
    item.user_properties.append((PROPERTY, json.dumps(to_plain(verdict), sort_keys=True)))
    for measurement_verdict in verdict.verdicts:
        # Escape the name, because pytest escapes only values for XML.
        name = visible(measurement_verdict.measurement.name)
        for metric in measurement_verdict.metrics:
            item.user_properties.append((f"{PROPERTY}.{name}.{metric.metric}", metric.value))


def _has_verdict(item: pytest.Item) -> bool:
    return any(name == PROPERTY for name, _ in item.user_properties)
