"""Distinguish errors from a GPU with too low a compute capability from the program's own errors. All functions are pure."""

from __future__ import annotations

import re

FLASH_ATTENTION = (8, 0)
"""The lowest compute capability for flash attention, both PyTorch's and cuDNN's (``sdp_utils.cpp``)."""
_LACKS = re.compile(
    r"compute capabilit|cuda capability|only supports gpu architectures|ampere gpus? or newer|requires sm_?\d|"
    r"requires \.target sm_|no kernel image is available",
    re.IGNORECASE,
)
"""Phrases in errors about a missing feature of the GPU, raised by PyTorch (``_scaled_mm``, sparse products, flash attention),
cuDNN, Triton, ptxas and vLLM."""
_NO_ATTENTION = re.compile(r"no available kernel", re.IGNORECASE)
_RAISED = re.compile(r"^(?:\[\w+\]: ?)?(?:\w+\.)*(?P<error>[A-Z]\w*): (?P<words>.+)$", re.MULTILINE)
"""A traceback's line with an exception's name and message. torchrun and pytest-xdist put the process's name before it."""


def lacking(error: str, capability: tuple[int, int]) -> str | None:
    """Return an error's message if the error means that the GPU lacks a feature; ``None`` for other errors.

    The message ends without a period. For example, for ``"RuntimeError: No available kernel. Aborting execution."`` the
    function adds "(flash attention needs compute capability 8.0, and this GPU has 7.5)" if the capability is (7, 5). If the
    capability is (9, 0), it returns ``None``.

    Args:
        error: The error's class name and message.
        capability: The GPU's compute capability.
    """
    words = " ".join(error.split()).rstrip(".")
    if _LACKS.search(words):
        return words
    # This message can also mean that no GPU has a kernel for these tensors, and torch gives the reason only in warnings. So the
    # message counts only if the GPU is too old for flash attention.
    if _NO_ATTENTION.search(words) and capability < FLASH_ATTENTION:
        needed, has = (".".join(map(str, version)) for version in (FLASH_ATTENTION, capability))
        return f"{words} (flash attention needs compute capability {needed}, and this GPU has {has})"
    return None


def lacking_in(output: str, capability: tuple[int, int]) -> str | None:
    """Return the first result of `lacking` other than ``None`` for the exceptions in a program's output; otherwise ``None``."""
    clauses = (lacking(f"{raised['error']}: {raised['words']}", capability) for raised in _RAISED.finditer(output))
    return next((clause for clause in clauses if clause is not None), None)
