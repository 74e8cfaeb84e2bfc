"""A small residual convolutional network for grey images."""

from __future__ import annotations

from itertools import pairwise

import torch
from torch import nn
from torch.nn import functional as F  # noqa: N812 - as PyTorch's own code calls it


class ResidualBlock(nn.Module):
    """Two 3x3 convolutions with a shortcut around them; the first one's stride makes the image smaller."""

    def __init__(self, channels_in: int, channels_out: int, stride: int) -> None:
        super().__init__()
        self.conv1 = nn.Conv2d(channels_in, channels_out, 3, stride=stride, padding=1, bias=False)
        self.norm1 = nn.BatchNorm2d(channels_out)
        self.conv2 = nn.Conv2d(channels_out, channels_out, 3, padding=1, bias=False)
        self.norm2 = nn.BatchNorm2d(channels_out)
        self.shortcut = nn.Conv2d(channels_in, channels_out, 1, stride=stride, bias=False)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """``x`` is float[batch, channels_in, height, width]; the result is smaller by the stride."""
        y = F.relu(self.norm1(self.conv1(x)))
        return F.relu(self.norm2(self.conv2(y)) + self.shortcut(x))


class ConvNet(nn.Module):
    """A residual network: each stage halves the image and doubles the channels."""

    def __init__(self, classes: int = 8, width: int = 16, stages: int = 3) -> None:
        super().__init__()
        self.stem = nn.Conv2d(1, width, 3, padding=1)
        channels = [width * 2**stage for stage in range(stages + 1)]
        self.stages = nn.ModuleList(ResidualBlock(before, after, stride=2) for before, after in pairwise(channels))
        self.head = nn.Linear(channels[-1], classes)

    def forward(self, images: torch.Tensor) -> torch.Tensor:
        """The logits of each class, float[batch, classes], for ``images``, float[batch, 1, height, width]."""
        x = F.relu(self.stem(images))
        for stage in self.stages:
            x = stage(x)
        logits: torch.Tensor = self.head(x.mean(dim=(2, 3)))
        return logits
