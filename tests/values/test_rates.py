"""What one step saves against another and what that costs: the rates, and what a failed assertion prints of them."""

from __future__ import annotations

import math
import pickle
import re
from dataclasses import replace

import pytest
from hypothesis import given
from hypothesis import strategies as st

from pytest_gpumem.base.errors import MissingMetric
from pytest_gpumem.facts.measurement import Environment, Measurement, Workload
from pytest_gpumem.facts.values.rates import Rate, return_on

saves, costs, roi = Measurement.saves, Measurement.costs, Measurement.roi

HERE = Environment("cpu-x86_64", "CPU (x86_64)")
THERE = Environment("cuda-a100", "NVIDIA A100")


def measured(peak=1000, time=None, recomputed=None, environment=HERE, name="train_step") -> Measurement:
    metrics: dict[str, float] = {"peak_allocated": peak}
    if time is not None:
        metrics["step_time"] = time
    return Measurement(name, Workload("train_step"), environment, metrics, recomputed=recomputed)


PLAIN = measured(1_000_000_000, 2.0, recomputed=0)


# Rates


def test_what_is_saved_is_the_part_of_the_others_peak():
    assert saves(measured(700_000_000), PLAIN) == pytest.approx(0.3)
    assert saves(PLAIN, PLAIN) == 0
    assert saves(measured(1_500_000_000), PLAIN) == -0.5


def test_workspaces_are_in_neither_peak():
    mine, other = (replace(measured(peak), workspaces=100) for peak in (600, 1100))
    assert saves(mine, other) == 0.5


def test_what_it_costs_is_the_part_of_the_others_time():
    assert costs(measured(1, 2.5), PLAIN) == pytest.approx(0.25)
    assert costs(measured(1, 1.0), PLAIN) == -0.5


@pytest.mark.parametrize(
    ("peak", "time", "rate"),
    [
        (700_000_000, 2.4, 1.5),
        (500_000_000, 2.0, math.inf),
        (500_000_000, 1.0, math.inf),
        (1_000_000_000, 1.0, 0.0),
        (1_200_000_000, 2.4, 0.0),
    ],
)
def test_the_return_is_the_saving_over_the_cost(peak, time, rate):
    assert roi(measured(peak, time), PLAIN) == pytest.approx(rate)


@given(st.floats(-2, 1), st.floats(-2, 2))
def test_a_return_is_never_negative_and_higher_for_more_saved(saving, cost):
    assert return_on(saving, cost) >= 0
    assert return_on(min(saving + 0.1, 1.0), cost) >= return_on(saving, cost)


def test_a_rate_can_be_calculated_with_and_travels_between_processes():
    rate = saves(measured(700_000_000), PLAIN)
    assert rate + 0.7 == pytest.approx(1.0)
    assert 0.29 < rate <= 0.31
    again = pickle.loads(pickle.dumps(rate))
    assert (again, again.figures) == (rate, rate.figures)


# What a failed assertion prints


def test_a_rate_says_which_figures_it_was_made_of():
    mine = measured(700_000_000, 2.4)
    assert repr(saves(mine, PLAIN)) == "0.300 (peak 700.00 MB against 1.00 GB)"
    assert repr(costs(mine, PLAIN)) == "0.200 (step time 2.40 s against 2.00 s)"
    assert repr(roi(mine, PLAIN)) == "1.500 (saves +30.0 %, costs +20.0 %)"
    assert repr(Rate(math.inf, "free")) == "inf (free)"


@pytest.mark.parametrize(
    ("peak", "mine", "other", "said"),
    [
        (1_000_000_000, 0, 0, "; nothing was computed again in backward"),
        (700_000_000, 12, 0, "; 12 module calls were computed again in backward, against 0 in the other step"),
        (700_000_000, 12, 12, ""),
        (700_000_000, None, 0, ""),
    ],
)
def test_a_saving_says_whether_anything_was_recomputed(peak, mine, other, said):
    rate = saves(measured(peak, recomputed=mine), measured(1_000_000_000, recomputed=other))
    assert rate.figures.endswith(f"against 1.00 GB{said}")


def test_a_failed_assertion_prints_the_figures(project):
    project.write(
        """
def test_saves(gpumem):
    plain = gpumem.measure(lambda: torch.empty(1_000_000), name="plain")
    other = gpumem.measure(lambda: torch.empty(750_000), name="other")
    assert other.saves(plain) > 0.3
"""
    )
    result = project.run("--no-gpumem-time")
    result.assert_outcomes(failed=1)
    result.stdout.fnmatch_lines(["E * assert 0.250 (peak 3.00 MB against 4.00 MB) > 0.3*"])


# What has no rate


@pytest.mark.parametrize("rate", [saves, costs, roi])
def test_figures_of_different_devices_have_no_rate(rate):
    message = (
        "'mine' was measured on NVIDIA A100, 'train_step' on CPU (x86_64): "
        "figures from different devices cannot be compared"
    )
    with pytest.raises(ValueError, match=f"^{re.escape(message)}$"):
        rate(measured(1, 1.0, environment=THERE, name="mine"), PLAIN)


@pytest.mark.parametrize("rate", [costs, roi])
def test_without_a_time_there_is_no_cost(rate):
    with pytest.raises(MissingMetric, match="has no step_time"):
        rate(measured(1), PLAIN)
