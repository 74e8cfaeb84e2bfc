"""A training step of a bfloat16 Llama with LoRA on all its linear layers."""

from __future__ import annotations

from typing import TYPE_CHECKING

import tiny
import torch

if TYPE_CHECKING:
    from pytest_gpumem import Gpumem


def test_train_step(gpumem: Gpumem) -> None:
    from peft import LoraConfig, get_peft_model

    ids = tiny.tokens(gpumem.device, 2, 256)
    base = tiny.llama(gpumem.device, torch.bfloat16)
    model = get_peft_model(base, LoraConfig(r=8, target_modules="all-linear", task_type="CAUSAL_LM"))
    gpumem.train_step(model, {"input_ids": ids, "labels": ids})
