"""Remedies in messages about models by name."""

from __future__ import annotations

import difflib
from typing import TYPE_CHECKING

from pytest_gpumem.base.command_name import command_name

if TYPE_CHECKING:
    from collections.abc import Iterable


WRITE = (
    f"write a function that returns (model, batch, loss); pass MODULE:FUNCTION to `{command_name()} advise`, or in a test pass "
    "the three values to gpumem.train_step"
)
"""The remedy in messages if a model cannot be built from its name."""


def nearest_of_many(word: str, valid: Iterable[str], listing: str) -> str:
    """Return a clause with the valid words closest to ``word``.

    Args:
        word: The unknown word.
        valid: All valid words.
        listing: A call that lists the valid words. The clause names this call if no valid word is close to ``word``:
            ``"timm.list_models()"``.
    """
    close = difflib.get_close_matches(word, list(valid), n=3)
    return f"did you mean {' or '.join(map(repr, close))}?" if close else f"{listing} lists them"
