"""A forward pass of a bfloat16 Llama with a large vocabulary."""

from __future__ import annotations

from typing import TYPE_CHECKING

import tiny
import torch

if TYPE_CHECKING:
    from pytest_gpumem import Gpumem


def test_infer_step(gpumem: Gpumem) -> None:
    model = tiny.llama(gpumem.device, torch.bfloat16, vocab_size=32000)
    gpumem.infer_step(model, {"input_ids": tiny.tokens(gpumem.device, 2, 256)})
