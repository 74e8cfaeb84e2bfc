"""Tiny models with random weights, and their inputs, as the replayed tests use them."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import torch

if TYPE_CHECKING:
    from transformers import LlamaForCausalLM


def llama(device: torch.device, dtype: torch.dtype = torch.float32, **config: Any) -> LlamaForCausalLM:
    """Return a Llama of two narrow layers, with ``config`` in place of its defaults."""
    from transformers import LlamaConfig, LlamaForCausalLM

    torch.manual_seed(0)
    sizes = {
        "vocab_size": 1000,
        "hidden_size": 64,
        "intermediate_size": 128,
        "num_hidden_layers": 2,
        "num_attention_heads": 4,
    }
    return LlamaForCausalLM(LlamaConfig(**{**sizes, **config})).to(device, dtype)


def tokens(device: torch.device, batch: int, length: int, vocabulary: int = 1000) -> torch.Tensor:
    """Return random token ids of shape ``[batch, length]``."""
    torch.manual_seed(1)
    return torch.randint(1, vocabulary, (batch, length)).to(device)
