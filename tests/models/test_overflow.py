"""Scaled gradients (``torch.amp.GradScaler``) of a model: what overflows, and what is not a number. On the CPU."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import pytest
import torch

from tests.models.architectures import GPT2, NEEDS_TRANSFORMERS, ON_THE_CPU, bytes_of

if TYPE_CHECKING:
    from collections.abc import Callable

    from pytest_gpumem.plugin.fixture import Gpumem

pytestmark = [NEEDS_TRANSFORMERS, pytest.mark.usefixtures("_the_same_weights_and_data", "_without_times")]

DAMAGED = "transformer.h.1.mlp.c_fc.weight"


@pytest.fixture
def steps() -> list[str]:
    """What ran, in order: ``forward`` of the model, ``optimizer``."""
    return []


@pytest.fixture
def adamw(steps: list[str]) -> type[torch.optim.AdamW]:
    class Counted(torch.optim.AdamW):
        def step(self, *args: Any, **kwargs: Any) -> Any:
            steps.append("optimizer")
            return super().step(*args, **kwargs)

    return Counted


def building(
    steps: list[str], damage: Callable[[torch.Tensor], torch.Tensor] | None = None
) -> Callable[[], torch.nn.Module]:
    """A model that tells of its forward passes; ``damage`` is done to the gradient of one parameter."""

    def build() -> torch.nn.Module:
        model = GPT2.build()
        model.register_forward_pre_hook(lambda *_: steps.append("forward"))
        if damage is not None:
            model.get_parameter(DAMAGED).register_hook(damage)
        return model

    return build


@ON_THE_CPU
def test_overflowing_steps_skip_the_optimizer_and_are_not_measured(
    gpumem: Gpumem, steps: list[str], adamw: type[torch.optim.AdamW]
) -> None:
    batch = GPT2.batch()
    usual = gpumem.train_step(
        building(steps), batch, config="amp-fp16", loss=lambda output, _: output.loss * 1e-3, optimizer=adamw
    )
    assert steps == ["forward", "optimizer"] * (len(steps) // 2)
    steps.clear()
    steep = gpumem.train_step(
        building(steps), batch, config="amp-fp16", loss=lambda output, _: output.loss * 1e3, optimizer=adamw
    )
    skipped = steps.index("optimizer") - 1
    assert steps[: skipped + 1] == ["forward"] * (skipped + 1)
    assert skipped > 0
    assert steps[skipped:] == ["forward", "optimizer"] * (len(steps[skipped:]) // 2)
    assert steep.settled
    assert bytes_of(steep) == bytes_of(usual)


@ON_THE_CPU
def test_a_step_that_always_overflows_is_measured_without_optimizer_and_noted(
    gpumem: Gpumem, steps: list[str], adamw: type[torch.optim.AdamW]
) -> None:
    batch = GPT2.batch()
    usual = gpumem.train_step(building(steps), batch, config="amp-fp16", optimizer=adamw)
    steps.clear()
    endless = building(steps, lambda gradient: torch.full_like(gradient, float("inf")))
    overflowing = gpumem.train_step(endless, batch, config="amp-fp16", optimizer=adamw)
    assert "optimizer" not in steps
    (note,) = overflowing.notes
    assert note.startswith("the gradients overflow at every scale")
    assert note.endswith("every step skips the optimizer")
    assert overflowing.settled
    sizes = [parameter.numel() for parameter in GPT2.build().parameters()]
    adamw_state = sum(2 * 4 * size + 4 for size in sizes)
    assert usual.peak_backward - overflowing.peak_backward == adamw_state
