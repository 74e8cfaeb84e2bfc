"""Step configs: from text and back, their ids, and what is said of those that cannot be read."""

from __future__ import annotations

import re
from dataclasses import fields
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from pytest_gpumem.base.errors import ConfigError
from pytest_gpumem.facts.values.option_words import ROUTINGS
from pytest_gpumem.measuring.step_config.checkpoint_kinds import KINDS, CheckpointKind
from pytest_gpumem.measuring.step_config.config import (
    AXES,
    CACHES,
    CHECKPOINTS,
    COMPILER_MODES,
    COMPILES,
    OPTIMIZERS,
    PRECISIONS,
    REDUCES,
    WEIGHTS,
    ZERO_GRADS,
    StepConfig,
    as_config,
    combinations,
)
from pytest_gpumem.measuring.step_config.shard_kinds import OFFLOADS, Sharding

unhurried = settings(deadline=None)


def raises(message: str):
    return pytest.raises(ConfigError, match=f"^{re.escape(message)}$")


# From text


def test_a_config_without_anything_is_plain():
    assert StepConfig.parse("plain") == StepConfig.parse("") == StepConfig()
    assert (str(StepConfig()), StepConfig().id) == ("plain", "plain")


def test_a_text_names_a_precision_and_settings():
    config = StepConfig.parse("amp-bf16,checkpoint=every:2,optimizer=adamw-fused,clip=0.5,accumulate=4")
    assert config == StepConfig(
        precision="amp-bf16", checkpoint="every:2", optimizer="adamw-fused", clip=0.5, accumulate=4
    )


@pytest.mark.parametrize(
    "text",
    [
        " accumulate=4 ,bf16, checkpoint=ops",
        "plain,precision=bf16,checkpoint=ops,accumulate=4,",
        "bf16,checkpoint=ops,accumulate=04,optimizer=adamw,compile=none",
    ],
)
def test_order_blanks_and_defaults_do_not_matter(text):
    assert str(StepConfig.parse(text)) == "bf16,checkpoint=ops,accumulate=4"


def test_the_own_precision_stands_where_none_is_given():
    assert StepConfig.parse("checkpoint=ops").text("fp32") == "fp32,checkpoint=ops"
    assert StepConfig().text("bf16") == "bf16"
    assert StepConfig.parse("fp16").text("fp32") == "fp16"


@pytest.mark.parametrize(
    ("text", "kind", "argument"),
    [
        ("none", "none", None),
        ("every:3", "every", 3),
        ("modules:*.mlp", "modules", "*.mlp"),
        ("budget:0.25", "budget", 0.25),
    ],
)
def test_a_kind_of_checkpointing_has_its_argument(text, kind, argument):
    config = StepConfig(checkpoint=text, compile="default")
    assert config.checkpointing == (KINDS[kind], argument)
    # It is read when a phase begins, too: parsed once.
    assert config.checkpointing is config.checkpointing


def test_what_a_test_author_writes_becomes_a_config():
    config = StepConfig(precision="fp16")
    assert as_config(config) is config
    assert as_config("fp16") == config
    assert as_config(None) is None


# Ids


@pytest.mark.parametrize(
    ("text", "config_id"),
    [
        ("amp-bf16,checkpoint=every:2,optimizer=adamw-fused,accumulate=4", "amp-bf16-ckpt-every2-adamw-fused-acc4"),
        ("checkpoint=modules:transformer.h.*", "ckpt-modules-transformer.h.*"),
        ("checkpoint=blocks,blocks=transformer.h", "ckpt-blocks-of-transformer.h"),
        ("optimizer=none,clip=1,zero_grad=zero", "no-optimizer-clip1-zero-grad"),
        ("fp32,compile=max-autotune", "fp32-compile-max-autotune"),
        ("bf16,cache=on,weights=int8", "bf16-cache-int8"),
        ("cache=off", "no-cache"),
        ("mp-bf16,reduce=fp32,shard=fsdp+tp:8,world=64,rank=3", "mp-bf16-fsdp-tp8-world64-rank3-reduce-fp32"),
        ("shard=hsdp:4,world=8,offload=params+activations", "hsdp4-world8-offload-params-activations"),
    ],
)
def test_an_id_is_short_and_in_the_fields_words(text, config_id):
    assert StepConfig.parse(text).id == config_id


