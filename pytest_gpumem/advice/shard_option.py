"""The sharding that every config gets, as in ``--shard fsdp,world=8``: read, added to named configs, and told. Pure."""

from __future__ import annotations

import re
from typing import TYPE_CHECKING

from pytest_gpumem.advice.search_order import Tried, with_blocks, with_sharding
from pytest_gpumem.step_config.config import StepConfig
from pytest_gpumem.step_config.errors import ConfigError
from pytest_gpumem.step_config.shard_kinds import NONE
from pytest_gpumem.units import whole_number

if TYPE_CHECKING:
    from collections.abc import Sequence

_LIKE = "write a kind of sharding and the number of ranks, like fsdp,world=8"
_LEAST = {"world": 2, "rank": 0}
"""The least that each number may be: one rank has nobody to share with."""
PER_RANK = "bytes and samples are those of one rank, which has a GPU to itself"


def sharding_of(text: str) -> StepConfig:
    """Return a config that says nothing but the sharding of a text: ``"fsdp,world=8"``, ``"hsdp:2,world=16,rank=3"``.

    Raises:
        ValueError: It says none. The message is a sentence.
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
        raise ValueError(
            f"{text!r} names {len(kinds)} kinds of sharding; write {'+'.join(kinds)} for all of them together"
        )
    config = StepConfig(shard=kinds[0], world=numbers.get("world"), rank=numbers.get("rank", 0))
    assert config.sharding is not None, "it has been named"
    if config.sharding.over(config.world, config.rank).world < _LEAST["world"]:
        raise ValueError(f"{text!r} has one rank, which shares nothing; {_LIKE}")
    return config


def named_configs(
    texts: Sequence[str], sharding: StepConfig | None, blocks: str | None = None
) -> tuple[tuple[StepConfig, ...], tuple[Tried, ...]]:
    """Return the configs of texts with a sharding, each once, and rows of those that do not go with it.

    Those that act on the model's blocks have the pattern ``blocks``, if they name none.

    Raises:
        ConfigError: A text is no config, or has a sharding of its own beside ``sharding``.
    """
    found: dict[StepConfig, None] = {}
    refused: dict[StepConfig, Tried] = {}
    for text in texts:
        try:
            config = StepConfig.parse(text)
        except ConfigError:
            if sharding is None:
                raise
            # Some words need sharding: mp-bf16.
            found[with_blocks(StepConfig.parse(f"{text},{sharding}"), blocks)] = None
            continue
        if sharding is not None and config.sharding is not None:
            raise ConfigError(
                f"step config {text!r} has a sharding of its own, beside {sharding}; leave one of them out"
            )
        try:
            found[with_blocks(with_sharding(config, sharding, config.blocks), blocks)] = None
        except ConfigError as error:
            refused[config] = Tried(config, why_not=str(error))
    return tuple(found), tuple(refused.values())


def rank_title(sharding: StepConfig) -> str:
    """Return the rank that is measured, and how the model is shared out: ``"rank 0 of 8, FSDP"``."""
    assert sharding.sharding is not None, "only of a config that says one"
    layout = sharding.sharding.over(sharding.world, sharding.rank)
    kinds = re.sub(r"ZERO(\d)", r"ZeRO-\1", sharding.shard.upper())
    return f"rank {layout.rank} of {layout.world}, {kinds}"
