"""Errors of models that are named."""

from __future__ import annotations


class ModelError(ValueError):
    """No model can be made of a name, or no batch for it. The message is a sentence that says what to do."""