# Any config

CHECKPOINT_TEXTS = st.one_of(
    st.sampled_from([word for word in CHECKPOINTS if ":" not in word]),
    st.integers(1, 99).map("every:{}".format),
    st.integers(1, 99).map("sequential:{}".format),
    st.floats(0, 1).map("budget:{}".format),
    st.from_regex(r"modules:[a-z0-9_.*?]{1,12}", fullmatch=True),
)
VALUES = {
    "precision": st.sampled_from([None, *PRECISIONS]),
    "checkpoint": CHECKPOINT_TEXTS,
    "blocks": st.none() | st.from_regex(r"[a-z0-9_.*]{1,12}", fullmatch=True),
    "optimizer": st.sampled_from([*OPTIMIZERS]),
    "clip": st.none() | st.floats(min_value=0, exclude_min=True, allow_infinity=False, allow_nan=False),
    "zero_grad": st.sampled_from([*ZERO_GRADS]),
    "accumulate": st.integers(1, 10**6),
    "compile": st.sampled_from([*COMPILES]),
    "cache": st.sampled_from([None, *CACHES]),
    "weights": st.sampled_from([None, *WEIGHTS]),
    "shard": st.sampled_from(
        ["none", "ddp", "zero1", "zero2", "zero3", "fsdp", "hsdp", "hsdp:4", "pp:2", "tp:2", "fsdp+cp:2+tp:2"]
    ),
    "world": st.sampled_from([None, 16, 512]),
    "rank": st.integers(0, 15),
    "reduce": st.sampled_from([None, *REDUCES]),
    "routing": st.sampled_from([None, *ROUTINGS]),
    "offload": st.sampled_from(["none", *OFFLOADS, "optimizer+activations"]),
}


def test_every_setting_is_among_those_that_are_tried():
    assert set(VALUES) == set(AXES)


def _made_consistent(values: dict[str, Any], kind: CheckpointKind) -> None:  # noqa: C901 - a rule a line
    """Leave out what contradicts the sharding that was drawn."""
    sharding = None if values["shard"] == "none" else Sharding.parse(values["shard"])
    fully, staged = sharding is not None and sharding.fully, sharding is not None and sharding.staged
    if not fully:
        values["reduce"] = None
        values["offload"] = values["offload"].replace("params", "none")
        if str(values["precision"]).startswith("mp-"):
            values["precision"] = None
    if sharding is None:
        values["world"], values["rank"] = None, 0
    elif sharding.data is None:
        values["world"] = None
        values["rank"] %= 2
    if staged and str(values["precision"]).endswith("p-fp16"):
        values["precision"] = None
    if not (kind.on_blocks or fully or staged):
        values["blocks"] = None
    if fully and kind.name in ("sequential", "sqrt"):
        values["checkpoint"] = "blocks"
    if kind.name == "offload" or "optimizer" in values["offload"]:
        values["offload"] = "none"
    if sharding is not None and values["optimizer"] in ("adafactor", "none"):
        values["optimizer"] = "adamw"
    if sharding is not None and not fully and sharding.parts and values["precision"] == "amp-fp16":
        values["precision"] = None
    if staged and not kind.part_of_compiler:
        values["compile"] = "none"
    if staged and kind.part_of_compiler:
        values["checkpoint"], values["blocks"], values["compile"] = "blocks", None, "none"


@st.composite
def configs(draw) -> StepConfig:
    """A config that is valid: of two settings that contradict one another the second is left out."""
    values = {name: draw(strategy) for name, strategy in VALUES.items()}
    kind = KINDS[values["checkpoint"].partition(":")[0]]
    if not kind.on_blocks:
        values["blocks"] = None
    if kind.part_of_compiler:
        values["compile"] = draw(st.sampled_from(COMPILER_MODES))
    if values["precision"] in ("amp-fp16", "amp-bf16", "tf32"):
        values["weights"] = None
    _made_consistent(values, kind)
    return StepConfig(**values)


