"""Exceptions of emulated GPUs."""

from __future__ import annotations


class EmulationError(Exception):
    """A GPU cannot be emulated here; the message is a sentence with the reason and a remedy."""


class NotElf(ValueError):
    """The file is no 64-bit little-endian ELF file, or is cut short."""
