"""Sources of models by name, a row for each: the word before the colon, and the file that makes a model of what follows it."""

from __future__ import annotations

import importlib
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING

from pytest_gpumem.models.errors import ModelError
from pytest_gpumem.models.name import ModelName

if TYPE_CHECKING:
    from pytest_gpumem.models.name import BatchSize
    from pytest_gpumem.models.named_model import NamedModel
    from pytest_gpumem.models.task import Task


@dataclass(frozen=True)
class Source:
    """A library's models."""

    file: str
    """The module of this package whose ``model_of`` takes what `named_model` takes. It is imported when it is used."""
    written: str
    """The way a model is named, as a clause with ``{source}``."""
    generates: bool = False
    """True if there are models among them that generate tokens."""


_OF_TRANSFORMERS = Source(
    "transformers", "{source}:ORG/NAME, or {source}: and a folder with config.json", generates=True
)
SOURCES = {
    "hf": _OF_TRANSFORMERS,
    "hf-tiny": _OF_TRANSFORMERS,
    "timm": Source("timm", "{source}:NAME, as timm.list_models() has them"),
    "torchvision": Source("torchvision", "{source}:NAME, as torchvision.models.list_models() has them"),
    "diffusers": Source(
        "diffusers", "{source}:CLASS, {source}:ORG/NAME/FOLDER, or {source}: and a folder with config.json"
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


def check_task(name: ModelName, task: Task) -> None:
    """Raise `ModelError` if no model of a name's source has a task."""
    if task.new_tokens is not None and not SOURCES[name.source].generates:
        able = " and ".join(f"{word}:" for word, source in SOURCES.items() if source.generates)
        raise ModelError(f"{name} generates no tokens; models of {able} do")


def named_model(name: ModelName, size: BatchSize | None, task: Task) -> NamedModel:
    """Return the model of a name.

    Args:
        name: It, with the source.
        size: The size of its batch, if not one sample of a usual length.
        task: What it does in a step: in training it has to give a loss.

    Raises:
        ModelError: There is none, or its library is not installed, or no batch can be made for it, or it has no such task.
    """
    check_task(name, task)
    if name.is_written_as_path and not name.path.exists():
        raise ModelError(f"{name}: there is no such file or folder here")
    module = importlib.import_module(f"pytest_gpumem.models.{SOURCES[name.source].file}")
    model: NamedModel = module.model_of(name, size, task)
    model = replace(model, task=task)
    if task.lora is None:
        return model
    from pytest_gpumem.models.peft import with_adapters

    return with_adapters(model, task.lora)
