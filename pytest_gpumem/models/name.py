"""Names of models, ``hf:ORG/NAME``, and sizes of their batches, ``4x4096``, parsed. Pure."""

from __future__ import annotations

import re
from dataclasses import dataclass

from pytest_gpumem.models.errors import ModelError

SOURCES = ("hf", "hf-tiny")
"""Words before the colon. No module of these names can be meant: ``hf-tiny`` is none, and ``hf`` is not taken."""


@dataclass(frozen=True, slots=True)
class ModelName:
    """A model of transformers, by its name on the hub, or the path of its configuration."""

    source: str
    name: str

    @property
    def is_tiny(self) -> bool:
        """True if it is to have two layers of each kind only."""
        return self.source == "hf-tiny"

    def __str__(self) -> str:
        return f"{self.source}:{self.name}"


@dataclass(frozen=True, slots=True)
class BatchSize:
    """A number of samples, and the length of each where they are sequences."""

    samples: int
    length: int | None = None

    def __str__(self) -> str:
        return f"{self.samples}" if self.length is None else f"{self.samples}x{self.length}"


def model_name(text: str) -> ModelName | None:
    """Return the model that a text names; ``None`` where it is ``module:function``.

    Raises:
        ModelError: Nothing stands behind the colon.
    """
    source, colon, name = text.partition(":")
    if not colon or source not in SOURCES:
        return None
    if not name:
        raise ModelError(
            f"{text!r} names no model; write {source}:ORG/NAME, or {source}: and a folder with config.json"
        )
    return ModelName(source, name)


def batch_size(text: str) -> BatchSize:
    """Return the size that a text gives: ``"4x4096"``, ``"32"``.

    Raises:
        ModelError: It is none. The message is a sentence.
    """
    found = re.fullmatch(r"([0-9]{1,9})(?:x([0-9]{1,9}))?", text.strip())
    samples, length = (None if one is None else int(one) for one in found.groups()) if found else (0, None)
    if not samples or length == 0:
        raise ModelError(
            f"{text!r} is no size of a batch: write samples and tokens of each, like 4x4096, or samples alone, like 32"
        )
    return BatchSize(samples, length)
