"""Words for devices and their memory, where a message has to choose between them."""

from __future__ import annotations

from pytest_gpumem.units import nearest

CPU_SLUG = "cpu-"
EMULATED = "emulated:"
"""How the words of emulated GPUs begin."""
NO_CUDNN = "none"
"""Stands for the release of cuDNN, among the details of an environment, where convolutions ran and none planned them."""
EMULATED_SLUG = "emulated-"


def memory_title(slug: str) -> str:
    """Return the title of the memory of the device with this slug: ``"GPU memory"``, or ``"Memory"`` of the CPU."""
    if slug.startswith(EMULATED_SLUG):
        return "Emulated GPU memory"
    return "Memory" if slug.startswith(CPU_SLUG) else "GPU memory"


def nearest_device(word: str, valid: list[str]) -> str:
    """Return the name nearest to that of a device: ``gpu`` is closer to ``cuda`` than its letters say."""
    return nearest("cuda" if word.lower() == "gpu" else word, valid)
