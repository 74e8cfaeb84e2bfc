"""A step that generates: a call of the model's own ``generate``, and what is none."""

from __future__ import annotations

import pytest
import torch

from pytest_gpumem.step_config.config import StepConfig
from pytest_gpumem.step_config.errors import ConfigError, NotAStep
from pytest_gpumem.steps.generation import generation_phases

CPU = torch.device("cpu")


class Generating(torch.nn.Linear):
    calls: list[dict[str, object]]

    def generate(self, tokens, **more):
        self.calls = [{**more, "tokens": tokens, "inference": torch.is_inference_mode_enabled()}]


def phases_of(model, new_tokens, config="plain"):
    return generation_phases(model, torch.ones(2, 3), new_tokens, StepConfig.parse(config), CPU)


@pytest.mark.parametrize(("config", "cached"), [("plain", True), ("cache=on", True), ("cache=off", False)])
def test_the_model_is_asked_for_so_many_tokens_with_or_without_its_cache(config, cached):
    model = Generating(2, 2)
    (phase,) = phases_of(model, 5, config)
    phase.run()
    (call,) = model.calls
    assert (call["max_new_tokens"], call["use_cache"], call["inference"]) == (5, cached, True)
    assert call["tokens"].shape == (2, 3)


@pytest.mark.parametrize("number", [0, -1, 2.5, True, "many"])
def test_a_number_of_tokens_is_a_whole_number(number):
    with pytest.raises(NotAStep, match=r"^new_tokens is .*, expected a whole number, 1 or more$"):
        phases_of(Generating(2, 2), number)


def test_a_model_without_generate_is_no_step():
    with pytest.raises(
        NotAStep, match=r"^Linear has no generate\(\), which new_tokens needs; measure its loop with gpumem"
    ):
        phases_of(torch.nn.Linear(2, 2), 5)


def test_a_compiled_model_would_not_be_called():
    with pytest.raises(ConfigError, match=r"compile does nothing in generate\(\), which calls the model itself"):
        phases_of(Generating(2, 2), 5, "compile=default")
