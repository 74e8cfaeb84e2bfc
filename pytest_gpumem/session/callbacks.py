"""A callback for trainers: it says where a step ends, and lets training stop in its own way when the steps are measured."""

from __future__ import annotations

import importlib
import sys
from functools import cache
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from collections.abc import Callable

_BASES = {
    "transformers": ("transformers", "TrainerCallback"),
    "lightning.pytorch": ("lightning.pytorch", "Callback"),
    "pytorch_lightning": ("pytorch_lightning", "Callback"),
}
"""By a module that is loaded where it may be used: module and name of the class that a trainer asks of its callbacks."""


def callback_of(step_ended: Callable[[], bool]) -> Any:
    """Return a callback for the ``Trainer`` of transformers and that of Lightning, as far as they are imported.

    Args:
        step_ended: Called when a step has ended; returns whether training may stop.

    Raises:
        RuntimeError: Neither is imported.
    """
    loaded = tuple(name for name in _BASES if name in sys.modules)
    if not loaded:
        raise RuntimeError(
            "a callback is for the Trainer of transformers or of lightning, and neither is imported; "
            "in other loops call step_ended() at the end of each step"
        )
    return _class_for(loaded)(step_ended)


@cache
def _class_for(loaded: tuple[str, ...]) -> Any:
    """Return the class, made once: a class is a reference cycle, and would be among the garbage that is reported."""
    bases = tuple(getattr(importlib.import_module(module), name) for module, name in map(_BASES.__getitem__, loaded))

    class GpumemCallback(*bases):  # type: ignore[misc]  # whichever there are
        def __init__(self, step_ended: Callable[[], bool]) -> None:
            super().__init__()
            self._step_ended = step_ended
            self._optimizer_steps = 0

        def on_step_end(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
            """After a step of the optimizer, in transformers."""
            if self._step_ended():
                control.should_training_stop = True

        def on_train_batch_end(self, trainer: Any, *args: Any, **kwargs: Any) -> None:
            """After a batch, in Lightning: with accumulation, not each of them ends with a step of the optimizer."""
            if trainer.global_step != self._optimizer_steps:
                self._optimizer_steps = trainer.global_step
                if self._step_ended():
                    trainer.should_stop = True

        def on_train_end(self, *args: Any, **kwargs: Any) -> None:
            """Both have a method of this name, with other arguments."""

    return GpumemCallback
