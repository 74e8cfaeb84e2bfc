"""Attributes of torch's modules and classes."""

from __future__ import annotations

from contextlib import contextmanager
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from collections.abc import Iterator


MODULE_PARTS = {"modules": "_modules", "parameters": "_parameters", "buffers": "_buffers"}
"""The attributes in which a module stores its submodules, parameters and buffers by name. They are dicts, except in
TorchScript modules."""


@contextmanager
def replaced(owner: Any, name: str, value: object) -> Iterator[None]:
    """Set an attribute of a module or class to ``value`` within the context."""
    original = getattr(owner, name)
    setattr(owner, name, value)
    try:
        yield
    finally:
        setattr(owner, name, original)
