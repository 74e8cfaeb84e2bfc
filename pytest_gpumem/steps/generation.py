"""The generation of text as a step: a prompt, then token after token, with the cache that the model's ``generate`` keeps."""

from __future__ import annotations

import inspect
from dataclasses import replace
from typing import TYPE_CHECKING, Any

from pytest_gpumem.measure.reading import Phase
from pytest_gpumem.measurement import TOKENS
from pytest_gpumem.step_config.errors import ConfigError, NotAStep
from pytest_gpumem.steps.batches import arguments_of, samples_in, work_in
from pytest_gpumem.steps.precision import autocasting
from pytest_gpumem.units import counted, whole_number

if TYPE_CHECKING:
    import torch

    from pytest_gpumem.measurement import Workload
    from pytest_gpumem.step_config.config import StepConfig


def number_of_tokens(new_tokens: object) -> int:
    """Return the number of tokens to generate. Raises `NotAStep` for what is none."""
    try:
        return whole_number(new_tokens)
    except ValueError as error:
        raise NotAStep(f"new_tokens is {new_tokens!r}, {error}") from None


def with_new_tokens(workload: Workload, new_tokens: int) -> Workload:
    """Return the workload of an inference step as that of a call of ``generate``."""
    return replace(workload, step="generate", batch=f"{workload.batch}, {counted(new_tokens, 'new token')}")


def only_for_generation(config: StepConfig) -> None:
    """Raise `ConfigError` if a setting has no effect in a call of ``generate``."""
    if config.compile != "none":
        raise ConfigError(f"step config '{config}': compile does nothing in generate(), which calls the model itself")
    if config.cache == "on":
        raise ConfigError(f"step config '{config}': generate() keeps its cache by itself; leave cache=on out")


def generation_work(batch: Any, items: float | str | None, new_tokens: int) -> dict[str, float]:
    """Return what a call of ``generate`` works on, as `work_in` does; its tokens are the new ones, not those of the prompt."""
    work = work_in(batch, items)
    return {name: new_tokens * (samples_in(batch) or 1) if name == TOKENS else count for name, count in work.items()}


def generation_phases(model: Any, batch: Any, new_tokens: int, config: StepConfig, device: torch.device) -> list[Phase]:
    """Return a call of the model's ``generate`` under ``torch.inference_mode``, whose text lives until its end.

    The text has its full length where nothing ends it: that is for the model's ``generation_config`` to say.

    Args:
        model: A model of transformers, or one whose ``generate`` takes ``max_new_tokens``, too.
        batch: The prompt, as arguments of ``generate``.
        new_tokens: The number of tokens that are added to it.
        config: The step config; ``cache=off`` generates without keys and values of earlier tokens.
        device: The device of the model.

    Raises:
        NotAStep: The model has no such ``generate``.
        ConfigError: The config has something that ``generate`` would not do.
    """
    import torch

    only_for_generation(config)
    generates = getattr(model, "generate", None)
    if not callable(generates):
        raise NotAStep(
            f"{type(model).__name__} has no generate(), which new_tokens needs; measure its loop with gpumem.measure"
        )
    uncached = {"use_cache": False} if config.cache == "off" else {}
    args, named = arguments_of(batch)
    try:
        inspect.signature(generates).bind(*args, **named, **uncached, max_new_tokens=new_tokens)
    except TypeError as error:
        raise NotAStep(
            f"generate() of {type(model).__name__} cannot be called with the batch and new_tokens: {error}"
        ) from None

    def generate() -> None:
        with torch.inference_mode(), autocasting(config.precision, device):
            model.generate(*args, **named, **uncached, max_new_tokens=new_tokens)

    return [Phase("generate", generate)]
