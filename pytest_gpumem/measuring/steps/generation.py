"""Text generation as a step: a call to the model's ``generate``, which runs the prompt and then each new token."""

from __future__ import annotations

import inspect
from dataclasses import replace
from typing import TYPE_CHECKING, Any

from pytest_gpumem.base.errors import ConfigError, NotAStep
from pytest_gpumem.base.units import counted, whole_number
from pytest_gpumem.facts.measurement import TOKENS
from pytest_gpumem.measuring.measure.reading import Phase
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
    """Return the workload of a ``generate`` call, made from the workload of an inference step with the same prompt."""
    return replace(workload, step="generate", batch=f"{workload.batch}, {counted(new_tokens, 'new token')}")


def only_for_generation(config: StepConfig) -> None:
    """Raise `ConfigError` if the config has a setting without effect in ``generate``."""
    if config.compile != "none":
        raise ConfigError(
            f"step config '{config}': compile does nothing in generate(), which calls the uncompiled model; leave compile= out"
        )
    if config.cache == "on":
        raise ConfigError(f"step config '{config}': generate() uses a cache by default; leave cache=on out")


def generation_work(batch: Any, items: float | str | None, new_tokens: int) -> dict[str, float]:
    """Return the numbers of samples, tokens and items in a ``generate`` call, by name. The prompt's tokens do not count."""
    work = work_in(batch, items)
    return {name: new_tokens * (samples_in(batch) or 1) if name == TOKENS else count for name, count in work.items()}


def generation_phases(model: Any, batch: Any, new_tokens: int, config: StepConfig, device: torch.device) -> list[Phase]:
    """Return a single phase, which calls the model's ``generate`` under ``torch.inference_mode``.

    The generated tokens are freed when the phase ends. ``generate`` may stop before ``new_tokens`` tokens, for example at an
    end token, if the model's ``generation_config`` says so.

    Args:
        model: A transformers model, or another model whose ``generate`` takes ``max_new_tokens``.
        batch: The prompt, as arguments for ``generate``.
        new_tokens: The number of tokens to generate.
        config: The step config. ``cache=off`` generates without cached keys and values.
        device: The model's device.

    Raises:
        NotAStep: The model has no ``generate``, or ``generate`` does not take these arguments.
        ConfigError: A setting in the config has no effect in ``generate``.
    """
    import torch

    only_for_generation(config)
    method = getattr(model, "generate", None)
    if not callable(method):
        raise NotAStep(
            f"new_tokens needs a model with generate(), but {type(model).__name__} has no such method; put the generation loop "
            "into a function, and measure it with gpumem.measure"
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
