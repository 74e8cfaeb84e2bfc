"""``@pytest.mark.gpumem(...)``: which arguments make which budget, and what is said of wrong ones."""

from __future__ import annotations

import inspect
import re

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from pytest_gpumem.base.errors import BudgetError
from pytest_gpumem.base.units import ThroughputLimit
from pytest_gpumem.judging.gate.baseline import Budget
from pytest_gpumem.plugin.config.marker import budget_from_arguments, budget_of_marks, check_of_a_call
from pytest_gpumem.plugin.config.marker_arguments import MARKER_HELP

unhurried = settings(deadline=None)


class Item:
    """As much of a test as its markers need, the closest marker first."""

    def __init__(self, *marks):
        self._marks = [mark.mark for mark in marks]

    def iter_markers(self, name):
        return (mark for mark in self._marks if mark.name == name)

    def iter_markers_with_node(self, name):
        nodes = [self, *(object() for _ in self._marks)]
        return ((node, mark) for node, mark in zip(nodes, self._marks, strict=False) if mark.name == name)


# Arguments


@pytest.mark.parametrize(
    ("arguments", "budget"),
    [
        ({}, Budget()),
        ({"max_gb": 6.5}, Budget({"peak_allocated": 6_500_000_000})),
        ({"max_memory": "6.5 GiB"}, Budget({"peak_allocated": 6_979_321_856})),
        ({"max_reserved": "8 GB"}, Budget({"peak_reserved": 8_000_000_000})),
        ({"max_retained": "1 MB"}, Budget({"retained": 1_000_000})),
        ({"max_retained": 0}, Budget({"retained": 0})),
        ({"max_imbalance": 1.2}, Budget({"imbalance": 1.2})),
        ({"tolerance": "2 %"}, Budget(tolerance=0.02)),
        ({"device": "cpu"}, Budget(device="cpu")),
    ],
)
def test_arguments_make_a_budget_in_bytes_and_ratios(arguments, budget):
    assert budget_from_arguments(arguments) == budget


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ({"max_gbs": 1}, "unknown argument 'max_gbs'; did you mean 'max_gb'?"),
        (
            {"zebra": 1},
            (
                "unknown argument 'zebra'; valid: max_gb, max_memory, max_reserved, max_retained, max_imbalance, "
                "tolerance, max_slowdown, min_throughput, device"
            ),
        ),
        ({"max_gb": -1}, "max_gb: -1 is negative; a number of GB is zero or more"),
        ({"max_memory": 6.5}, "max_memory: 6.5 is not a size; write it with its unit, like '6.5 GB'"),
        ({"max_memory": "6.5"}, "max_memory: '6.5' has no unit; write it like '6.5 GB' or '6.5 MiB'"),
        ({"max_imbalance": "1.2"}, "max_imbalance: '1.2' is not a ratio of 1 or more; write a number like 1.2"),
        ({"max_imbalance": 0.2}, "max_imbalance: 0.2 is not a ratio of 1 or more; write a number like 1.2"),
        ({"tolerance": 0.02}, "tolerance: 0.02 is not a percentage; write it like '2 %'"),
        ({"max_slowdown": 0.1}, "max_slowdown: 0.1 is not a percentage; write it like '10 %'"),
        ({"tolerance": "3"}, "tolerance: '3' is not a percentage; write it like '3 %'"),
        ({"tolerance": True}, "tolerance: True is not a percentage; write it like '2 %'"),
        ({"max_memory": 60_000_000}, "max_memory: 60000000 is not a size; write it with its unit, like '60.00 MB'"),
        (
            {"min_throughput": 1200},
            "min_throughput: 1200 is not a rate; write it like '1200 samples/s'",
        ),
        ({"device": 0}, "device: 0 is not the name of a device; write 'cuda' or 'cpu'"),
        ({"max_gb": 1, "max_memory": "1 GB"}, "max_gb and max_memory set the same limit; give only one of them"),
    ],
)
def test_a_wrong_argument_is_named_with_what_would_be_right(arguments, message):
    with pytest.raises(BudgetError, match=f"^{re.escape(message)}$"):
        budget_from_arguments(arguments)


LIMITS = [
    "max_gb",
    "max_memory",
    "max_reserved",
    "max_retained",
    "max_imbalance",
    "tolerance",
    "max_slowdown",
    "min_throughput",
]
NAMES = st.sampled_from([*LIMITS, "device"]) | st.text()
VALUES = (
    st.none()
    | st.booleans()
    | st.integers()
    | st.floats()
    | st.text()
    | st.sampled_from(["1 GB", "2 %", "cpu", "", "-1 GB", "3 steps/s", "0 steps/s"])
    | st.lists(st.integers(), max_size=2)
)


