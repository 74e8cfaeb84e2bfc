"""A step's bytes over time: what is left of them for a picture."""

from __future__ import annotations

import json
import pickle

from hypothesis import given, settings
from hypothesis import strategies as st

from pytest_gpumem.facts.values.plain import from_plain, to_plain
from pytest_gpumem.facts.values.timeline import OverTime, PhaseSpan

unhurried = settings(deadline=None)


@st.composite
def steps(draw) -> OverTime:
    parameters = draw(st.lists(st.integers(0, 9), min_size=1, max_size=80))
    activations = [draw(st.integers(0, 9)) for _ in parameters]
    total = [sum(pair) for pair in zip(parameters, activations, strict=True)]
    return OverTime(
        tuple(range(0, 10 * len(total), 10)),
        tuple(total),
        {"parameter": tuple(parameters), "activation": tuple(activations)},
        total.index(max(total)),
        (PhaseSpan("forward", 0, 5), PhaseSpan("backward", 5, 10 * len(total))),
    )


def moments(step: OverTime) -> list[tuple[int, ...]]:
    return list(zip(step.time_ns, step.total, *step.categories.values(), strict=True))


@unhurried
@given(steps(), st.integers(5, 60))
def test_a_thinned_step_has_some_of_the_moments_and_among_them_the_ends_and_the_peak(step, most):
    thin = step.thinned(most)
    assert len(thin.time_ns) <= most
    assert set(moments(thin)) <= set(moments(step))
    assert (moments(thin)[0], moments(thin)[-1]) == (moments(step)[0], moments(step)[-1])
    assert moments(thin)[thin.peak] == moments(step)[step.peak]
    assert thin.phases == step.phases


def test_a_spike_and_a_dip_of_one_moment_are_not_lost():
    total = [5] * 1000
    total[300], total[700] = 9, 1
    thin = OverTime(tuple(range(1000)), tuple(total), {}, 300).thinned(20)
    assert {9, 1} <= set(thin.total)


@unhurried
@given(steps())
def test_a_short_step_is_left_as_it_is_and_every_step_survives_json_and_pickle(step):
    assert step.thinned(80) is step
    assert from_plain(OverTime, json.loads(json.dumps(to_plain(step)))) == step
    assert pickle.loads(pickle.dumps(step)) == step
