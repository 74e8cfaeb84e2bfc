"""The search for the largest size that fits."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from pytest_gpumem.tools.advise.largest import MOST, Largest, SizeTrial, largest_of, next_size

LIMIT = 10_000


def searched(peak_of, start, unit=1, limit=LIMIT, refused=MOST + 1):
    """All trials of a search over steps that take ``peak_of(size)`` bytes; sizes from ``refused`` on cannot be run."""
    trials = []
    while (size := next_size(trials, limit, start, unit)) is not None:
        assert size % unit == 0
        assert size not in {one.size for one in trials}
        if size >= refused:
            trials.append(SizeTrial(size, False, why_not=f"it has {refused - 1} positions"))
        else:
            trials.append(SizeTrial(size, peak_of(size) <= limit, peak_of(size)))
        assert len(trials) < 100
    return trials


@pytest.mark.parametrize("start", [1, 8, 40, 1000])
def test_a_line_is_met_at_once_from_either_side(start):
    trials = searched(lambda size: 2_000 + 97 * size, start)
    assert largest_of(trials) == Largest(82, 2_000 + 97 * 82)
    assert {82, 83} <= {one.size for one in trials}
    assert len(trials) <= 6


@given(
    base=st.integers(0, 12_000),
    slope=st.integers(0, 400),
    bend=st.integers(1, 300),
    block=st.sampled_from([1, 64, 2048]),
    start=st.integers(1, 500),
    unit=st.sampled_from([1, 2, 8]),
)
def test_what_is_found_fits_and_the_next_one_does_not(base, slope, bend, block, start, unit):
    def peak_of(size):
        # A second line from a size on, in whole blocks, as an allocator takes them.
        return -(-(base + slope * size + max(0, size - bend) ** 2 // 7) // block) * block

    found = largest_of(searched(peak_of, start, unit))
    assert found.size % unit == 0
    assert found.size == 0 or peak_of(found.size) <= LIMIT
    assert peak_of(found.size + unit) > LIMIT or found.size + unit > MOST


def test_the_length_that_a_model_has_ends_it_and_is_told():
    trials = searched(lambda size: 100 + size // 10, 100, refused=513)
    assert largest_of(trials) == Largest(512, 151, "it has 512 positions")


def test_nothing_that_fits_is_a_size_of_none():
    assert largest_of(searched(lambda size: LIMIT + size, 16)) == Largest(0)


def test_one_that_was_broken_off_says_so():
    trials = [SizeTrial(8, True, 500), SizeTrial(64, False, 20_000)]
    assert largest_of(trials, finished=False) == Largest(8, 500, is_known=False)


def test_what_takes_the_same_at_any_size_ends_at_the_largest_number():
    assert largest_of(searched(lambda _: 5, 1)).size == MOST
