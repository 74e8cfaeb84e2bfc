"""Exceptions of emulated GPUs."""

from __future__ import annotations


class EmulationError(Exception):
    """A GPU cannot be emulated on this machine. The message is a sentence with the reason and a remedy."""


class NotElf(ValueError):
    """The file is not a 64-bit little-endian ELF file, or it is truncated."""
