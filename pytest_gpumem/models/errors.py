"""Errors of models that are named."""

from __future__ import annotations

WRITE = (
    "write a function that returns (model, batch, loss): `gpumem advise` takes it as MODULE:FUNCTION, and a test gives them to "
    "gpumem.train_step"
)
"""The way to measure a model that cannot be had by its name."""


class ModelError(ValueError):
    """No model can be made of a name, or no batch for it. The message is a sentence that says what to do."""
