"""Text generation as a step: a prompt, then each new token, with the cache from the model's ``generate``."""

from __future__ import annotations

import inspect
from dataclasses import replace
from typing import TYPE_CHECKING, Any

from pytest_gpumem.base.units import counted, whole_number
from pytest_gpumem.facts.measurement import TOKENS
from pytest_gpumem.measuring.measure.reading import Phase
from pytest_gpumem.measuring.step_config.errors import ConfigError, NotAStep
from pytest_gpumem.measuring.steps.batches import arguments_of, samples_in, work_in
from pytest_gpumem.measuring.steps.precision import autocasting

if TYPE_CHECKING:
    import torch

    from pytest_gpumem.facts.measurement import Workload
    from pytest_gpumem.measuring.step_config.config import StepConfig


def number_of_tokens(new_tokens: object) -> int:
    """Return the number of tokens to generate. Raises `NotAStep` unless ``new_tokens`` is a whole number above zero."""
    try:
        return whole_number(new_tokens)
    except ValueError as error:
        raise NotAStep(f"new_tokens is {new_tokens!r}, {error}") from None


def with_new_tokens(workload: Workload, new_tokens: int) -> Workload:
    """Return an inference step's workload, changed to a ``generate`` call's workload."""
    return replace(workload, step="generate", batch=f"{workload.batch}, {counted(new_tokens, 'new token')}")


def only_for_generation(config: StepConfig) -> None:
    """Raise `ConfigError` if a setting has no effect in ``generate``."""
    if config.compile != "none":
        raise ConfigError(f"step config '{config}': compile does nothing in generate(), which calls the model itself")
    if config.cache == "on":
        raise ConfigError(f"step config '{config}': generate() keeps its cache by itself; leave cache=on out")


def generation_work(batch: Any, items: float | str | None, new_tokens: int) -> dict[str, float]:
    """Return the samples, tokens and items in a ``generate`` call, by name. Only new tokens count, not the prompt's tokens."""
    work = work_in(batch, items)
    return {name: new_tokens * (samples_in(batch) or 1) if name == TOKENS else count for name, count in work.items()}


def generation_phases(model: Any, batch: Any, new_tokens: int, config: StepConfig, device: torch.device) -> list[Phase]:
    """Return a phase with a call to the model's ``generate`` under ``torch.inference_mode``. The generated
    text lives until the phase ends.

    The text may end earlier, for example at an end token, if the model's ``generation_config`` says so.

    Args:
        model: A transformers model, or another model whose ``generate`` takes ``max_new_tokens``.
        batch: The prompt, as arguments for ``generate``.
        new_tokens: The number of tokens to add.
        config: The step config. ``cache=off`` generates without cached keys and values.
        device: The model's device.

    Raises:
        NotAStep: The model has no ``generate``, or cannot call it with these arguments.
        ConfigError: A setting in the config has no effect in ``generate``.
    """
    import torch

    only_for_generation(config)
    method = getattr(model, "generate", None)
    if not callable(method):
        raise NotAStep(
            f"{type(model).__name__} has no generate(), which new_tokens needs; measure its loop with gpumem.measure"
        )
    uncached = {"use_cache": False} if config.cache == "off" else {}
    args, named = arguments_of(batch)
    try:
        inspect.signature(method).bind(*args, **named, **uncached, max_new_tokens=new_tokens)
    except TypeError as error:
        raise NotAStep(
            f"generate() of {type(model).__name__} cannot be called with the batch and new_tokens: {error}"
        ) from None

    def generate() -> None:
        with torch.inference_mode(), autocasting(config.precision, device):
            model.generate(*args, **named, **uncached, max_new_tokens=new_tokens)

    return [Phase("generate", generate)]
