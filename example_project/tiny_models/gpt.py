"""A small GPT over bytes: pre-norm blocks of causal attention and MLP, with the head tied to the embedding."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import nn
from torch.nn import functional as F  # noqa: N812 - as PyTorch's own code calls it


@dataclass(frozen=True)
class GPTConfig:
    """The sizes of a `GPT`. ``width`` is a multiple of ``heads``; ``context`` is the longest sequence, in tokens."""

    vocabulary: int = 256
    context: int = 256
    layers: int = 4
    heads: int = 4
    width: int = 128


class Attention(nn.Module):
    """Causal self-attention. The scores are never kept: the fused kernel makes them block by block."""

    def __init__(self, config: GPTConfig) -> None:
        super().__init__()
        self.heads = config.heads
        self.qkv = nn.Linear(config.width, 3 * config.width)
        self.out = nn.Linear(config.width, config.width)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """``x`` and the result are float[batch, length, width]."""
        batch, length, width = x.shape
        q, k, v = self.qkv(x).view(batch, length, 3, self.heads, -1).permute(2, 0, 3, 1, 4)
        y = F.scaled_dot_product_attention(q, k, v, is_causal=True)
        projected: torch.Tensor = self.out(y.transpose(1, 2).reshape(batch, length, width))
        return projected


class Block(nn.Module):
    """Attention and MLP, each with its norm before it and a residual connection around it."""

    def __init__(self, config: GPTConfig) -> None:
        super().__init__()
        self.attention_norm = nn.LayerNorm(config.width)
        self.attention = Attention(config)
        self.mlp_norm = nn.LayerNorm(config.width)
        self.mlp = nn.Sequential(
            nn.Linear(config.width, 4 * config.width),
            nn.GELU(),
            nn.Linear(4 * config.width, config.width),
        )

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """``x`` and the result are float[batch, length, width]."""
        x = x + self.attention(self.attention_norm(x))
        y: torch.Tensor = x + self.mlp(self.mlp_norm(x))
        return y


class GPT(nn.Module):
    """A decoder-only transformer over bytes."""

    def __init__(self, config: GPTConfig | None = None) -> None:
        super().__init__()
        self.config = config or GPTConfig()
        self.token = nn.Embedding(self.config.vocabulary, self.config.width)
        self.position = nn.Embedding(self.config.context, self.config.width)
        self.blocks = nn.ModuleList(Block(self.config) for _ in range(self.config.layers))
        self.norm = nn.LayerNorm(self.config.width)
        self.head = nn.Linear(self.config.width, self.config.vocabulary, bias=False)
        for embedding in (self.token, self.position):
            nn.init.normal_(embedding.weight, std=0.02)
        self.head.weight = self.token.weight

    def forward(self, tokens: torch.Tensor) -> torch.Tensor:
        """The logits of each next token, float[batch, length, vocabulary], for ``tokens``, int64[batch, length]."""
        positions = torch.arange(tokens.shape[1], device=tokens.device)
        x = self.token(tokens) + self.position(positions)
        for block in self.blocks:
            x = block(x)
        logits: torch.Tensor = self.head(self.norm(x))
        return logits

    @torch.inference_mode()
    def generate(self, tokens: torch.Tensor, count: int) -> torch.Tensor:
        """``tokens`` with the ``count`` likeliest tokens after them, int64[batch, length + count]."""
        for _ in range(count):
            logits = self(tokens[:, -self.config.context :])
            tokens = torch.cat([tokens, logits[:, -1].argmax(dim=-1, keepdim=True)], dim=1)
        return tokens


def next_token_loss(logits: torch.Tensor, tokens: torch.Tensor) -> torch.Tensor:
    """The mean cross entropy, in nats, of each token of ``tokens`` given those before it."""
    return F.cross_entropy(logits[:, :-1].flatten(0, 1), tokens[:, 1:].flatten())
