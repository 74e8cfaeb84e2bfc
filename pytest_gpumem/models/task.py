"""The task of a model in the step that is measured: training, inference, or the generation of tokens."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Literal

from pytest_gpumem.models.errors import ModelError

if TYPE_CHECKING:
    from pytest_gpumem.models.lora import Lora

Kind = Literal["training", "inference", "generation"]


@dataclass(frozen=True, slots=True)
class Task:
    """The task of a model in a step."""

    trains: bool = True
    """True if it is a training step, which needs a loss; else it is one of inference."""
    new_tokens: int | None = None
    """Of inference: the number of tokens that the model's own ``generate`` adds to a prompt; ``None`` is a forward pass."""
    lora: Lora | None = None
    """Of training: the adapters that are trained, in place of all weights."""

    @property
    def kind(self) -> Kind:
        """The name of such a step."""
        if self.trains:
            return "training"
        return "inference" if self.new_tokens is None else "generation"

    @property
    def id(self) -> str:
        """Its part of a test's id: ``"infer"``, ``"generate-64"``, ``"lora-r8"``; empty where all weights are trained."""
        if self.lora is not None:
            return f"lora-{self.lora.id}"
        if self.trains:
            return ""
        return "infer" if self.new_tokens is None else f"generate-{self.new_tokens}"


@dataclass(frozen=True, slots=True)
class TaskWords:
    """The words that ask for a task where it is written: options of a command, keys of a table."""

    trains: str
    infers: str
    generate: str
    lora: str


TRAINING = Task()
INFERENCE = Task(trains=False)


def task_of(trains: bool | None, new_tokens: int | None, adapters: Lora | None, words: TaskWords) -> Task:
    """Return the task that is asked for.

    Args:
        trains: True for training, False for inference, ``None`` where neither was said, which is training.
        new_tokens: The number of tokens to generate.
        adapters: The adapters to train.
        words: What asks for each where it was written, for messages.

    Raises:
        ModelError: One of them rules out another. The message is a sentence.
    """
    if adapters is not None and (new_tokens is not None or trains is False):
        raise ModelError(
            f"{words.lora} is for training; adapters that are merged take nothing: "
            f"leave {words.lora} out, or {words.infers} and {words.generate}"
        )
    if new_tokens is None:
        return Task(trains is not False, lora=adapters)
    if trains:
        raise ModelError(f"{words.generate} measures inference; leave {words.trains} out")
    return Task(trains=False, new_tokens=new_tokens)
