"""Tries one config: measures the model's training step under it, and takes failure for an answer."""

from __future__ import annotations

import traceback
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from pytest_gpumem.advice.ladder import OUT_OF_MEMORY, Tried
from pytest_gpumem.devices.contract import CannotRun
from pytest_gpumem.devices.windows import Windows
from pytest_gpumem.measurement import MeasuringError
from pytest_gpumem.steps.batches import samples_in
from pytest_gpumem.steps.bench import Bench
from pytest_gpumem.steps.blocks import repeated_blocks
from pytest_gpumem.steps.config import ConfigError
from pytest_gpumem.steps.measured import measure_train_step

if TYPE_CHECKING:
    from collections.abc import Callable

    import torch

    from pytest_gpumem.devices.contract import Device
    from pytest_gpumem.steps.config import StepConfig
    from pytest_gpumem.steps.model_step import Loss


class SubjectError(ValueError):
    """The function that was named does not give a model and a batch."""


@dataclass(frozen=True)
class Subject:
    """What is measured: a function that builds the model, its batch, and the loss where the model has none of its own."""

    build: Callable[[], torch.nn.Module]
    batch: Any
    loss: Loss | None
    holders: tuple[str, ...]
    """Paths of the modules that hold the repeated blocks; empty when there are none."""

    @property
    def samples(self) -> int | None:
        return samples_in(self.batch)


def subject_of(factory: Callable[[], Any], device: torch.device) -> Subject:
    """What ``factory()`` gives: ``(model, batch)`` or ``(model, batch, loss)``; it is called again for each model.

    Raises `SubjectError` when it gives something else.
    """
    import torch

    def make() -> tuple[Any, ...]:
        with torch.device(device):
            made = factory()
        if not isinstance(made, tuple) or len(made) not in (2, 3) or not isinstance(made[0], torch.nn.Module):
            what = (
                f"({', '.join(type(part).__name__ for part in made)})"
                if isinstance(made, tuple)
                else type(made).__name__
            )
            raise SubjectError(f"expected (model, batch) or (model, batch, loss) of {_name(factory)}(), got {what}")
        return made

    model, batch, *loss = make()
    return Subject(lambda: make()[0], batch, loss[0] if loss else None, _holders(model))


def try_config(device: Device, subject: Subject, config: StepConfig) -> Tried:
    """Measure the step under ``config``. Not to be able to, or to run out of memory, is an answer and no error."""
    import torch

    device.open()
    try:
        step = measure_train_step(
            Bench(device, Windows(device), timed=True), subject.build, subject.batch, config=config, loss=subject.loss
        )
    except torch.OutOfMemoryError as error:
        # What the failed step held would be in the next one's way.
        traceback.clear_frames(error.__traceback__)
        return Tried(config, why_not=OUT_OF_MEMORY)
    except (CannotRun, ConfigError, MeasuringError) as error:
        traceback.clear_frames(error.__traceback__)
        return Tried(config, why_not=str(error))
    finally:
        device.settle()
        device.close()
    metrics = step.metrics()
    # What the allocator takes from the GPU is what has to fit.
    peak = metrics.get("peak_reserved", metrics["peak_allocated"])
    return Tried(config, int(peak), metrics.get("step_time"))


def _holders(model: torch.nn.Module) -> tuple[str, ...]:
    try:
        lists = repeated_blocks(model)
    except ConfigError:
        return ()
    return tuple(blocks[0].path.rpartition(".")[0] for blocks in lists)


def _name(factory: object) -> str:
    return getattr(factory, "__qualname__", repr(factory))
