"""List the sources of models that a user can name. The word before the colon chooses the source.

Example: ``timm:resnet50`` comes from the source ``timm``, and the module ``pytest_gpumem.measuring.models.timm`` builds it.
"""

from __future__ import annotations

import importlib
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING

from pytest_gpumem.base.errors import ModelError
from pytest_gpumem.measuring.models.name import ModelName

if TYPE_CHECKING:
    from pytest_gpumem.measuring.models.name import BatchSize
    from pytest_gpumem.measuring.models.named_model import NamedModel
    from pytest_gpumem.measuring.models.task import Task


@dataclass(frozen=True)
class Source:
    """A library whose models users can name."""

    file: str
    """The name of a module in this package, which is imported when needed. Its function ``model_of`` has the same arguments as
    `named_model`."""
    written: str
    """A clause that explains how to write a model's name. ``{source}`` stands for the word before the colon."""
    generates: bool = False
    """True if the library contains models that generate tokens."""


_OF_TRANSFORMERS = Source("transformers", "{source}:ORG/NAME, or {source}:FOLDER with a config.json", generates=True)
SOURCES = {
    "hf": _OF_TRANSFORMERS,
    "hf-tiny": _OF_TRANSFORMERS,
    "timm": Source("timm", "{source}:NAME, as timm.list_models() has them"),
    "torchvision": Source("torchvision", "{source}:NAME, as torchvision.models.list_models() has them"),
    "diffusers": Source("diffusers", "{source}:CLASS, {source}:ORG/NAME/FOLDER, or {source}:FOLDER with a config.json"),
}
"""Sources by the word before the colon.

A user can also write ``module:function``. The words do not conflict with this form, because these libraries have no functions
that return a model and a batch.
"""


def model_name(text: str) -> ModelName | None:
    """Parse a model name such as ``timm:resnet50``. Return ``None`` if the text has the form ``module:function``.

    Raises:
        ModelError: The text after the colon is empty.
    """
    source, colon, name = text.partition(":")
    if not colon or source not in SOURCES:
        return None
    if not name:
        raise ModelError(f"{text!r} names no model; write {SOURCES[source].written.format(source=source)}")
    return ModelName(source, name)


def check_task(name: ModelName, task: Task) -> None:
    """Raise `ModelError` if no model in the source can do the task."""
    if task.new_tokens is not None and not SOURCES[name.source].generates:
        able = " and ".join(f"{word}:" for word, source in SOURCES.items() if source.generates)
        raise ModelError(f"{name} generates no tokens; only models from {able} do")


def named_model(name: ModelName, size: BatchSize | None, task: Task) -> NamedModel:
    """Describe a model named by the user: how to build it, its inputs, and its loss.

    Args:
        name: The source and the model's name.
        size: The batch size. ``None`` means a single sample with the model's default length.
        task: The model's task. For training, the model needs a loss.

    Raises:
        ModelError: The model does not exist, its library is not installed, no batch can be made, or the model cannot do the
            task.
    """
    check_task(name, task)
    if name.is_written_as_path and not name.path.exists():
        raise ModelError(f"{name}: there is no such file or folder here")
    module = importlib.import_module(f"pytest_gpumem.measuring.models.{SOURCES[name.source].file}")
    model: NamedModel = module.model_of(name, size, task)
    model = replace(model, task=task)
    if task.lora is None:
        return model
    from pytest_gpumem.measuring.models.peft import with_adapters

    return with_adapters(model, task.lora)
