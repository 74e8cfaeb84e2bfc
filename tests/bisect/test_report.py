"""What a bisection says of its result, where it is not the plain case."""

from __future__ import annotations

from dataclasses import replace

import pytest

from pytest_gpumem.judging.gate.baseline import Key
from pytest_gpumem.judging.gate.verdict import Outcome
from pytest_gpumem.plugin.config.settings import Settings
from pytest_gpumem.reporting.reports.comparison import ComparedChange, ComparedRow, ComparisonReport
from pytest_gpumem.tools.ab.variants import Variant
from pytest_gpumem.tools.bisect.candidates import Candidate
from pytest_gpumem.tools.bisect.driver import SearchResult
from pytest_gpumem.tools.bisect.report import culprit, notes, result

GOOD, BAD = Candidate(Variant(), "1f2e3d4"), Candidate(Variant(), "5a6b7c8", "merges a branch")
BETWEEN = Candidate(Variant(), "9d8e7f6")


def compared(then: float, now: float) -> ComparisonReport:
    change = ComparedChange("peak_allocated", then, now, Outcome.REGRESSED)
    return ComparisonReport(
        "a", "b", (ComparedRow(Key("test_it.py", "test_a", "call"), "toy", "test_it.py::test_a", (change,)),)
    )


FOUND = SearchResult("peak_allocated", GOOD, BAD, (), compared(10e6, 12e6), compared(10e6, 12e6), (), Settings())


def test_the_change_is_named_with_what_it_added():
    assert result(FOUND) == (
        "5a6b7c8 merges a branch did it: peak allocated 10.00 MB to 12.00 MB (+20.0 %), after 1f2e3d4"
    )
    assert notes(FOUND) == []


def test_a_merge_comes_with_the_arguments_that_look_into_it():
    merge = replace(FOUND, bad=replace(BAD, parents=2))
    assert notes(merge) == [
        "5a6b7c8 is a merge; to search its branch: --all --good 5a6b7c8^ --bad 5a6b7c8",
    ]
    assert notes(replace(merge, skipped=(BETWEEN,))) == [], "it is not known to be the merge"


def test_a_merge_that_mended_it_is_looked_into_the_other_way_round():
    mended = replace(
        FOUND,
        good=replace(GOOD, parents=2, backwards=True),
        bad=replace(BAD, backwards=True),
        step=compared(10e6, 12e6),
    )
    assert result(mended).startswith("1f2e3d4 fixed it: peak allocated 12.00 MB to 10.00 MB (-16.7 %), after 5a6b7c8")
    assert notes(mended) == ["1f2e3d4 is a merge; to search its branch: --all --good 1f2e3d4 --bad 1f2e3d4^"]


@pytest.mark.parametrize(("part", "told"), [(0.5e6, True), (1.0e6, False), (2.0e6, False)])
def test_a_change_that_is_less_than_half_of_it_says_how_to_find_the_rest(part, told):
    some = replace(FOUND, step=compared(10e6, 10e6 + part))
    expected = ["this is +500.00 kB of +2.00 MB; to find the rest, continue with --good 5a6b7c8"] if told else []
    assert notes(some) == expected


def test_those_that_could_not_be_judged_are_named_with_it():
    assert culprit(replace(FOUND, skipped=(BETWEEN,))) == "one of 9d8e7f6, 5a6b7c8"
    assert result(replace(FOUND, skipped=(BETWEEN,))).endswith("; the candidates between could not be judged")
