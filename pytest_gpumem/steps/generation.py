"""The generation of text as a step: a prompt, then token after token, with the cache that the model's ``generate`` keeps."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from pytest_gpumem.measure.reading import Phase
from pytest_gpumem.step_config.errors import ConfigError, NotAStep
from pytest_gpumem.steps.batches import arguments_of
from pytest_gpumem.steps.precision import autocasting
from pytest_gpumem.units import whole_number

if TYPE_CHECKING:
    import torch

    from pytest_gpumem.step_config.config import StepConfig


def generation_phases(model: Any, batch: Any, new_tokens: int, config: StepConfig, device: torch.device) -> list[Phase]:
    """Return a call of the model's ``generate`` under ``torch.inference_mode``, whose text lives until its end.

    The text has its full length where nothing ends it: that is for the model's ``generation_config`` to say.

    Args:
        model: A model of transformers.
        batch: The prompt, as arguments of ``generate``.
        new_tokens: The number of tokens that are added to it.
        config: The step config; ``cache=off`` generates without keys and values of earlier tokens.
        device: The device of the model.

    Raises:
        NotAStep: The model has no ``generate``, or this is no number of tokens.
        ConfigError: The config compiles the model, which ``generate`` would not call.
    """
    import torch

    try:
        whole_number(new_tokens)
    except ValueError as error:
        raise NotAStep(f"new_tokens is {new_tokens!r}, {error}") from None
    if not callable(getattr(model, "generate", None)):
        raise NotAStep(
            f"{type(model).__name__} has no generate(), which new_tokens needs; measure its loop with gpumem.measure"
        )
    if config.compile != "none":
        raise ConfigError(f"step config '{config}': compile does nothing in generate(), which calls the model itself")
    args, named = arguments_of(batch)

    def generate() -> None:
        with torch.inference_mode(), autocasting(config.precision, device):
            model.generate(*args, **named, max_new_tokens=new_tokens, use_cache=config.cache != "off")

    return [Phase("generate", generate)]
