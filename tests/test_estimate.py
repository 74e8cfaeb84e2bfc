"""Theory beside practice: the table of what a step holds, and what is pointed out in it."""

from __future__ import annotations

import pytest

from pytest_gpumem.facts.measurement import Environment, Measurement, Workload
from pytest_gpumem.plugin.relations.estimate import Estimate, findings_of
from pytest_gpumem.plugin.relations.state import Share, StateBytes

KB = 1000


def state_with(**more) -> StateBytes:
    """A step whose state is as the formulas say, but for what is given."""
    values = {
        "parameters": Share(100 * KB, 100 * KB),
        "gradients": Share(100 * KB, 100 * KB),
        "optimizer_state": Share(200 * KB, 200 * KB),
        "master_weights": Share(0, 0),
        "buffers": 0,
        "batch": 5 * KB,
        "other": 0,
        "activations": 50 * KB,
        "peak": 400 * KB,
    }
    return StateBytes(**(values | more))


def estimate_of(state: StateBytes) -> Estimate:
    workload = Workload("train_step", "amp-bf16,checkpoint=blocks")
    measurement = Measurement("train_step", workload, Environment("cpu", "CPU"), {"peak_allocated": state.peak})
    return Estimate(measurement, state, findings_of(state))


# Findings


def test_a_step_that_is_as_the_formulas_say_has_no_finding():
    assert findings_of(state_with()) == ()


@pytest.mark.parametrize(
    ("share", "found"),
    [
        (Share(100 * KB, 102 * KB), ()),
        (Share(100 * KB, 98 * KB), ()),
        (Share(100 * KB, 103 * KB), ("gradients: 103.00 kB held, 100.00 kB by formula (+3.0 %)",)),
        (Share(100 * KB, 90 * KB), ("gradients: 90.00 kB held, 100.00 kB by formula (-10.0 %)",)),
        (Share(0, 1), ("gradients: 1 B held, 0 B by formula",)),
        (Share(None, 100 * KB), ()),
    ],
)
def test_what_is_more_than_2_percent_off_is_pointed_out(share, found):
    assert findings_of(state_with(gradients=share)) == found


@pytest.mark.parametrize(
    ("measured", "said"),
    [
        (415 * KB, " (+107.5 %): two copies of the optimizer state are alive"),
        (600 * KB, " (+200.0 %): three copies of the optimizer state are alive"),
        (300 * KB, " (+50.0 %)"),
        (450 * KB, " (+125.0 %)"),
    ],
)
def test_whole_copies_are_called_copies(measured, said):
    (finding,) = findings_of(state_with(optimizer_state=Share(200 * KB, measured)))
    assert finding.endswith(f"held, 200.00 kB by formula{said}")


@pytest.mark.parametrize(
    ("other", "copies"),
    [
        (5 * KB, ""),
        (200 * KB, ": two copies of the optimizer state are alive"),
        (100 * KB, ": two copies of the parameters are alive"),
    ],
)
def test_what_is_held_by_nobody_known_is_pointed_out(other, copies):
    whose = "at rest belong to neither the model, the optimizer nor the batch"
    assert findings_of(state_with(other=other)) == (f"{other // KB}.00 kB {whose}{copies}",)


def test_a_little_that_nobody_known_holds_is_passed_over():
    assert findings_of(state_with(other=4 * KB)) == ()


def test_a_copy_of_a_state_without_a_formula_is_known_by_its_size():
    (finding,) = findings_of(state_with(optimizer_state=Share(None, 200 * KB), other=200 * KB))
    assert finding.endswith(": two copies of the optimizer state are alive")


# The table


def test_the_table_has_a_row_a_kind_and_ends_with_the_findings():
    state = state_with(gradients=Share(100 * KB, 150 * KB), optimizer_state=Share(None, 20 * KB), other=70 * KB)
    assert estimate_of(state).table() == [
        "amp-bf16,checkpoint=blocks     formula   measured      off",
        "parameters                   100.00 kB  100.00 kB   +0.0 %",
        "gradients                    100.00 kB  150.00 kB  +50.0 %",
        "optimizer state             no formula   20.00 kB",
        "master weights                     0 B        0 B",
        "batch                                     5.00 kB",
        "other at rest                            70.00 kB",
        "activations in forward                   50.00 kB",
        "peak                                    400.00 kB",
        "gradients: 150.00 kB held, 100.00 kB by formula (+50.0 %)",
        "70.00 kB at rest belong to neither the model, the optimizer nor the batch",
    ]


def test_printing_an_estimate_prints_its_table():
    estimate = estimate_of(state_with(buffers=3 * KB))
    assert str(estimate) == "\n".join(estimate.table())
    assert any(line.split() == ["buffers", "3.00", "kB"] for line in estimate.table())


def test_the_table_can_be_in_binary_units():
    assert any("97.66 KiB" in line for line in estimate_of(state_with()).table("iec"))


def test_the_kinds_are_attributes_by_formula_where_there_is_one():
    estimate = estimate_of(state_with(gradients=Share(100, 150), optimizer_state=Share(None, 20), activations=7))
    assert (estimate.parameters, estimate.gradients, estimate.optimizer_state) == (100 * KB, 100, 20)
    assert (estimate.master_weights, estimate.activations) == (0, 7)


# With the fixture

MODEL = """
class Model(torch.nn.Linear):
    def __init__(self):
        super().__init__(64, 64)

    def forward(self, x):
        return super().forward(x).sum()


def batch():
    return torch.ones(8, 64)


"""


def test_an_estimate_is_recorded_as_a_measurement_and_has_no_finding(project):
    project.write(
        MODEL
        + """
def test_it(gpumem):
    estimate = gpumem.estimate(Model, batch, "fp32,optimizer=adam", name="memory")
    assert (estimate.parameters, estimate.gradients, estimate.findings) == (16640, 16640, ())
    assert estimate.optimizer_state == 2 * 16640 + 8
    assert estimate.measurement.peak_allocated == estimate.state.peak
"""
    )
    result = project.run("--no-gpumem-time")
    result.assert_outcomes(passed=1)
    result.stdout.no_fnmatch_line("note:*")


def test_two_optimizers_are_pointed_out_at_the_end_of_the_run(project):
    project.write(
        MODEL
        + """
def twice(parameters):
    first, second = torch.optim.AdamW(parameters), torch.optim.AdamW(parameters)
    first.register_step_post_hook(lambda *_: second.step())
    return first


def test_it(gpumem):
    gpumem.estimate(Model, batch, optimizer=twice)
"""
    )
    result = project.run("--no-gpumem-time", "-rA", "-v")
    result.assert_outcomes(passed=1)
    result.stdout.fnmatch_lines(["note: *test_it: *two copies of the optimizer state are alive"])
