"""ResNet (He, Zhang, Ren and Sun 2015) of bottleneck blocks, with the stride on the 3x3 convolution, as torchvision has it."""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch
from torch import nn
from torch.nn import functional

if TYPE_CHECKING:
    from collections.abc import Sequence

EXPANSION = 4
"""A block gives this many times the channels that its 3x3 convolution works on."""


class Bottleneck(nn.Module):
    """1x1, 3x3 and 1x1 convolutions beside a shortcut."""

    def __init__(self, channels: int, width: int, stride: int) -> None:
        super().__init__()
        out = width * EXPANSION
        self.conv1 = nn.Conv2d(channels, width, 1, bias=False)
        self.bn1 = nn.BatchNorm2d(width)
        self.conv2 = nn.Conv2d(width, width, 3, stride, padding=1, bias=False)
        self.bn2 = nn.BatchNorm2d(width)
        self.conv3 = nn.Conv2d(width, out, 1, bias=False)
        self.bn3 = nn.BatchNorm2d(out)
        self.relu = nn.ReLU(inplace=True)
        self.downsample: nn.Module = nn.Identity()
        if stride != 1 or channels != out:
            self.downsample = nn.Sequential(nn.Conv2d(channels, out, 1, stride, bias=False), nn.BatchNorm2d(out))

    def forward(self, images: torch.Tensor) -> torch.Tensor:
        inner = self.relu(self.bn1(self.conv1(images)))
        inner = self.relu(self.bn2(self.conv2(inner)))
        return self.relu(self.bn3(self.conv3(inner)) + self.downsample(images))


class ResNet(nn.Module):
    """Logits, or with labels the cross entropy. With the defaults: ResNet-50."""

    def __init__(self, depths: Sequence[int] = (3, 4, 6, 3), width: int = 64, classes: int = 1000) -> None:
        super().__init__()
        stem = nn.Conv2d(3, width, 7, stride=2, padding=3, bias=False), nn.BatchNorm2d(width), nn.ReLU(inplace=True)
        self.stem = nn.Sequential(*stem, nn.MaxPool2d(3, stride=2, padding=1))
        self.stages = nn.ModuleList()
        channels = width
        for number, depth in enumerate(depths):
            stage = []
            for block in range(depth):
                stage.append(Bottleneck(channels, width << number, 2 if number and not block else 1))
                channels = (width << number) * EXPANSION
            self.stages.append(nn.Sequential(*stage))
        self.head = nn.Linear(channels, classes)

    def forward(self, pixel_values: torch.Tensor, labels: torch.Tensor | None = None) -> torch.Tensor:
        images = self.stem(pixel_values)
        for stage in self.stages:
            images = stage(images)
        logits: torch.Tensor = self.head(images.mean((2, 3)))
        return logits if labels is None else functional.cross_entropy(logits, labels)
