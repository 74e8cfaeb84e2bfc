"""The GPT's training step as it is trained: a matrix of step configs, and what checkpointing has to keep to."""

from __future__ import annotations

import pytest
from tiny_models import GPT
from tiny_models.data import token_batch
from tiny_models.gpt import next_token_loss


def batch():
    """4 sequences of 256 bytes, made where a step is measured."""
    return token_batch(4, 256)


# A test for each combination, with a baseline of its own. At the end of the run they are shown as a table.


@pytest.mark.gpumem_configs(precision=["fp32", "amp-bf16"], checkpoint=["none", "ops", "blocks"])
def test_matrix(gpumem, gpumem_config):
    gpumem.train_step(GPT, batch, config=gpumem_config, loss=next_token_loss, items="tokens")


# Relations hold on every machine. Nothing is asserted of time, which depends on what else a machine does.


def test_checkpointing_saves_memory(gpumem):
    plain = gpumem.train_step(GPT, batch, config="amp-bf16", loss=next_token_loss, name="plain")
    recomputing = gpumem.train_step(
        GPT, batch, config="amp-bf16,checkpoint=blocks", loss=next_token_loss, name="recomputing"
    )
    assert recomputing.saves(plain) > 0.35


def test_checkpointing_gives_the_same_gradients(gpumem):
    gpumem.assert_same_gradients(GPT, batch, "fp32", "fp32,checkpoint=blocks", loss=next_token_loss)


def test_training_keeps_nothing(gpumem):
    model, tokens = GPT().to(gpumem.device), batch().to(gpumem.device)

    def step():
        next_token_loss(model(tokens), tokens).backward()
        model.zero_grad(set_to_none=True)

    gpumem.assert_no_growth(step, steps=10)
