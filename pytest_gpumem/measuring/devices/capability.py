"""Distinguish errors about a GPU's missing compute capability from the program's own errors. Pure."""

from __future__ import annotations

import re

FLASH_ATTENTION = (8, 0)
"""The lowest compute capability with flash attention, PyTorch's own and cuDNN's (``sdp_utils.cpp``)."""
_LACKS = re.compile(
    r"compute capabilit|cuda capability|only supports gpu architectures|ampere gpus? or newer|requires sm_?\d|"
    r"requires \.target sm_|no kernel image is available",
    re.IGNORECASE,
)
"""Words from PyTorch (``_scaled_mm``, sparse products, flash attention), cuDNN, Triton, ptxas, CUDA, vLLM and others."""
_NO_ATTENTION = re.compile(r"no available kernel", re.IGNORECASE)
_RAISED = re.compile(r"^(?:\[\w+\]: ?)?(?:\w+\.)*(?P<error>[A-Z]\w*): (?P<words>.+)$", re.MULTILINE)
"""A traceback line with the name of an exception. torchrun and pytest-xdist put the process in front."""


def lacking(error: str, capability: tuple[int, int]) -> str | None:
    """Return an error's words as a clause if the GPU lacks something; ``None`` for other errors.

    For example, ``"RuntimeError: No available kernel. Aborting execution."`` at capability (7, 5) gives a clause that ends with
    "(flash attention needs compute capability 8.0, and this GPU has 7.5)", and at (9, 0) it gives ``None``.

    Args:
        error: The error's class name and message.
        capability: The GPU's compute capability.
    """
    words = " ".join(error.split()).rstrip(".")
    if _LACKS.search(words):
        return words
    # torch has the same message for tensors without a kernel on any GPU. The reason is in warnings, which may be filtered.
    if _NO_ATTENTION.search(words) and capability < FLASH_ATTENTION:
        needed, has = (".".join(map(str, version)) for version in (FLASH_ATTENTION, capability))
        return f"{words} (flash attention needs compute capability {needed}, and this GPU has {has})"
    return None


def lacking_in(output: str, capability: tuple[int, int]) -> str | None:
    """Return the clause for a program's first exception about a missing GPU feature; ``None`` without such an exception."""
    clauses = (lacking(f"{raised['error']}: {raised['words']}", capability) for raised in _RAISED.finditer(output))
    return next((clause for clause in clauses if clause is not None), None)
