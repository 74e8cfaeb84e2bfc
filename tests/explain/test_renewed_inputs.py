"""Inputs that a step frees and makes anew: which line makes them, as far as that is no guess."""

from __future__ import annotations

from dataclasses import replace

import pytest

from pytest_gpumem.facts.values.composition import Composition, Holder, Row
from pytest_gpumem.measuring.explain.blocks import Lifetime, Timeline
from pytest_gpumem.measuring.explain.compose import composition_of_peak, holders_of_inputs_in
from pytest_gpumem.measuring.explain.renewed_inputs import renewals, with_makers_of_inputs
from pytest_gpumem.measuring.explain.trace import Label, Mark

FLIP = Mark("call", "Flip", site="flip.py:5")
OTHER = Mark("call", "Flip", site="flip.py:9")


def old(address: int, nbytes: int = 8, freed: int | None = 3) -> Lifetime:
    """An input from before the step."""
    return Lifetime(address, nbytes, -1, freed, label=Label(address, "input", tensor="float32[2]"))


def new(address: int, nbytes: int = 8, mark: Mark = FLIP, freed: int | None = None) -> Lifetime:
    """A block that the step makes."""
    return Lifetime(address, nbytes, 1, freed, mark=mark, operator="aten::flip")


def timeline(*blocks: Lifetime) -> Timeline:
    return Timeline((0, 8, 8, 0), 1, 8, blocks, {})


def test_an_input_that_is_made_anew_has_the_line_that_makes_it_and_the_holder():
    step = with_makers_of_inputs(timeline(old(1), new(2)))
    row = Row("input", 8, "Flip", "flip.py:5", operator="flip", tensor="float32[2]")
    assert row in composition_of_peak(step, 8).rows
    assert holders_of_inputs_in(step, {2: "Flip.last"}) == (Holder("Flip.last", Composition(8, (row,))),)


@pytest.mark.parametrize(
    "blocks",
    [
        pytest.param((old(1, freed=None), new(2)), id="it stays"),
        pytest.param((old(1), new(2, nbytes=16)), id="another size is left"),
        pytest.param((old(1), new(2, freed=2)), id="nothing is left"),
        pytest.param((old(1), new(2), new(3)), id="more are left"),
        pytest.param((old(1), old(2), new(3), new(4, mark=OTHER)), id="two lines make them"),
    ],
)
def test_the_line_of_an_input_is_not_guessed(blocks):
    assert renewals(timeline(*blocks)) == []
    assert with_makers_of_inputs(timeline(*blocks)) == timeline(*blocks)


def followed(*blocks: Lifetime, last: tuple[Lifetime, ...]) -> Timeline:
    """The timeline of a step that one more step follows."""
    return replace(timeline(*blocks), following=(timeline(*last),))


@pytest.mark.parametrize(
    ("last", "holders"),
    [
        pytest.param((new(4),), ("Flip.last",), id="the next step makes it anew, too"),
        pytest.param((new(4), new(5)), (), id="the next step makes two"),
        pytest.param((new(4, mark=OTHER),), (), id="another line makes it"),
    ],
)
def test_the_holder_is_that_of_the_tensor_from_the_last_step(last, holders):
    """The tensor that the recorded step makes is freed by the next one, and its address may be another tensor's."""
    step = followed(old(1), replace(new(2), is_kept=False), last=last)
    paths = {2: "another", 4: "Flip.last", 5: "Flip.list[...]"}
    assert tuple(holder.path for holder in holders_of_inputs_in(with_makers_of_inputs(step), paths)) == holders


def test_a_tensor_that_the_next_steps_keep_is_no_input_made_anew():
    step = followed(old(1), replace(new(2), is_kept=False), replace(new(3, mark=OTHER), is_kept=True), last=(new(4),))
    assert [(one.freed.address, one.created.address) for one in renewals(step)] == [(1, 2)]
