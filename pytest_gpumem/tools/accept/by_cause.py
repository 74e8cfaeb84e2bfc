"""Select tests in a report by the causes of their growth. Pure.

A new baseline contains all of a test's growth, so the user must accept all causes of this growth. Example: a test grew because
of cause 1 and cause 2. ``--cause 1`` refuses the test, and ``--cause 1 --cause 2`` accepts the test.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from pytest_gpumem.base.errors import UnknownCause
from pytest_gpumem.base.units import counted
from pytest_gpumem.reporting.reports.causes import name_of
from pytest_gpumem.tools.accept.selection import Refusal

if TYPE_CHECKING:
    from collections.abc import Sequence

    from pytest_gpumem.base.units import UnitSystem
    from pytest_gpumem.judging.gate.causes import Cause, Causes
    from pytest_gpumem.reporting.reports.results import TestResult


def numbered_causes(causes: Causes, numbers: Sequence[int], units: UnitSystem) -> list[Cause]:
    """Return the causes with these numbers.

    Args:
        causes: All causes in the report.
        numbers: The causes' numbers in the report, which begin with 1.
        units: The unit system for bytes in the message.

    Raises:
        UnknownCause: The report has no cause with one of the numbers.
    """
    for number in numbers:
        if not 1 <= number <= len(causes.causes):
            existing = "; ".join(
                f"{index} is {name_of(cause, units)}, in {counted(len(cause.tests), 'test')}"
                for index, cause in enumerate(causes.causes, start=1)
            )
            raise UnknownCause(f"the report has no cause {number}: {existing or 'no test grew'}")
    return [causes.causes[number - 1] for number in numbers]


def with_causes(
    causes: Causes, results: Sequence[TestResult], accepted: Sequence[Cause], units: UnitSystem
) -> list[tuple[TestResult, Refusal | None]]:
    """Return the tests with growth from an accepted cause, each with the reason if it is refused.

    Args:
        causes: All causes in the report.
        results: The tests in the report.
        accepted: The accepted causes.
        units: The unit system for bytes in the messages.

    Returns:
        Each test with the reason for refusing it, or with ``None`` if the accepted causes explain all of its growth.
    """
    numbers = {cause: number for number, cause in enumerate(causes.causes, start=1)}
    tests: list[tuple[TestResult, Refusal | None]] = []
    for result in results:
        test = result.verdict.nodeid
        test_causes = causes.of(test)
        if not any(cause in accepted for cause in test_causes):
            continue
        other_causes = [cause for cause in test_causes if cause not in accepted]
        reason = None
        if other_causes:
            words = ", ".join(f"cause {numbers[cause]} ({name_of(cause, units)})" for cause in other_causes)
            reason = Refusal("other causes", f"the test also grew because of {words}")
        elif test in causes.partly_explained:
            reason = Refusal(
                "other causes", "the causes do not explain all of the test's growth; name the test to accept it"
            )
        tests.append((result, reason))
    return tests
