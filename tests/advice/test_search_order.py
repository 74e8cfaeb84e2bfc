"""Configs are tried in the order in which people should, each on top of what helped before."""

from __future__ import annotations

import pytest

from pytest_gpumem.measuring.models.task import INFERENCE, TRAINING
from pytest_gpumem.measuring.step_config.config import StepConfig
from pytest_gpumem.tools.advise.search_order import (
    OUT_OF_MEMORY,
    START,
    Search,
    Trial,
    every_config,
    next_config,
    recommended,
)


def climb(answers, samples=8, limit=None) -> list[str]:
    """The configs that are tried when ``answers(config)`` is what each takes: bytes, or why it gives no figures."""
    tried: list[Trial] = []
    while (config := next_config(tried, samples)) is not None:
        answer = answers(config)
        tried.append(Trial(config, why_not=answer) if isinstance(answer, str) else Trial(config, answer, 1.0))
        if limit is not None and tried[-1].fits(limit):
            break
    return [str(one.config) for one in tried]


def always_helps(config: StepConfig) -> int:
    """Bytes of a model that everything makes smaller."""
    size = 1000
    size -= 300 if config.precision != "fp32" else 0
    size -= {"none": 0, "ops": 100, "blocks": 200, "offload": 250}[config.checkpoint]
    size -= config.accumulate * 10
    return size - (50 if config.optimizer == "adamw-8bit" else 0)


def test_precision_is_tried_before_checkpointing_accumulation_optimizer_and_offload():
    assert climb(always_helps) == [
        "fp32",
        "amp-bf16",
        "amp-bf16,checkpoint=ops",
        "amp-bf16,checkpoint=blocks",
        "amp-bf16,checkpoint=blocks,accumulate=2",
        "amp-bf16,checkpoint=blocks,accumulate=4",
        "amp-bf16,checkpoint=blocks,accumulate=8",
        "bf16,checkpoint=blocks,accumulate=8",
        "amp-bf16,checkpoint=blocks,optimizer=adamw-8bit,accumulate=8",
        "amp-bf16,checkpoint=offload,optimizer=adamw-8bit,accumulate=8",
    ]


def test_float16_is_tried_where_bfloat16_cannot_be_run():
    def no_bfloat16(config):
        return "needs a newer GPU" if config.precision == "amp-bf16" else always_helps(config)

    assert climb(no_bfloat16)[:4] == ["fp32", "amp-bf16", "amp-fp16", "amp-fp16,checkpoint=ops"]


def test_what_is_slow_on_a_card_is_measured_and_neither_carried_on_nor_enough():
    def slow(config):
        return "emulated" if "bf16" in config.precision else ""

    tried = []
    while (config := next_config(tried, 8)) is not None and len(tried) < 4:
        tried.append(Trial(config, always_helps(config), slow=slow(config)))
    assert [str(one.config) for one in tried] == ["fp32", "amp-bf16", "amp-fp16", "amp-fp16,checkpoint=ops"]
    search = Search(800, (), everything=False, blocks=None, task=INFERENCE)
    inference: list[Trial] = []
    for config in search.over(inference, 800, None):
        inference.append(Trial(config, always_helps(config), slow=slow(config)))
    assert [str(one.config) for one in inference] == ["fp32", "bf16", "bf16,weights=int8"]


def search_of(task=TRAINING, configs=(), *, everything=False) -> Search:
    return Search(800, configs, everything=everything, blocks=None, task=task)


@pytest.mark.parametrize(("task", "left_out"), [(TRAINING, "amp-bf16 and bf16"), (INFERENCE, "bf16")])
def test_a_search_that_ends_with_fp32_names_the_faster_precisions(task, left_out):
    note = search_of(task).note_on_faster([Trial(START, 700)], 800)
    assert note is not None
    assert note.startswith("the search ended with fp32, the first config that fits, and measured no times: ")
    assert f": {left_out}, which GPUs with tensor cores compute faster, " in note
    lower = StepConfig(precision="amp-bf16")
    then = search_of().note_on_faster(
        [Trial(START, 900), Trial(lower, 850), Trial(StepConfig.parse("fp32,accumulate=2"), 1)], 800
    )
    assert then is not None
    assert ": bf16, which GPUs with tensor cores compute faster, was not tried. " in then


