"""A training step of a Llama with DoRA and no dropout."""

from __future__ import annotations

from typing import TYPE_CHECKING

import tiny

if TYPE_CHECKING:
    from pytest_gpumem import Gpumem


def test_train_step(gpumem: Gpumem) -> None:
    from peft import LoraConfig, get_peft_model

    ids = tiny.tokens(gpumem.device, 2, 256)
    dora = LoraConfig(r=8, use_dora=True, lora_dropout=0.0, target_modules="all-linear", task_type="CAUSAL_LM")
    model = get_peft_model(tiny.llama(gpumem.device), dora)
    gpumem.train_step(model, {"input_ids": ids, "labels": ids})