@unhurried
@given(configs())
def test_a_config_is_what_its_text_says(config):
    assert StepConfig.parse(str(config)) == config


@unhurried
@given(configs())
def test_an_id_has_nothing_that_a_node_id_or_a_shell_stumbles_over(config):
    assert re.fullmatch(r"[\w.*+-]+", config.id)


@st.composite
def matrices(draw) -> dict[str, list[object]]:
    """Axes of which every combination is valid."""
    axes = {
        "precision": st.sampled_from(["fp32", "bf16", "fp16"]),
        "checkpoint": CHECKPOINT_TEXTS.filter(lambda text: not text.startswith(("budget", "modules"))),
        **{name: VALUES[name] for name in ("optimizer", "zero_grad", "accumulate", "compile", "cache")},
    }
    names = draw(st.lists(st.sampled_from(sorted(axes)), min_size=1, max_size=3, unique=True))
    return {name: draw(st.lists(axes[name], min_size=1, max_size=3)) for name in names}


@unhurried
@given(matrices())
def test_in_a_matrix_every_config_has_an_id_of_its_own(axes):
    made = combinations(axes)
    assert len({config.id for config in made}) == len(set(made)) == len(made)


@unhurried
@given(st.text() | st.lists(st.sampled_from([*AXES, *PRECISIONS, "=", ",", ":", "1", "ops", "every"])).map("".join))
def test_any_text_makes_a_config_or_a_config_error(text):
    try:
        config = StepConfig.parse(text)
    except ConfigError as error:
        config = None
        message = str(error)
    if config is None:
        assert repr(text) in message
    else:
        assert StepConfig.parse(str(config)) == config


# Wrong ones


@pytest.mark.parametrize(
    ("name", "wrong", "words"),
    [
        ("optimizer", "zebra", OPTIMIZERS),
        ("weights", True, WEIGHTS),
        ("routing", "foo", ROUTINGS),
        ("checkpoint", "zebra", CHECKPOINTS),
        ("checkpoint", 7, CHECKPOINTS),
    ],
)
def test_an_unknown_word_is_told_with_all_that_are_valid(name, wrong, words):
    with pytest.raises(ConfigError) as caught:
        StepConfig(**{name: wrong})
    message = str(caught.value)
    assert message.startswith(f"unknown {name} {wrong!r}")
    assert [word for word in words if word not in message] == []


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("amp-bf61", "unknown precision 'amp-bf61'; did you mean 'amp-bf16'? Valid: " + ", ".join(PRECISIONS)),
        ("checkpoints=ops", "unknown setting 'checkpoints'; did you mean 'checkpoint'? Valid: " + ", ".join(AXES)),
        ("adamw", "'adamw' is no precision; write optimizer=adamw"),
        ("every:2", "'every:2' is no precision; write checkpoint=every:2"),
        ("blocks", "'blocks' is no precision; write checkpoint=blocks"),
        ("reduce-overhead", "'reduce-overhead' is no precision; write compile=reduce-overhead"),
    ],
)
def test_a_text_that_cannot_be_read_is_told_what_would_be_right(text, message):
    with raises(f"step config {text!r}: {message}"):
        StepConfig.parse(text)


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("checkpoint=every", "checkpoint=every: write checkpoint=every:N"),
        ("checkpoint=ops:2", "checkpoint=ops:2: write checkpoint=ops"),
        ("checkpoint=every:0", "checkpoint=every:0: expected a whole number, 1 or more"),
        (
            "checkpoint=budget:nan,compile=default",
            "checkpoint=budget:nan: the activation memory budget must be a number from 0 to 1, the fraction of activations to save",
        ),
        ("checkpoint=budget:half,compile=default", "checkpoint=budget:half: expected a number"),
        (
            "checkpoint=budget:0.5",
            "checkpoint=budget:0.5 is the activation memory budget of torch.compile; add compile=default",
        ),
        (
            "checkpoint=budget:0.5,compile=aot_eager",
            "checkpoint=budget:0.5 is the activation memory budget of torch.compile; add compile=default",
        ),
        ("accumulate=0", "accumulate=0: expected a whole number, 1 or more"),
        ("clip=0", "clip=0.0: the norm to clip to must be a finite number above 0"),
        ("clip=inf", "clip=inf: the norm to clip to must be a finite number above 0"),
        ("clip=one", "clip=one: expected a number"),
        (
            "blocks=h,checkpoint=offload",
            "blocks=h does nothing with checkpoint=offload, because this kind does not act on blocks",
        ),
        (
            "amp-bf16,weights=int8",
            "weights=int8 cannot be combined with amp-bf16; use fp32, bf16 or fp16, or no precision",
        ),
        ("bf16,fp16", "precision is given twice"),
    ],
)
def test_a_value_that_is_wrong_or_contradicts_another_is_told(text, message):
    with raises(f"step config {text!r}: {message}"):
        StepConfig.parse(text)


