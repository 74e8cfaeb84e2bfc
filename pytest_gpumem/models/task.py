"""The task of a model in the step that is measured: training, inference, or the generation of tokens."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Literal

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


TRAINING = Task()
INFERENCE = Task(trains=False)
