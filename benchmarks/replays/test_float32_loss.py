"""A training step of a bfloat16 Llama with a large vocabulary."""

from __future__ import annotations

from typing import TYPE_CHECKING

import tiny
import torch

if TYPE_CHECKING:
    from pytest_gpumem import Gpumem


def test_train_step(gpumem: Gpumem) -> None:
    ids = tiny.tokens(gpumem.device, 2, 256)
    model = tiny.llama(gpumem.device, torch.bfloat16, vocab_size=32000)
    gpumem.train_step(model, {"input_ids": ids, "labels": ids})