def test_what_is_no_text_is_no_config():
    with raises("['fp32'] is no step config; write a text like 'amp-bf16,checkpoint=blocks'"):
        StepConfig.parse(["fp32"])


def test_true_is_no_number_of_micro_batches():
    with raises("accumulate=True: expected a whole number, 1 or more"):
        StepConfig(accumulate=True)


# Steps that a config is for


def test_a_training_step_has_no_use_for_what_only_inference_does():
    config = StepConfig.parse("bf16,compile=eager,cache=off,weights=int8")
    config.only_for("infer_step")
    with raises(f"step config '{config}': cache, weights does nothing in gpumem.train_step"):
        config.only_for("train_step")


def test_an_inference_step_has_no_use_for_what_only_training_does():
    text = "fp16,checkpoint=blocks,blocks=h,optimizer=sgd,clip=1,zero_grad=zero,accumulate=2,compile=default"
    config = StepConfig.parse(text)
    config.only_for("train_step")
    idle = "accumulate, blocks, checkpoint, clip, optimizer, zero_grad"
    with raises(f"step config '{text}': {idle} does nothing in gpumem.infer_step"):
        config.only_for("infer_step")


# Combinations


def ids(*args, **kwargs) -> list[str]:
    return [config.id for config in combinations(*args, **kwargs)]


def test_the_last_axis_moves_fastest():
    assert ids({"precision": ["fp32", "bf16"], "accumulate": [2, 4]}) == [
        "fp32-acc2",
        "fp32-acc4",
        "bf16-acc2",
        "bf16-acc4",
    ]


def test_an_axis_may_be_a_single_value():
    assert ids({"precision": "bf16", "accumulate": (1, 2)}) == ["bf16", "bf16-acc2"]


def test_equal_configs_are_one():
    assert ids({"accumulate": [1, 1, 2], "optimizer": ["adamw", "adamw"]}) == ["plain", "acc2"]


def test_what_has_all_of_a_skipped_text_is_left_out():
    axes = {"precision": ["fp32", "fp16"], "checkpoint": ["none", "ops"]}
    assert ids(axes, skip=["fp16,checkpoint=ops"]) == ["fp32", "fp32-ckpt-ops", "fp16"]
    assert ids(axes, skip=["fp16"]) == ["fp32", "fp32-ckpt-ops"]


def test_a_combination_that_makes_no_config_can_be_skipped():
    axes = {"checkpoint": ["none", "budget:0.5"], "compile": ["none", "default"]}
    with pytest.raises(ConfigError, match="add compile=default"):
        combinations(axes)
    assert ids(axes, skip=["checkpoint=budget:0.5,compile=none"]) == ["plain", "compile", "ckpt-budget0.5-compile"]


@pytest.mark.parametrize(
    ("axes", "skip", "message"),
    [
        (
            {"precisions": ["fp32"]},
            (),
            "unknown axis 'precisions'; did you mean 'precision'? Valid: " + ", ".join(AXES),
        ),
        ({"precision": []}, (), "precision has no value, so there is no config"),
        (
            {"precision": ["fp32"]},
            ("fp16",),
            "skip='fp16' leaves nothing out, because no combination has all settings in this text",
        ),
        ({"precision": ["fp32"]}, ("fp32",), "skip leaves out all combinations, so there is nothing to run"),
        ({"precision": ["fp32"]}, ("a=b",), "skip='a=b': write settings, like 'fp16,checkpoint=ops'"),
    ],
)
def test_axes_that_make_no_matrix_are_told(axes, skip, message):
    with raises(message):
        combinations(axes, skip)


