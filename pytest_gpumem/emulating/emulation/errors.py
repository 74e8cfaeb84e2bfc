"""Exceptions for emulated GPUs."""

from __future__ import annotations


class EmulationError(Exception):
    """Raised if a GPU cannot be emulated on this machine or in this process. The message has the reason and a remedy."""


class NotElf(ValueError):
    """Raised if a file is not a 64-bit little-endian ELF file, or is truncated."""
