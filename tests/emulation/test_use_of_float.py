"""What a program makes of a float, told from the instruction that it is at."""

from __future__ import annotations

import math
import sys

import pytest

from pytest_gpumem.emulation.use_of_float import use_of_comparison, use_of_conversion


class Compared(float):
    """A float that tells what it is compared for."""

    def __lt__(self, other):
        USES.append(use_of_comparison(sys._getframe(1)))
        return float(self) < float(other)

    def __gt__(self, other):
        USES.append(use_of_comparison(sys._getframe(1)))
        return float(self) > float(other)


class Converted:
    """What tells what becomes of the float that it is converted to."""

    def __float__(self):
        USES.append(use_of_conversion(sys._getframe(1)))
        return 0.5


USES = []
ONE, TWO = Compared(1), Compared(2)
IT = Converted()
# Python 3.10 keeps no positions of expressions.
needs_positions = pytest.mark.skipif(sys.version_info < (3, 11), reason="code has no positions")


@pytest.mark.parametrize(
    ("compare", "use"),
    [
        (lambda: ONE < TWO, "branch"),
        (lambda: 1 if ONE > TWO else 2, "branch"),
        (lambda: min(ONE, TWO), "branch"),
        (lambda: sorted([ONE, TWO]), "order"),
        (lambda: sorted([1, 2], key=lambda at: {1: ONE, 2: TWO}[at]), "order"),
        (lambda: [[ONE, TWO].sort()], "order"),
        pytest.param(lambda: max([1, 2], key=lambda at: {1: ONE, 2: TWO}[at]), "order", id="the place of the largest"),
        pytest.param(lambda: max(sum([1, 2]), ONE), "branch", id="beside another call"),
    ],
)
def test_a_comparison_is_a_branch_or_an_order(compare, use):
    USES.clear()
    compare()
    assert set(USES) == {use}


@needs_positions
@pytest.mark.parametrize(
    ("convert", "use"),
    [
        (lambda: float(IT) > 0.1 and 1, "branch"),
        (lambda: abs(float(IT)) > 0.1 and 1, "branch"),
        (lambda: [1 if float(IT) else 2], "branch"),
        (lambda: [1 if not float(IT) else 2], "branch"),
        (lambda: [max(0.1, float(IT))], "branch"),
        (lambda: float(IT), "branch"),  # a key to sort by, perhaps
        (lambda: [int(float(IT))], "integer"),
        (lambda: [round(100 * float(IT))], "integer"),
        (lambda: [math.floor(IT)], "integer"),
        (lambda: [math.ceil(float(IT) / 2)], "integer"),
        (lambda: [sorted([IT], key=float)], "order"),
        (lambda: [0.5 + float(IT)], "kept"),
        (lambda: [str(float(IT)), USES == IT], "kept"),
        (lambda: [math.sqrt(IT)], "kept"),
        (lambda: [1 if math.isnan(float(IT)) else 2], "kept"),
        (lambda: [f"{float(IT):.2f}", 2 if IT is None else 3], "kept"),
    ],
)
def test_a_conversion_is_kept_or_what_its_expression_makes_of_it(convert, use):
    USES.clear()
    convert()
    assert [use] == USES


def test_code_that_is_not_at_an_instruction_tells_nothing():
    assert use_of_comparison(None) == "branch"
    assert use_of_conversion(None) == "kept"
