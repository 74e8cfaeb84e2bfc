"""Define what a measured step does with a model: training, inference or token generation."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Literal

from pytest_gpumem.base.errors import ModelError
from pytest_gpumem.base.units import counted, whole_number

if TYPE_CHECKING:
    from pytest_gpumem.measuring.models.lora import Lora

Kind = Literal["training", "inference", "generation"]


@dataclass(frozen=True, slots=True)
class Task:
    """The work that a model does in a measured step."""

    trains: bool = True
    """True for a training step, which needs a loss. False for an inference step."""
    new_tokens: int | None = None
    """For inference, the number of tokens that the model's ``generate`` adds to a prompt. ``None`` means a forward pass
    instead."""
    lora: Lora | None = None
    """For training, the LoRA adapters to train. ``None`` means that all weights are trained."""

    @property
    def kind(self) -> Kind:
        """The task's name."""
        if self.trains:
            return "training"
        return "inference" if self.new_tokens is None else "generation"

    def __str__(self) -> str:
        if self.lora is not None:
            return f"{self.kind} of LoRA {self.lora}"
        return self.kind if self.new_tokens is None else f"{self.kind} of {counted(self.new_tokens, 'token')}"

    @property
    def id(self) -> str:
        """The task in a test's id: ``"infer"``, ``"generate-64"``, ``"lora-r8"``; empty if all weights are trained."""
        if self.lora is not None:
            return f"lora-{self.lora.id}"
        if self.trains:
            return ""
        return "infer" if self.new_tokens is None else f"generate-{self.new_tokens}"


@dataclass(frozen=True, slots=True)
class TaskWords:
    """The words with which a user chooses a task: a command's options, or a settings table's keys."""

    trains: str
    infers: str
    generate: str
    lora: str


TRAINING = Task()
INFERENCE = Task(trains=False)


def task_of(trains: bool | None, new_tokens: object, adapters: Lora | None, words: TaskWords) -> Task:
    """Return the task that a user has chosen.

    Args:
        trains: True for training, False for inference. ``None`` means that the user chose neither. The task is then training.
        new_tokens: The number of tokens to generate.
        adapters: The adapters to train.
        words: The option names or keys that messages quote.

    Raises:
        ModelError: Two arguments exclude each other. The message is a sentence.
    """
    infers = words.generate if new_tokens is not None else words.infers if trains is False else None
    if adapters is not None and infers is not None:
        raise ModelError(
            f"{words.lora} trains adapters, and inference with merged adapters is the same as with the plain model: "
            f"leave {words.lora} or {infers} out"
        )
    if new_tokens is None:
        return Task(trains is not False, lora=adapters)
    if trains:
        raise ModelError(f"{words.generate} measures inference; leave {words.trains} out")
    try:
        return Task(trains=False, new_tokens=whole_number(new_tokens))
    except ValueError as error:
        raise ModelError(f"{words.generate} is {new_tokens!r}, {error}") from None
