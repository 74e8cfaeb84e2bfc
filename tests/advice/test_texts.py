"""Texts of advice: the table of configs and cards, and what is recommended."""

from __future__ import annotations

from pytest_gpumem.measuring.models.task import TRAINING
from pytest_gpumem.measuring.step_config.config import StepConfig
from pytest_gpumem.tools.advise.results import Advice, DeviceTrials
from pytest_gpumem.tools.advise.search_order import Trial, recommended
from pytest_gpumem.tools.advise.texts import card_table, conclusions

GB = 10**9
FP32, BF16, BLOCKS = map(StepConfig.parse, ("fp32", "bf16", "bf16,checkpoint=blocks"))


def card(name, gigabytes, *tried):
    limit = gigabytes * GB
    return DeviceTrials(name, limit, tried, recommended(tried, limit))


def on(*cards):
    return Advice("hf:model", TRAINING, True, cards)


LARGE = card("H100 80GB", 80, Trial(FP32, 120 * GB), Trial(BF16, 70 * GB))
SMALL = card("L4", 24, Trial(FP32, 120 * GB), Trial(BF16, 70 * GB), Trial(BLOCKS, 30 * GB))
OLD = card(
    "V100 16GB",
    16,
    Trial(FP32, why_not="torch has no kernels for it"),
    Trial(BF16, why_not="torch has no kernels for it"),
)


def test_a_row_is_a_config_and_a_column_a_card_the_recommended_one_first():
    assert card_table([LARGE, SMALL]) == [
        "config                  H100 80GB (80.00 GB)   L4 (24.00 GB)",
        "bf16                              70.00 GB *  lacks 46.00 GB",
        "fp32                          lacks 40.00 GB  lacks 96.00 GB",
        "bf16,checkpoint=blocks                         lacks 6.00 GB",
        "  reserved by PyTorch's allocator; * is recommended",
    ]
    assert conclusions(on(LARGE, SMALL)) == [
        "H100 80GB: bf16, 70.00 GB of 80.00 GB",
        "L4: no config fits; the smallest, bf16,checkpoint=blocks, lacks 6.00 GB of 24.00 GB",
    ]


def test_more_cards_than_configs_have_a_row_each():
    cards = [card(name, limit, Trial(BF16, 20 * GB)) for name, limit in (("A", 10), ("B", 30), ("C", 40))]
    assert card_table(cards)[:4] == [
        "card                    bf16",
        "A (10.00 GB)  lacks 10.00 GB",
        "B (30.00 GB)      20.00 GB *",
        "C (40.00 GB)      20.00 GB *",
    ]


def test_why_something_cannot_run_is_told_once_below():
    lines = card_table([LARGE, OLD])
    assert lines[1].split() == ["bf16", "70.00", "GB", "*", "cannot", "run"]
    assert lines[3:] == [
        "  reserved by PyTorch's allocator; * is recommended",
        "  V100 16GB: torch has no kernels for it",
    ]
    assert conclusions(on(OLD)) == ["V100 16GB: no config could be measured"]
    some = card("T4", 16, Trial(FP32, 10 * GB), Trial(BF16, why_not="it has no bfloat16"))
    assert card_table([some])[-1] == "  bf16 on T4: it has no bfloat16"


def test_what_is_slow_on_a_card_has_its_figure_and_its_reason_below():
    lines = card_table([card("T4", 16, Trial(FP32, 20 * GB), Trial(BF16, 10 * GB, slow="torch emulates bfloat16"))])
    assert lines[1].split() == ["bf16", "10.00", "GB", "*"]
    assert lines[-1] == "  bf16 on T4: torch emulates bfloat16"
