"""Batches made of text that every Python has: the sources of its own standard library.

What the batches hold depends on the Python version; their shapes, and so the memory of a step, do not.
"""

from __future__ import annotations

import sysconfig
from functools import cache
from pathlib import Path

import torch

MODULES = ("argparse", "dataclasses", "difflib", "inspect", "pickle", "subprocess", "tarfile", "typing")
"""Modules of one long file each, in every Python from 3.10 on."""


@cache
def source(module: str) -> bytes:
    """What is in a module's file. Not a tensor: one that stays would be memory retained by whichever test comes first."""
    return Path(sysconfig.get_path("stdlib"), f"{module}.py").read_bytes()


def windows(count: int, length: int, seed: int = 0) -> tuple[torch.Tensor, torch.Tensor]:
    """Bytes from ``count`` places in the sources, uint8[count, length], and each one's module, int64[count]."""
    generator = torch.Generator().manual_seed(seed)
    labels = torch.arange(count) % len(MODULES)
    taken = []
    for label in labels.tolist():
        text = source(MODULES[label])
        start = int(torch.randint(len(text) - length + 1, (), generator=generator))
        taken.append(torch.frombuffer(bytearray(text[start : start + length]), dtype=torch.uint8))
    return torch.stack(taken), labels


def token_batch(count: int, length: int, seed: int = 0) -> torch.Tensor:
    """Sequences for a language model over bytes, int64[count, length]."""
    return windows(count, length, seed)[0].long()


def image_batch(count: int, side: int, seed: int = 0) -> tuple[torch.Tensor, torch.Tensor]:
    """Text as grey images, float32[count, 1, side, side] in 0 ... 1, and the module that each is from, int64[count]."""
    text, labels = windows(count, side * side, seed)
    return text.view(count, 1, side, side) / 255, labels
