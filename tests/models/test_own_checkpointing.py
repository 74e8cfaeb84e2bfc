"""Checkpointing that a model brings itself. On the CPU."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import pytest
import torch
from torch.utils.checkpoint import checkpoint

from tests.models.architectures import GPT2, NEEDS_TRANSFORMERS, ON_THE_CPU

if TYPE_CHECKING:
    from collections.abc import Callable

    from pytest_gpumem.plugin.fixture import Gpumem

pytestmark = [NEEDS_TRANSFORMERS, pytest.mark.usefixtures("_the_same_weights_and_data", "_without_times")]

DEEP = GPT2.but(num_hidden_layers=6)


class Wrapped(torch.nn.Module):
    """A block as it is."""

    def __init__(self, block: torch.nn.Module) -> None:
        super().__init__()
        self.block = block

    def forward(self, hidden: torch.Tensor, *args: Any, **kwargs: Any) -> Any:
        return self.block(hidden, *args, **kwargs)


class Recomputing(Wrapped):
    def forward(self, hidden: torch.Tensor, *args: Any, **kwargs: Any) -> Any:
        return checkpoint(self.block, hidden, *args, use_reentrant=False, **kwargs)


def building(*wrappers: type[Wrapped]) -> Callable[[], torch.nn.Module]:
    """Builds a model with each wrapper in turn, around each of its blocks."""
    turns = iter(wrappers)

    def build() -> torch.nn.Module:
        model, wrapper = DEEP.build(), next(turns)
        for number, block in enumerate(model.transformer.h):
            model.transformer.h[number] = wrapper(block)
        return model

    return build


@ON_THE_CPU
def test_checkpointing_of_the_model_itself_saves_and_changes_no_gradient(gpumem: Gpumem) -> None:
    batch = DEEP.batch()
    plain = gpumem.train_step(building(Wrapped), batch, config="fp32")
    recomputing = gpumem.train_step(building(Recomputing), batch, config="fp32")
    assert recomputing.saves(plain) > 0.3
    assert plain.recomputed == 0
    with pytest.raises(AssertionError, match=r"0\.000 \(peak .* against .*; nothing was computed again in backward\)"):
        assert plain.saves(plain) > 0.3
    # The attention drops out within its operator, and its module for that is not called.
    called = [name for name, _ in DEEP.build().transformer.h[0].named_modules() if name != "attn.attn_dropout"]
    assert recomputing.recomputed == 6 * len(called)
    gpumem.assert_same_gradients(building(Wrapped, Recomputing), batch, "fp32", "fp32", rtol=0, atol=0)
