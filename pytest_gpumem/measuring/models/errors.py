"""Errors about models by name."""

from __future__ import annotations

import difflib
from typing import TYPE_CHECKING

from pytest_gpumem.base.command_name import command_name

if TYPE_CHECKING:
    from collections.abc import Iterable


WRITE = (
    f"write a function that returns (model, batch, loss): `{command_name()} advise` takes it as MODULE:FUNCTION, and a test "
    "gives them to gpumem.train_step"
)
"""The remedy if a model cannot be built by its name."""


class ModelError(ValueError):
    """A model or its batch cannot be built from a name. The message is a sentence with a remedy."""


def nearest_of_many(word: str, valid: Iterable[str], listing: str) -> str:
    """Return a clause with the valid words closest to ``word``.

    Args:
        word: The unknown word.
        valid: All valid words.
        listing: A call that lists the valid words, for the clause if no word is close: ``"timm.list_models()"``.
    """
    close = difflib.get_close_matches(word, list(valid), n=3)
    return f"did you mean {' or '.join(map(repr, close))}?" if close else f"{listing} lists them"
