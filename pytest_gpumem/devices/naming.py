"""Words for a device's memory, where a message has to choose between them."""

from __future__ import annotations

CPU_SLUG = "cpu-"


def memory_title(slug: str) -> str:
    """What a failure calls the memory of the device with this slug: ``"GPU memory"``, or ``"Memory"`` of the CPU."""
    return "Memory" if slug.startswith(CPU_SLUG) else "GPU memory"