@unhurried
@given(st.dictionaries(NAMES, VALUES, max_size=4))
def test_any_arguments_make_a_budget_or_a_budget_error(arguments):
    try:
        budget = budget_from_arguments(arguments)
    except BudgetError as error:
        budget = None
        message = str(error)
    if budget is None:
        assert any(name in message or repr(name) in message for name in arguments)
    else:
        limits = [*budget.limits.values(), budget.tolerance, budget.max_slowdown]
        assert all(limit is None or limit >= 0 for limit in limits)
        assert budget.min_throughput is None or budget.min_throughput.amount > 0


def test_the_help_of_the_marker_names_every_argument():
    assert MARKER_HELP == (
        "gpumem(max_gb=..., max_memory=..., max_reserved=..., max_retained=..., max_imbalance=..., tolerance=..., "
        "max_slowdown=..., min_throughput=..., device=...): measure the GPU memory of the test, and the speed of its steps, and fail when it is "
        "over budget or regresses"
    )


def test_a_budget_takes_what_it_leaves_open_from_another():
    closer = Budget({"peak_allocated": 1, "retained": 0}, max_slowdown=0.3, device="cpu")
    farther = Budget(
        {"peak_allocated": 2, "peak_reserved": 3, "retained": 5},
        tolerance=0.1,
        max_slowdown=0.1,
        min_throughput=ThroughputLimit(8, "steps"),
        device="cuda",
    )
    assert closer.or_else(farther) == Budget(
        {"peak_allocated": 1, "peak_reserved": 3, "retained": 0},
        tolerance=0.1,
        max_slowdown=0.3,
        min_throughput=ThroughputLimit(8, "steps"),
        device="cpu",
    )


# Markers of a test


def test_a_test_without_the_marker_has_no_budget():
    assert budget_of_marks(Item(pytest.mark.filterwarnings("error"))) is None


def test_a_bare_marker_is_a_budget_without_limits():
    assert budget_of_marks(Item(pytest.mark.gpumem)) == Budget()


def test_the_closest_marker_wins_argument_by_argument():
    on_function = pytest.mark.gpumem(max_memory="1 GB")
    on_class = pytest.mark.gpumem(max_gb=2, max_retained="2 MB")
    on_module = pytest.mark.gpumem(max_retained="3 MB", device="cpu")
    budget = budget_of_marks(Item(on_function, on_class, on_module))
    assert budget == Budget({"peak_allocated": 1_000_000_000, "retained": 2_000_000}, device="cpu")


def test_a_positional_argument_is_refused_with_the_keyword_to_write():
    message = "@pytest.mark.gpumem takes keyword arguments only, got 6.5; write max_gb=6.5, say"
    with pytest.raises(BudgetError, match=f"^{re.escape(message)}$"):
        budget_of_marks(Item(pytest.mark.gpumem(6.5)))


def test_a_wrong_marker_far_away_is_not_passed_over():
    with pytest.raises(BudgetError, match="unknown argument 'max_bg'"):
        budget_of_marks(Item(pytest.mark.gpumem(max_gb=1), pytest.mark.gpumem(max_bg=2)))


def test_the_fields_of_a_budget_can_all_be_set_by_arguments():
    everything = budget_from_arguments(
        {"max_gb": 1, "max_reserved": "1 GB", "max_retained": "1 GB", "tolerance": "1 %", "device": "cpu"}
        | {"max_slowdown": "30 %", "min_throughput": "1_200 samples/s"}
    )
    assert (everything.max_slowdown, everything.min_throughput) == (0.3, ThroughputLimit(1200, "samples"))
    fields = inspect.signature(Budget).parameters
    assert [name for name in fields if getattr(everything, name) is None] == []


# Calls


@pytest.mark.parametrize("limit", [{"max_slowdown": "10 %"}, {"min_throughput": "8 steps/s"}])
def test_a_limit_of_speed_in_a_tests_own_marker_cannot_hold_its_call(limit):
    (name,) = limit
    with pytest.raises(BudgetError, match=f"^{name} limits the time of a step, and this test has no step: "):
        check_of_a_call(Item(pytest.mark.gpumem(max_gb=1, **limit)))


def test_a_limit_of_speed_of_a_class_or_module_is_for_the_other_tests_there():
    check_of_a_call(Item(pytest.mark.gpumem(max_gb=1), pytest.mark.gpumem(max_slowdown="10 %")))
