"""Errors by which a program says that a GPU lacks a compute capability, and not that the program is wrong. Pure."""

from __future__ import annotations

import re

FLASH_ATTENTION = (8, 0)
"""The compute capability from which on PyTorch has flash attention, its own and cuDNN's (``sdp_utils.cpp``)."""
_LACKS = re.compile(
    r"compute capabilit|cuda capability|only supports gpu architectures|ampere gpus? or newer|requires sm_?\d|"
    r"requires \.target sm_|no kernel image is available",
    re.IGNORECASE,
)
"""Words of PyTorch (``_scaled_mm``, sparse products, flash attention), cuDNN, Triton, ptxas, CUDA, and of vLLM and others."""
_NO_ATTENTION = re.compile(r"no available kernel", re.IGNORECASE)
_RAISED = re.compile(r"^(?:\[\w+\]: ?)?(?:\w+\.)*(?P<error>[A-Z]\w*): (?P<words>.+)$", re.MULTILINE)
"""A line of a traceback, with the name of an exception; torchrun and pytest-xdist begin it with the process."""


def lacking(error: str, capability: tuple[int, int]) -> str | None:
    """Return the words of an error as a clause where they say that a GPU lacks something; ``None`` for another error.

    Args:
        error: The name of its class and its message: ``"RuntimeError: No available kernel. Aborting execution."``
        capability: The GPU's compute capability.
    """
    words = " ".join(error.split()).rstrip(".")
    if _LACKS.search(words):
        return words
    # It says the same of tensors that no GPU has a kernel for; why is in warnings, which a program may filter.
    if _NO_ATTENTION.search(words) and capability < FLASH_ATTENTION:
        needed, has = (".".join(map(str, one)) for one in (FLASH_ATTENTION, capability))
        return f"{words} (flash attention needs compute capability {needed}, and this GPU has {has})"
    return None


def lacking_in(output: str, capability: tuple[int, int]) -> str | None:
    """Return the same for the end of a program's output: of the first of its exceptions that says it."""
    found = (lacking(f"{one['error']}: {one['words']}", capability) for one in _RAISED.finditer(output))
    return next((clause for clause in found if clause is not None), None)
