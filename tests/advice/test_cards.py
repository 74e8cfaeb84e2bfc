"""Cards with less memory than they have, and never more."""

from __future__ import annotations

import pytest

from pytest_gpumem.advice.cards import capacity_of, with_capacity
from pytest_gpumem.advice.search_order import Tried
from pytest_gpumem.advice.trial import TrialFailed
from pytest_gpumem.cli.advise import _try_all
from pytest_gpumem.emulation.gpus import emulated_gpu
from pytest_gpumem.step_config.config import StepConfig

GB = 10**9
FP32, BF16 = map(StepConfig.parse, ("fp32", "bf16"))


def test_a_card_has_as_much_memory_as_is_asked_for_but_no_more_than_its_own():
    card = emulated_gpu("emulated:l4")
    assert capacity_of(with_capacity(card, 10 * GB)) == 10 * GB
    assert with_capacity(card, 100 * GB) == card


def test_an_error_of_the_models_own_ends_nothing_where_there_are_results():
    def fails(config):
        if config == FP32:
            raise TrialFailed("planted")
        return Tried(config, GB)

    tried = []
    assert _try_all(tried, iter((BF16, FP32)), fails)
    assert [(one.config, one.why_not) for one in tried] == [(BF16, ""), (FP32, "planted")]
    later = []
    assert _try_all(later, iter((FP32, BF16)), fails, goes_on=True)
    assert [one.why_not for one in later] == ["planted", ""]
    with pytest.raises(TrialFailed, match=r"^planted$"):
        _try_all([], iter((FP32,)), fails)
