"""What ``gpumem advise tiny_models.advice:make_gpt`` asks for: a model, a batch, and the loss of the two."""

from __future__ import annotations

from collections.abc import Callable

import torch

from tiny_models.data import token_batch
from tiny_models.gpt import GPT, next_token_loss

Loss = Callable[[torch.Tensor, torch.Tensor], torch.Tensor]


def make_gpt() -> tuple[GPT, torch.Tensor, Loss]:
    """The GPT and 8 sequences of 256 bytes."""
    return GPT(), token_batch(8, 256), next_token_loss
