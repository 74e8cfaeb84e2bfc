"""Tests of a report by the causes of their growth: a baseline is accepted whole, and so with all causes of its test. Pure."""

from __future__ import annotations

from typing import TYPE_CHECKING

from pytest_gpumem.accept.selection import Refusal
from pytest_gpumem.reports.causes import name_of
from pytest_gpumem.reports.told_causes import fails_for_more
from pytest_gpumem.units import counted

if TYPE_CHECKING:
    from collections.abc import Sequence

    from pytest_gpumem.gate.causes import Cause, Causes
    from pytest_gpumem.reports.results import TestResult
    from pytest_gpumem.units import UnitSystem


class UnknownCause(Exception):
    """A report has no cause of that number; the message lists those that there are."""


def numbered_causes(found: Causes, numbers: Sequence[int], units: UnitSystem) -> list[Cause]:
    """Return the causes of these numbers, the first being 1. Raises `UnknownCause` for a number that there is not."""
    for number in numbers:
        if not 1 <= number <= len(found.causes):
            known = "; ".join(
                f"{at} is {name_of(one, units)}, in {counted(len(one.tests), 'test')}"
                for at, one in enumerate(found.causes, start=1)
            )
            raise UnknownCause(f"the report has no cause {number}: {known or 'nothing in it grew'}")
    return [found.causes[number - 1] for number in numbers]


def with_causes(
    found: Causes, results: Sequence[TestResult], accepted: Sequence[Cause], units: UnitSystem
) -> list[tuple[TestResult, Refusal | None]]:
    """Return the tests that some causes explain, each with why accepting these is not enough for it; ``None`` where it is.

    Args:
        found: All causes of the report.
        results: Its tests.
        accepted: The causes that are accepted.
        units: How bytes are shown.
    """
    numbers = {cause: number for number, cause in enumerate(found.causes, start=1)}
    of_test: dict[str, list[Cause]] = {}
    for cause in found.causes:
        for test in cause.tests:
            of_test.setdefault(test, []).append(cause)
    unexplained = {share.growth.test for share in found.unexplained}
    tests: list[tuple[TestResult, Refusal | None]] = []
    for result in results:
        test = result.verdict.nodeid
        mine = of_test.get(test, [])
        if not any(cause in accepted for cause in mine):
            continue
        others = [cause for cause in mine if cause not in accepted]
        why = None
        if others:
            words = ", ".join(f"cause {numbers[cause]} ({name_of(cause, units)})" for cause in others)
            why = Refusal("other causes", f"it also grew by {words}")
        elif test in unexplained or fails_for_more(result.verdict, mine):
            why = Refusal("other causes", "its causes do not explain all of it; name the test to accept it")
        tests.append((result, why))
    return tests
