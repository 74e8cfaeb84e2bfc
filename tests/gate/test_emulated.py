"""What emulated figures can be held to."""

from __future__ import annotations

from pytest_gpumem.facts.metrics import Tolerance
from pytest_gpumem.judging.gate.judge import emulated_tolerances
from pytest_gpumem.plugin.config.settings import DEFAULT_TOLERANCES


def test_default_tolerances_are_as_wide_as_the_benchmark_asks_for_but_for_launches():
    assert emulated_tolerances(DEFAULT_TOLERANCES) == {
        name: tolerance for name, tolerance in DEFAULT_TOLERANCES.items() if name != "launches"
    }


def test_a_closer_tolerance_is_widened_and_a_wider_one_stays():
    given = {"peak_allocated": Tolerance(0.0, 512), "peak_reserved": Tolerance(0.5), "retained": Tolerance(0.0)}
    assert emulated_tolerances(given) == {
        "peak_allocated": Tolerance(0.005, 512),
        "peak_reserved": Tolerance(0.5),
        "retained": Tolerance(0.0),
    }
