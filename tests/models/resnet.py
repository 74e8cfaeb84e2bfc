"""ResNet-18 (He, Zhang, Ren and Sun 2015) as torchvision has it, but for its stem: that of small images, 3x3 and no pooling.

With ``width=64`` the stages have the published numbers of parameters. Each of them (``layer1`` to ``layer4``) is a
``Sequential`` of blocks of one type.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch
from torch import nn
from torch.nn import functional

if TYPE_CHECKING:
    from collections.abc import Callable

    Activation = Callable[[torch.Tensor], torch.Tensor]


class BasicBlock(nn.Module):
    """Two 3x3 convolutions, with dropout after them, beside a shortcut."""

    def __init__(self, inputs: int, channels: int, stride: int, dropout: float, activation: Activation) -> None:
        super().__init__()
        self.conv1 = nn.Conv2d(inputs, channels, 3, stride, padding=1, bias=False)
        self.bn1 = nn.BatchNorm2d(channels)
        self.conv2 = nn.Conv2d(channels, channels, 3, padding=1, bias=False)
        self.bn2 = nn.BatchNorm2d(channels)
        self.dropout = nn.Dropout2d(dropout)
        self.downsample: nn.Module = nn.Identity()
        if stride != 1 or inputs != channels:
            convolution = nn.Conv2d(inputs, channels, 1, stride, bias=False)
            self.downsample = nn.Sequential(convolution, nn.BatchNorm2d(channels))
        self.activation = activation
        # A block begins as its shortcut (Goyal et al. 2017; torchvision's zero_init_residual).
        nn.init.zeros_(self.bn2.weight)

    def forward(self, images: torch.Tensor) -> torch.Tensor:
        inner = self.activation(self.bn1(self.conv1(images)))
        return self.activation(self.dropout(self.bn2(self.conv2(inner))) + self.downsample(images))


class ResNet18(nn.Module):
    """Gives the logits, or with labels their cross entropy."""

    def __init__(
        self, width: int = 64, classes: int = 1000, dropout: float = 0.0, activation: Activation = functional.relu
    ) -> None:
        super().__init__()

        def stage(inputs: int, channels: int, stride: int) -> nn.Sequential:
            first = BasicBlock(inputs, channels, stride, dropout, activation)
            return nn.Sequential(first, BasicBlock(channels, channels, 1, dropout, activation))

        self.activation = activation
        self.conv1 = nn.Conv2d(3, width, 3, padding=1, bias=False)
        self.bn1 = nn.BatchNorm2d(width)
        self.layer1 = stage(width, width, 1)
        self.layer2 = stage(width, 2 * width, 2)
        self.layer3 = stage(2 * width, 4 * width, 2)
        self.layer4 = stage(4 * width, 8 * width, 2)
        self.fc = nn.Linear(8 * width, classes)

    def forward(self, images: torch.Tensor, labels: torch.Tensor | None = None) -> torch.Tensor:
        hidden = self.activation(self.bn1(self.conv1(images)))
        hidden = self.layer4(self.layer3(self.layer2(self.layer1(hidden))))
        logits = self.fc(hidden.mean(dim=(2, 3)))
        return logits if labels is None else functional.cross_entropy(logits, labels)
