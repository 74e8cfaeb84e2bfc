"""Two small models and their data: what the tests of this project train and measure."""

from __future__ import annotations

from tiny_models.convnet import ConvNet
from tiny_models.gpt import GPT, GPTConfig

__all__ = ["GPT", "ConvNet", "GPTConfig"]