@pytest.mark.parametrize(
    ("search", "tried", "limit"),
    [
        (search_of(configs=(START,)), [Trial(START, 700)], 800),
        (search_of(everything=True), [Trial(START, 700)], 800),
        (search_of(), [Trial(START, 700, 1.0)], 800),
        (search_of(), [Trial(START, 900)], 800),
        (search_of(), [Trial(START, 900), Trial(StepConfig(precision="amp-bf16"), 700)], 800),
        (search_of(), [Trial(START, 700)], None),
        (search_of(), [], 800),
    ],
    ids=["named", "all", "timed", "does not fit", "faster fits", "no limit", "nothing tried"],
)
def test_no_note_on_faster_precisions_without_an_early_end(search, tried, limit):
    assert search.note_on_faster(tried, limit) is None


def test_what_is_slow_is_recommended_only_where_nothing_else_fits():
    plain, emulated, half = (StepConfig(precision=word) for word in ("fp32", "amp-bf16", "amp-fp16"))
    tried = [Trial(plain, 1000), Trial(emulated, 600, slow="emulated"), Trial(half, 700)]
    assert [recommended(tried, limit) for limit in (800, 650, 500, None)] == [tried[2], tried[1], None, tried[2]]


def test_what_did_not_help_is_not_carried_on():
    def checkpointing_is_useless(config):
        return 900 if config.checkpoint != "none" else always_helps(config)

    assert all("checkpoint" not in text for text in climb(checkpointing_is_useless)[4:-1])


def test_what_cannot_be_run_is_not_carried_on():
    def no_blocks(config):
        return "no repeated blocks" if config.checkpoint in ("ops", "blocks") else always_helps(config)

    assert climb(no_blocks)[4] == "amp-bf16,accumulate=2"


def test_out_of_memory_is_no_reason_to_give_up_what_saves_memory():
    def needs_everything(config):
        return 100 if config.accumulate == 4 and config.checkpoint == "blocks" else OUT_OF_MEMORY

    assert climb(needs_everything, limit=100) == [
        "fp32",
        "amp-bf16",
        "amp-bf16,checkpoint=ops",
        "amp-bf16,checkpoint=blocks",
        "amp-bf16,checkpoint=blocks,accumulate=2",
        "amp-bf16,checkpoint=blocks,accumulate=4",
    ]


@pytest.mark.parametrize(("samples", "shares"), [(1, []), (6, [2]), (12, [2, 4]), (None, []), (32, [2, 4, 8, 16])])
def test_only_batches_that_can_be_shared_out_are_accumulated(samples, shares):
    tried = climb(always_helps, samples)
    seen = sorted({StepConfig.parse(text).accumulate for text in tried} - {1})
    assert seen == shares


def test_every_config_has_all_combinations_and_begins_with_the_plain_one():
    configs = every_config(8)
    assert configs[0] == START
    assert len(configs) == len(set(configs)) == 4 * 4 * 3 * 2
    assert len(every_config(3)) == 4 * 4 * 1 * 2


def test_named_blocks_are_said_where_checkpointing_acts_on_them_and_nowhere_else():
    tried: list[Trial] = []
    while (config := next_config(tried, 2, "layers")) is not None:
        tried.append(Trial(config, always_helps(config), 1.0))
    climbed = [one.config for one in tried]
    assert {config.checkpoint for config in climbed} == {"none", "ops", "blocks", "offload"}
    for config in [*climbed, *every_config(2, "layers")]:
        assert config.blocks == ("layers" if config.checkpoint in ("ops", "blocks") else None)
    assert len(set(every_config(2, "layers"))) == len(every_config(2))


FAST = Trial(StepConfig(precision="amp-bf16"), 80, 1.0)
SMALL = Trial(StepConfig(precision="amp-bf16", checkpoint="blocks"), 50, 2.0)
PLAIN = Trial(START, 100, 1.5)
FAILED = Trial(StepConfig(precision="bf16"), why_not=OUT_OF_MEMORY)


def test_the_fastest_of_those_that_fit_is_recommended():
    tried = [PLAIN, SMALL, FAILED, FAST]
    assert recommended(tried, 90) is FAST
    assert recommended(tried, 60) is SMALL
    assert recommended(tried, 10) is None


def test_without_a_limit_the_best_saving_for_its_cost_is_recommended():
    assert recommended([PLAIN, SMALL, FAST], None) is FAST
    slow = Trial(FAST.config, 80, 3.0)
    assert recommended([PLAIN, SMALL, slow], None) is SMALL


def test_nothing_is_recommended_where_nothing_was_measured():
    assert recommended([FAILED], None) is None
    assert recommended([], 100) is None
