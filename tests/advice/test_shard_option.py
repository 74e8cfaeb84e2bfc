"""``--shard fsdp,world=8``: what is read, what every config gets of it, and what does not go with it."""

from __future__ import annotations

import re

import pytest

from pytest_gpumem.base.errors import ConfigError
from pytest_gpumem.measuring.models.task import TRAINING
from pytest_gpumem.measuring.step_config.config import StepConfig
from pytest_gpumem.tools.advise.search_order import START, Search, Trial, with_sharding
from pytest_gpumem.tools.advise.shard_option import named_configs, rank_title, sharding_of

FSDP = sharding_of("fsdp,world=8")


def search(sharding, *, everything=False, blocks=None, configs=(), refused=()):
    return Search(None, configs, everything, blocks, TRAINING, None, sharding, refused)


def climbed(sharding, blocks=None) -> list[str]:
    """The configs that are tried where each takes less than the one before."""
    tried: list[Trial] = []
    for config in search(sharding, blocks=blocks).over(tried, 0, 4):
        tried.append(Trial(config, 1000 - len(tried)))
    return [str(one.config) for one in tried]


@pytest.mark.parametrize(
    ("text", "title"),
    [
        ("fsdp,world=8", "rank 0 of 8, FSDP"),
        (" world=16 , rank=3,hsdp:4", "rank 3 of 16, HSDP:4"),
        ("zero3,world=2", "rank 0 of 2, ZeRO-3"),
        ("tp:2", "rank 0 of 2, TP:2"),
        ("fsdp+tp:2,world=8", "rank 0 of 8, FSDP+TP:2"),
    ],
)
def test_a_sharding_is_told_as_people_call_it(text, title):
    assert rank_title(sharding_of(text)) == title


@pytest.mark.parametrize(
    ("text", "told"),
    [
        ("fsd,world=8", "unknown sharding 'fsd'; choose ddp, zero1, zero2, zero3, fsdp, "),
        ("fsdp", "shard=fsdp needs the number of ranks; add world=N"),
        (
            "fsdp,world=1",
            "world=1: expected a whole number, 2 or more; write a kind of sharding and the number of ranks, ",
        ),
        ("fsdp,world=0", "world=0: expected a whole number, 2 or more; write "),
        ("fsdp,world=x", "world=x: expected a whole number, 2 or more; write "),
        ("fsdp,world=8,rank=8", "rank=8: the ranks of a job with world=8 are 0 to 7"),
        (
            "fsdp,ranks=8",
            "ranks=8 is not expected; write a kind of sharding and the number of ranks, like fsdp,world=8",
        ),
        ("fsdp,world=8,world=4", "world=4 is not expected; write "),
        ("world=8", "'world=8' names no kind of sharding; write "),
        ("none,world=8", "names no kind of sharding; write "),
        ("", "'' names no kind of sharding; write "),
        ("fsdp,tp:2,world=8", "names 2 kinds of sharding; write fsdp+tp:2 to combine them"),
        ("tp:1", "'tp:1' has only one rank, but sharding needs two or more; write "),
        ("hsdp:4,world=6", "6 ranks cannot be divided equally among 4 copies"),
    ],
)
def test_what_is_no_sharding_says_what_would_be_right(text, told):
    with pytest.raises(ValueError, match=re.escape(told)):
        sharding_of(text)


def test_every_config_of_the_search_is_sharded_and_fully_shard_casts_by_itself():
    assert climbed(FSDP)[:4] == [
        "fp32,shard=fsdp,world=8",
        "mp-bf16,shard=fsdp,world=8",
        "mp-bf16,checkpoint=ops,shard=fsdp,world=8",
        "mp-bf16,checkpoint=blocks,shard=fsdp,world=8",
    ]
    assert {text[-17:] for text in climbed(FSDP)} == {"shard=fsdp,world=8"[-17:]}
    assert climbed(sharding_of("ddp,world=2"))[1] == "amp-bf16,shard=ddp,world=2"
    plain = [text.removesuffix(",shard=ddp,world=2") for text in climbed(sharding_of("ddp,world=2"))]
    assert plain == climbed(None)


def test_blocks_that_are_named_are_sharded_by_themselves_also_without_checkpointing():
    assert climbed(FSDP, "layers")[0] == "fp32,blocks=layers,shard=fsdp,world=8"
    assert climbed(sharding_of("ddp,world=2"), "layers")[0] == "fp32,shard=ddp,world=2"


def test_combinations_that_do_not_go_with_a_sharding_are_left_out():
    every = [*search(None, everything=True).over([], None, 4)]
    split = [*search(sharding_of("tp:2"), everything=True).over([], None, 4)]
    assert len(every) == 96
    # Of tensors that tp splits some gradients only are scaled.
    assert [str(one).removesuffix(",shard=tp:2") for one in split] == [
        str(one) for one in every if one.precision != "amp-fp16"
    ]


def test_a_named_config_is_sharded_and_one_that_cannot_be_is_a_row_with_the_reason():
    found, refused = named_configs(["fp32", "mp-bf16,reduce=fp32", "fp32", "fp32,optimizer=adafactor"], FSDP)
    assert [str(one) for one in found] == [
        "fp32,shard=fsdp,world=8",
        "mp-bf16,shard=fsdp,world=8,reduce=fp32",
    ]
    assert refused == (
        Trial(
            StepConfig.parse("fp32,optimizer=adafactor"),
            why_not="torch's Adafactor does not accept sharded parameters; use adamw",
        ),
    )
    alone = named_configs(["fp32,optimizer=adafactor"], FSDP)
    # Nothing is searched in place of what was named.
    assert [*search(FSDP, configs=alone[0], refused=alone[1]).over([], None, 4)] == []
    assert named_configs(["fp32,shard=ddp,world=2"], None)[0] == (StepConfig.parse("fp32,shard=ddp,world=2"),)


@pytest.mark.parametrize(
    ("text", "told"),
    [
        ("fp32,shard=ddp,world=2", "names a sharding, but --shard adds shard=fsdp,world=8; leave one of the two out"),
        ("amp-bf17", "unknown precision 'amp-bf17'"),
        ("mp-bf16,rank=9", "the ranks of a job with world=8 are 0 to 7"),
    ],
)
def test_a_named_config_that_is_none_is_an_error(text, told):
    with pytest.raises(ConfigError, match=re.escape(told)):
        named_configs([text], FSDP)


def test_the_words_of_the_option_are_those_of_a_config():
    assert with_sharding(START, FSDP) == StepConfig.parse("fp32,shard=fsdp,world=8")
    assert with_sharding(START, None) is START
