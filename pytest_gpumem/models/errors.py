"""Errors of models that are named."""

from __future__ import annotations

import difflib
from typing import TYPE_CHECKING

from pytest_gpumem.command_name import command_name

if TYPE_CHECKING:
    from collections.abc import Iterable


WRITE = (
    f"write a function that returns (model, batch, loss): `{command_name()} advise` takes it as MODULE:FUNCTION, and a test "
    "gives them to gpumem.train_step"
)
"""The way to measure a model that cannot be had by its name."""


class ModelError(ValueError):
    """No model can be made of a name, or no batch for it. The message is a sentence that says what to do."""


def nearest_of_many(word: str, valid: Iterable[str], all_of_them: str) -> str:
    """Return a clause that names the valid words closest to ``word``, or how to see ``all_of_them`` when none is close."""
    close = difflib.get_close_matches(word, list(valid), n=3)
    return f"did you mean {' or '.join(map(repr, close))}?" if close else f"{all_of_them} lists them"