def test_a_wrong_value_of_an_axis_is_told():
    with pytest.raises(ConfigError, match=r"^unknown precision 'fp23'; did you mean 'fp32'\?"):
        combinations({"precision": ["fp32", "fp23"]})


def test_the_fields_of_a_config_are_its_axes():
    assert tuple(field.name for field in fields(StepConfig)) == AXES


# Sharding


@pytest.mark.parametrize(
    ("text", "message"),
    [
        (
            "shard=fdsp,world=2",
            "unknown sharding 'fdsp'; choose ddp, zero1, zero2, zero3, fsdp, hsdp, pp:N, cp:N, tp:N",
        ),
        ("shard=tp", "'tp': write tp:N, with the number of parts"),
        ("shard=tp:0", "'tp:0': expected a whole number, 1 or more"),
        ("shard=ddp:2,world=2", "'ddp:2': ddp takes no number"),
        ("shard=tp:2+tp:4", "tp is given twice"),
        ("shard=ddp+fsdp,world=4", "ddp and fsdp are both data-parallel; choose one of them"),
        ("shard=ddp+tp:2,world=4", "DistributedDataParallel does not accept split parameters"),
        ("shard=pp:2+tp:2", "tp cannot be combined with pp"),
        ("shard=hsdp:4,world=6", "6 ranks cannot be divided equally among 4 copies"),
        ("shard=fsdp+tp:4,world=6", "6 ranks cannot be divided equally among tp:4"),
        ("shard=tp:2,world=8", "has 2 ranks, but world=8; add a data-parallel kind, as in shard=fsdp+tp:2"),
        ("shard=fsdp,world=4,rank=4", "rank=4: the ranks of a job with world=4 are 0 to 3"),
        ("shard=fsdp,world=0", "expected a whole number, 1 or more"),
        ("world=4", "world=4 does nothing without sharding"),
        ("shard=ddp,world=2,reduce=fp32", "reduce=fp32 works only with fully_shard"),
        ("offload=params", "offload=params works only with fully_shard"),
        ("offload=weights", "unknown offload 'weights'; choose params, optimizer, activations"),
        ("offload=activations+activations", "repeats a word"),
        ("checkpoint=offload,offload=activations", "do the same; leave one out"),
        ("shard=fsdp,world=2,offload=params+optimizer", "leave optimizer out"),
        ("shard=fsdp,world=2,checkpoint=sqrt", "fully_shard gathers each"),
        ("amp-fp16,shard=tp:2", "torch cannot unscale split and whole gradients"),
        ("optimizer=adafactor,shard=fsdp,world=2", "Adafactor does not accept sharded parameters"),
        ("optimizer=none,shard=zero1,world=2", "there is no optimizer; use ddp"),
        ("shard=pp:2,compile=eager", "leave compile= out"),
        ("offload=optimizer,clip=1", "cannot be combined with clip=1.0"),
        ("amp-fp16,shard=pp:2", "the schedule of pp does not scale them; use bfloat16"),
    ],
)
def test_sharding_that_contradicts_itself_is_told_with_what_would_be_right(text, message):
    with pytest.raises(ConfigError) as refused:
        StepConfig.parse(text)
    assert message in str(refused.value)


def test_a_step_of_inference_is_not_sharded():
    with pytest.raises(ConfigError, match=r"shard, world does nothing in gpumem\.infer_step"):
        StepConfig.parse("shard=ddp,world=2").only_for("infer_step")
    with pytest.raises(ConfigError, match=r"add shard=fsdp \(or .*\), or write bf16 in gpumem\.infer_step$"):
        StepConfig.parse("mp-bf16")
    with pytest.raises(ConfigError, match=r"mp-bf16, shard, world does nothing in gpumem\.infer_step; write bf16$"):
        StepConfig.parse("mp-bf16,shard=fsdp,world=2").only_for("infer_step")
