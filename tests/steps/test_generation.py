"""A step that generates: a call of the model's own ``generate``, and what is none."""

from __future__ import annotations

import pytest
import torch

from pytest_gpumem.base.errors import ConfigError, NotAStep
from pytest_gpumem.facts.measurement import Workload
from pytest_gpumem.measuring.step_config.config import StepConfig
from pytest_gpumem.measuring.steps.generation import (
    generation_phases,
    generation_work,
    number_of_tokens,
    with_new_tokens,
)

CPU = torch.device("cpu")


class Generating(torch.nn.Linear):
    calls: list[dict[str, object]]

    def generate(self, tokens, **more):
        self.calls = [{**more, "tokens": tokens, "inference": torch.is_inference_mode_enabled()}]


def phases_of(model, new_tokens, config="plain"):
    return generation_phases(model, torch.ones(2, 3), new_tokens, StepConfig.parse(config), CPU)


@pytest.mark.parametrize(("config", "cached"), [("plain", None), ("cache=off", False)])
def test_the_model_generates_the_requested_tokens_with_or_without_its_cache(config, cached):
    model = Generating(2, 2)
    (phase,) = phases_of(model, 5, config)
    phase.run()
    (call,) = model.calls
    assert (call["max_new_tokens"], call.get("use_cache"), call["inference"]) == (5, cached, True)
    assert call["tokens"].shape == (2, 3)


@pytest.mark.parametrize("number", [0, -1, 2.5, True, "many"])
def test_a_number_of_tokens_is_a_whole_number(number):
    with pytest.raises(NotAStep, match=r"^new_tokens is .*, expected a whole number, 1 or more$"):
        number_of_tokens(number)


def test_a_model_without_generate_is_no_step():
    with pytest.raises(
        NotAStep,
        match=r"^new_tokens needs a model with generate\(\), but Linear has no such method; put the generation loop",
    ):
        phases_of(torch.nn.Linear(2, 2), 5)


class Karpathys(torch.nn.Linear):
    def generate(self, idx, max_new_tokens, temperature=1.0):
        self.calls = [(idx, max_new_tokens)]


def test_any_generate_is_called_that_takes_the_number_of_new_tokens():
    model = Karpathys(2, 2)
    (phase,) = phases_of(model, 5)
    phase.run()
    assert model.calls[0][1] == 5
    said = r"^generate\(\) of Karpathys cannot be called with the batch and new_tokens: got an unexpected keyword argument 'use_cache'$"
    with pytest.raises(NotAStep, match=said):
        phases_of(model, 5, "cache=off")


def test_its_tokens_are_the_new_ones():
    tokens = torch.ones(2, 3, dtype=torch.int64)
    assert generation_work(tokens, "tokens", 5) == {"tokens": 10, "samples": 2}
    assert generation_work(tokens, None, 5) == {"samples": 2, "tokens": 10}


def test_another_number_of_tokens_is_another_workload():
    plain = Workload("infer_step", "plain", 6, "int64[2, 3]")
    few, many = with_new_tokens(plain, 5), with_new_tokens(plain, 50)
    assert few.step == "generate"
    assert many.differences(few) == ["batch int64[2, 3], 50 new tokens, was int64[2, 3], 5 new tokens"]


def test_it_keeps_its_cache_by_itself():
    with pytest.raises(ConfigError, match=r"generate\(\) uses a cache by default; leave cache=on out"):
        phases_of(Generating(2, 2), 5, "cache=on")


def test_a_compiled_model_would_not_be_called():
    with pytest.raises(
        ConfigError, match=r"compile does nothing in generate\(\), which calls the uncompiled model; leave compile= out"
    ):
        phases_of(Generating(2, 2), 5, "compile=default")
