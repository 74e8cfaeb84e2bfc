"""Describe a prompt for a transformers model that generates tokens. A prompt consists of random token ids without padding.

Example: GPT2LMHeadModel has 1,024 positions. If it generates 64 tokens, the default prompt has the other 960 tokens.
"""

from __future__ import annotations

from dataclasses import replace
from typing import Any

from pytest_gpumem.base.errors import ModelError
from pytest_gpumem.base.units import counted
from pytest_gpumem.measuring.models.inputs import Inputs, by_sides
from pytest_gpumem.measuring.models.name import BatchSize
from pytest_gpumem.measuring.models.remedies import WRITE
from pytest_gpumem.measuring.models.transformers_inputs import FEATURES, MOST_TOKENS, TOKENS, inputs_of, positions_of


def prompt_of(model_class: Any, config: Any, size: BatchSize | None, new_tokens: int) -> Inputs:
    """Describe the arguments for a model's ``generate``.

    Args:
        model_class: A transformers model class that generates tokens.
        config: The model's configuration.
        size: The number of prompts, and the tokens in each prompt. ``None`` means a single prompt that fills all positions
            except those for the new tokens, but has at most `MOST_TOKENS` tokens.
        new_tokens: The number of tokens to generate.

    Raises:
        ModelError: No prompt can be made for this class or with this size, or the model has too few positions.
    """
    name, main, size = model_class.__name__, model_class.main_input_name, size or BatchSize(1)
    if main not in (TOKENS, FEATURES):
        raise ModelError(f"{name} takes {main}, which is not a prompt of tokens; {WRITE}")
    if main == FEATURES:
        if size.length is not None:
            raise ModelError(f"recordings for {name} have a fixed length: write only {size.samples} for the batch")
        positions = config.max_target_positions
    else:
        positions = positions_of(config)
    shares_positions = main == TOKENS and not getattr(config, "is_encoder_decoder", False)
    most = MOST_TOKENS if positions is None else positions - new_tokens * shares_positions
    if shares_positions and size.length is None:
        size = replace(size, length=max(1, min(MOST_TOKENS, most)))
    if new_tokens > (positions or new_tokens):
        raise ModelError(f"{name} has {positions} positions, which are too few to generate {new_tokens} tokens")
    length = size.length or 0
    if shares_positions and positions is not None and length > most:
        raise ModelError(
            f"{name} has {positions} positions, but a prompt of {counted(length, 'token')} with {new_tokens} new tokens needs "
            f"{length + new_tokens}"
        )
    # Pass only the main input, because `generate` itself makes the inputs for a decoder.
    inputs = inputs_of(model_class, config, size, trains=False)
    arguments = {main: inputs.arguments[main]}
    if main == FEATURES:
        return Inputs(size, arguments, by_sides(arguments[main].shape[1:]))
    return replace(inputs, arguments=arguments)
