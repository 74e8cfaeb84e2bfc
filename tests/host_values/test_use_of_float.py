"""What a program makes of a float, told from the instruction that it is at."""

from __future__ import annotations

import math
import sys

import pytest
import torch

from pytest_gpumem.emulating.host_values.use_of_float import use_of_comparison, use_of_conversion


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


@pytest.mark.parametrize(
    ("compare", "use"),
    [
        (lambda: ONE < TWO, "branch"),
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


# tests/emulated/test_probes.py has more of these, in programs.


@pytest.mark.parametrize(
    ("convert", "use"),
    [
        (lambda: float(IT) > 0.1 and 1, "branch"),
        (lambda: float(IT), "branch"),  # a key to sort by, perhaps
        (lambda: [int(float(IT))], "integer"),
        (lambda: [math.ceil(float(IT) / 2)], "integer"),
        (lambda: [math.trunc(float(IT))], "integer"),
        (lambda: [torch.arange(float(IT) + 3)], "integer"),
        (lambda: [torch.nn.functional.interpolate(torch.ones(1, 1, 4), scale_factor=float(IT) + 2)], "integer"),
        (lambda: [range(round(float(IT) / 2))], "integer"),
        (lambda: [sorted([IT], key=float)], "order"),
        (lambda: [0.5 + float(IT)], "kept"),
        (lambda: [str(float(IT)), USES == IT], "kept"),
        (lambda: [math.sqrt(IT) > 1], "branch"),
        (lambda: [f"{float(IT):.2f}", 2 if IT is None else 3], "kept"),
        (lambda: [round(float(IT), 2), len([float(IT)]) > 3], "kept"),
        (lambda: ["%.3f of %d" % (float(IT), 3)], "kept"),  # noqa: UP031 -- programs do
        (lambda: [float("%.3f" % float(IT)) > 0.5], "branch"),  # noqa: UP031 -- likewise
        (lambda: [float(IT) if len(USES) < 5 else 0], "kept"),
        (lambda: [max(float(IT) if USES is not None else 0, 0.1)], "branch"),
        (lambda: [sum(float(one) for one in [IT]) > 1], "branch"),
        (lambda: [sorted([float(one) for one in [IT]])], "order"),
    ],
)
def test_a_conversion_is_kept_or_what_its_expression_makes_of_it(convert, use):
    USES.clear()
    convert()
    assert {use} == set(USES)


def stored_and_compared():
    number = other = float(IT)
    other += 1
    return [1] if other > 2 else [number]


def stored_and_replaced():
    number = float(IT)
    number = 1
    return [int(number)]


def listed_and_counted():
    numbers = [float(one) for one in (IT, IT)]
    if len(numbers) > 3 or not numbers:
        USES.clear()
    return [f"{numbers[0]:.2f}"]


def one_of_a_list_compared():
    numbers = [float(one) for one in (IT, IT)]
    return [1] if numbers[0] > 0.7 else [2]


def the_first_of_a_list_asked_whether_there_are_any():
    numbers = [float(one) for one in (IT, IT)]
    return [1] if numbers[:1] else [2]


def found_by_its_name():
    return [1] if {"loss": float(IT)}["loss"] else [2]


def each_compared():
    numbers = [float(one) for one in (IT, IT)]
    for number in numbers:
        if number > 0.7:
            return [number]
    return []


def appended_and_compared():
    numbers = []
    for _ in range(2):
        numbers.append(float(IT))
    return [min(numbers)]


class Holder:
    best = 1.0


def held_and_compared():
    holder = Holder()
    holder.best = float(IT)
    return [1] if holder.best > 0.7 else [2]


def asked_whether_finite():
    number = float(IT)
    return [1] if number != number or number == math.inf else [2]  # noqa: PLR0124 -- as programs do


def given_to_a_function():
    result = str.upper(f"{float(IT)}"), {"loss": float(IT)}
    return [len(result)] if result else []


def the_number():
    return float(IT)


def key(_):
    return float(IT)


def returned_twice_and_kept():
    def number():
        return 2 * the_number()

    return [number()]


def in_a_try():
    try:
        number = float(IT)
    except ValueError:
        number = 0.0
    with pytest.MonkeyPatch.context():
        return [round(number)]


@pytest.mark.parametrize(
    ("convert", "use"),
    [
        (stored_and_compared, "branch"),
        (stored_and_replaced, "kept"),
        (listed_and_counted, "kept"),
        (one_of_a_list_compared, "branch"),
        (the_first_of_a_list_asked_whether_there_are_any, "kept"),
        (found_by_its_name, "branch"),
        (each_compared, "branch"),
        (appended_and_compared, "branch"),
        (held_and_compared, "branch"),
        (asked_whether_finite, "kept"),
        (given_to_a_function, "kept"),
        (returned_twice_and_kept, "kept"),
        (lambda: [sorted([1, 2], key=key)], "order"),
        (in_a_try, "integer"),
    ],
)
def test_a_number_is_followed_through_variables_and_returns(convert, use):
    USES.clear()
    convert()
    assert {use} == set(USES)


def test_code_that_is_not_at_an_instruction_tells_nothing():
    assert use_of_comparison(None) == "branch"
    assert use_of_conversion(None) == "kept"
