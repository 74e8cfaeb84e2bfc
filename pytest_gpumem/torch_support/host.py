"""The host's memory, by torch's name for it."""

from __future__ import annotations

from typing import TYPE_CHECKING

if TYPE_CHECKING:
    import torch

HOST = "cpu"


def is_host(device: torch.device) -> bool:
    """Whether tensors on this device lie in the host's memory."""
    return device.type == HOST


def means_host(word: object) -> bool:
    """Whether ``device=word`` asks for the host by its name, or by none."""
    return word in (None, HOST)
