"""GPT-2 small (124 million parameters, random weights), and a batch of 8 x 1024 tokens for it. An emulated GPU gets fewer layers."""

from __future__ import annotations

import torch

from pytest_gpumem.emulating.emulation.load import current_emulation

LAYERS = 12 if current_emulation() is None else 8
PARAMETERS = 39_385_344 + LAYERS * 7_087_872
TENSORS = 4 + LAYERS * 12
"""Its parameters are in this many tensors."""
BATCH, TOKENS, VOCABULARY = 8, 1024, 50_257
FLOAT = 4
"""Bytes of a float32."""
MOST_WORKSPACES = 8 * 33_554_432
"""More than cuBLAS keeps for the handles of two threads on any GPU up to now."""
GIBIBYTE = 2**30
NEEDED = 60 * GIBIBYTE
"""Bytes of GPU memory that the tests with this model may need."""


def gpt2_small() -> torch.nn.Module:
    # Loading transformers takes seconds, and collecting the suite need not wait for them.
    import transformers

    return transformers.GPT2LMHeadModel(transformers.GPT2Config(n_layer=LAYERS))


def batch(seed: int = 0) -> dict[str, torch.Tensor]:
    tokens = torch.randint(VOCABULARY, (BATCH, TOKENS), generator=torch.Generator().manual_seed(seed))
    return {"input_ids": tokens, "labels": tokens.clone()}
