"""Cards with less memory than they have, and never more."""

from __future__ import annotations

import pytest

from pytest_gpumem.base.errors import TrialFailed
from pytest_gpumem.emulating.emulation.gpus import emulated_gpu
from pytest_gpumem.measuring.models.task import TRAINING
from pytest_gpumem.measuring.step_config.config import StepConfig
from pytest_gpumem.tools.advise.cards import capacity_of, with_capacity
from pytest_gpumem.tools.advise.search_order import Search, Trial
from pytest_gpumem.tools.advise.trial import AdviceSubject
from pytest_gpumem.tools.advise.trials import Trials

GB = 10**9
FP32, BF16 = map(StepConfig.parse, ("fp32", "bf16"))


def test_a_card_has_as_much_memory_as_is_asked_for_but_no_more_than_its_own():
    card = emulated_gpu("emulated:l4")
    assert capacity_of(with_capacity(card, 10 * GB)) == 10 * GB
    assert with_capacity(card, 100 * GB) == card


def test_an_error_of_the_models_own_ends_nothing_where_there_are_results():
    def fails(_, config):
        if config == FP32:
            raise TrialFailed("planted")
        return Trial(config, GB), None

    def tried(*configs, goes_on=False):
        subject = AdviceSubject(lambda _: None, {}, None, ())
        search = Search(None, configs, everything=False, blocks=None, task=TRAINING)
        found = Trials(GB, subject, search, fails, lambda _: None, goes_on=goes_on).run("card")
        return [(one.config, one.why_not) for one in found.tried]

    assert tried(BF16, FP32) == [(BF16, ""), (FP32, "planted")]
    assert tried(FP32, BF16, goes_on=True) == [(FP32, "planted"), (BF16, "")]
    with pytest.raises(TrialFailed, match=r"^planted$"):
        tried(FP32)


def test_a_peak_decided_by_an_uncomputed_value_is_noted_beside_other_gaps():
    doubts = {FP32: "an uncomputed value decided a branch at model.py:3", BF16: ""}

    def doubted(_, config):
        return Trial(config, GB, doubt=doubts[config]), "no cuDNN is installed"

    subject = AdviceSubject(lambda _: None, {}, None, ())
    search = Search(None, (BF16, FP32), everything=False, blocks=None, task=TRAINING)
    found = Trials(GB, subject, search, doubted, lambda _: None).run("card")
    assert found.lacking == f"no cuDNN is installed; {doubts[FP32]}"
