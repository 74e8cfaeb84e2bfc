"""Peaks of steps that differ: a larger one that chance makes, and one that something new makes."""

from __future__ import annotations

import pytest

from pytest_gpumem.judging.gate.doubts import differ_by_chance


@pytest.mark.parametrize(
    ("higher", "lower", "by_chance"),
    [
        pytest.param([30], [10, 10, 10], False, id="the lower ones are alike"),
        pytest.param([25, 12, 14], [10, 20, 15], True, id="as far as they are apart"),
        pytest.param([33, 12, 14], [10, 20, 15], False, id="further than they are apart"),
        pytest.param([32, 12, 14], [10, 20, 15], True, id="just as far as they are apart"),
        pytest.param([23, 24, 25], [10, 20, 15], False, id="the lowest is above the highest"),
        pytest.param([22, 22, 25], [10, 20], True, id="the lowest is not, by what is allowed"),
        pytest.param([12, 23, 17], [10, 20, 15], False, id="each step needs what the same one needed"),
        pytest.param([22, 20, 25], [10, 20], True, id="it is a step that the others have not"),
        pytest.param([23, 20, 25], [10, 20], False, id="it is one that they have, too"),
        pytest.param([12, 23, 12], [10, 20, 15], True, id="one step needs less than the same one"),
        pytest.param([12, 23, 13], [10, 20, 15], False, id="one step needs less, by what is allowed"),
    ],
)
def test_whether_a_higher_peak_may_be_chance(higher, lower, by_chance):
    assert differ_by_chance(higher, lower, allowed=2) is by_chance
