"""Sources of models by name, a row for each: the word before the colon, and the file that makes a model of what follows it."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

from pytest_gpumem.models import diffusers, timm, torchvision, transformers
from pytest_gpumem.models.errors import ModelError
from pytest_gpumem.models.name import ModelName

if TYPE_CHECKING:
    from collections.abc import Callable

    from pytest_gpumem.models.name import BatchSize
    from pytest_gpumem.models.named_model import NamedModel


@dataclass(frozen=True)
class Source:
    """A library's models."""

    model_of: Callable[[ModelName, BatchSize | None, bool], NamedModel]
    """Takes what `named_model` takes."""
    written: str
    """A clause with ``{source}`` that says what to write."""


_OF_TRANSFORMERS = Source(transformers.model_of, "{source}:ORG/NAME, or {source}: and a folder with config.json")
SOURCES = {
    "hf": _OF_TRANSFORMERS,
    "hf-tiny": _OF_TRANSFORMERS,
    "timm": Source(timm.model_of, "{source}:NAME, as timm.list_models() has them"),
    "torchvision": Source(torchvision.model_of, "{source}:NAME, as torchvision.models.list_models() has them"),
    "diffusers": Source(
        diffusers.model_of, "{source}:CLASS, {source}:ORG/NAME/FOLDER, or {source}: and a folder with config.json"
    ),
}
"""By the word before the colon. No function is hidden by them: those modules have none that returns a model and a batch."""


def model_name(text: str) -> ModelName | None:
    """Return the model that a text names; ``None`` where it is ``module:function``.

    Raises:
        ModelError: Nothing stands behind the colon.
    """
    source, colon, name = text.partition(":")
    if not colon or source not in SOURCES:
        return None
    if not name:
        raise ModelError(f"{text!r} names no model; write {SOURCES[source].written.format(source=source)}")
    return ModelName(source, name)


def named_model(name: ModelName, size: BatchSize | None, *, trains: bool) -> NamedModel:
    """Return the model of a name.

    Args:
        name: It, with the source.
        size: The size of its batch, if not one sample of a usual length.
        trains: Whether it has to give a loss.

    Raises:
        ModelError: There is none, or its library is not installed, or no batch can be made for it.
    """
    return SOURCES[name.source].model_of(name, size, trains)
