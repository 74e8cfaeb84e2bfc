"""Generation by a GPT-2 whose logits of the prompt are its largest tensor."""

from __future__ import annotations

from typing import TYPE_CHECKING

import tiny
import torch

if TYPE_CHECKING:
    from pytest_gpumem import Gpumem


def test_generate(gpumem: Gpumem) -> None:
    from transformers import GPT2Config, GPT2LMHeadModel

    torch.manual_seed(0)
    config = GPT2Config(vocab_size=16000, n_embd=64, n_layer=2, n_head=4, bos_token_id=0, eos_token_id=0)
    model = GPT2LMHeadModel(config).to(gpumem.device).eval()
    prompt = tiny.tokens(gpumem.device, 2, 256, vocabulary=16000)
    gpumem.measure(lambda: model.generate(prompt, min_new_tokens=2, max_new_tokens=2, do_sample=False))
