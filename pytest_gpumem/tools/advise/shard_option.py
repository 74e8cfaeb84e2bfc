"""Parse the option ``--shard``, such as ``--shard fsdp,world=8``, and add its sharding to step configs. Pure functions."""

from __future__ import annotations

import re
from typing import TYPE_CHECKING

from pytest_gpumem.base.errors import ConfigError
from pytest_gpumem.base.units import whole_number
from pytest_gpumem.measuring.step_config.config import StepConfig
from pytest_gpumem.measuring.step_config.shard_kinds import NONE
from pytest_gpumem.tools.advise.search_order import Trial, with_blocks, with_sharding

if TYPE_CHECKING:
    from collections.abc import Sequence

_LIKE = "write a kind of sharding and the number of ranks, like fsdp,world=8"
_LEAST = {"world": 2, "rank": 0}
"""The smallest allowed values. ``world`` is at least 2, because a single rank has no other rank to share the model or batch
with."""
PER_RANK = "bytes and samples are for a single rank, which has a GPU to itself"


def sharding_of(text: str) -> StepConfig:
    """Parse a sharding, and return a config with only this sharding.

    Args:
        text: A kind of sharding with numbers, such as ``"fsdp,world=8"`` or ``"hsdp:2,world=16,rank=3"``.

    Raises:
        ValueError: The text is not a valid sharding. The message is a sentence.
    """
    kinds: list[str] = []
    numbers: dict[str, int] = {}
    for part in filter(None, map(str.strip, text.split(","))):
        name, equals, value = part.partition("=")
        if not equals:
            kinds.append(part)
        elif name not in _LEAST or name in numbers:
            raise ValueError(f"{text!r}: {part} is not expected; {_LIKE}")
        else:
            try:
                numbers[name] = whole_number(value, _LEAST[name])
            except ValueError as error:
                raise ValueError(f"{text!r}: {part}: {error}; {_LIKE}") from None
    if kinds in ([], [NONE]):
        raise ValueError(f"{text!r} names no kind of sharding; {_LIKE}")
    if len(kinds) > 1:
        raise ValueError(f"{text!r} names {len(kinds)} kinds of sharding; write {'+'.join(kinds)} to combine them")
    config = StepConfig(shard=kinds[0], world=numbers.get("world"), rank=numbers.get("rank", 0))
    assert config.sharding is not None, "the text names a kind"
    if config.sharding.over(config.world, config.rank).world < _LEAST["world"]:
        raise ValueError(f"{text!r} has only one rank, but sharding needs two or more; {_LIKE}")
    return config


def named_configs(
    texts: Sequence[str], sharding: StepConfig | None, blocks: str | None = None
) -> tuple[tuple[StepConfig, ...], tuple[Trial, ...]]:
    """Parse the user's configs, and add a sharding to each. Also return a failed trial for each config to which the sharding
    cannot be added.

    Args:
        texts: Step configs as texts.
        sharding: A config with only a sharding, or ``None`` to add nothing.
        blocks: The path pattern for the model's repeated blocks, such as ``h.*``. It is added to each config that needs a
            pattern and has none.

    Raises:
        ConfigError: A text is not a valid config, or it names a sharding although ``sharding`` is given.
    """
    configs: dict[StepConfig, None] = {}
    refused: dict[StepConfig, Trial] = {}
    for text in texts:
        try:
            config = StepConfig.parse(text)
        except ConfigError:
            if sharding is None:
                raise
            # Some settings, such as mp-bf16, are valid only together with a sharding, so parse both together.
            configs[with_blocks(StepConfig.parse(f"{text},{sharding}"), blocks)] = None
            continue
        if sharding is not None and config.sharding is not None:
            raise ConfigError(
                f"step config {text!r} names a sharding, but --shard adds {sharding}; leave one of the two out"
            )
        try:
            configs[with_blocks(with_sharding(config, sharding, config.blocks), blocks)] = None
        except ConfigError as error:
            refused[config] = Trial(config, why_not=str(error))
    return tuple(configs), tuple(refused.values())


def rank_title(sharding: StepConfig) -> str:
    """Return a text with the measured rank and the sharding, such as ``"rank 0 of 8, FSDP"``."""
    assert sharding.sharding is not None, "the config names a sharding"
    layout = sharding.sharding.over(sharding.world, sharding.rank)
    kinds = re.sub(r"ZERO(\d)", r"ZeRO-\1", sharding.shard.upper())
    return f"rank {layout.rank} of {layout.world}, {kinds}"
