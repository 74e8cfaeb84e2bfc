"""The memory of the GPT: a training step, inference, generation, and a short training that learns something."""

from __future__ import annotations

import os

import pytest
import torch
from tiny_models import GPT, GPTConfig
from tiny_models.data import token_batch
from tiny_models.gpt import next_token_loss

# Set where pytest runs with --gpumem-device=emulated:...
needs_values = pytest.mark.skipif(
    "GPUMEM_EMULATED" in os.environ, reason="asserts on values, which an emulated GPU does not compute"
)

# The ready-made step: forward, backward and optimizer of a model that exists, or of one that is built there.


def test_train_step(gpumem, gpt, tokens):
    gpumem.train_step(gpt, tokens, loss=next_token_loss, items=tokens.numel())


@pytest.mark.gpumem(max_memory="150 MB", tolerance="2 %")
@pytest.mark.parametrize("layers", [2, 6])
def test_train_step_by_depth(gpumem, layers):
    config = GPTConfig(layers=layers)
    gpumem.train_step(lambda: GPT(config), token_batch(4, 256), loss=next_token_loss)


# A relation between two measurements needs no baseline, and holds on every device.


def test_inference_needs_less_than_half_of_training(gpumem, gpt, tokens):
    training = gpumem.train_step(gpt, tokens, loss=next_token_loss, items=tokens.numel())
    inference = gpumem.infer_step(gpt, tokens, items=tokens.numel())
    assert inference.peak_allocated < training.peak_allocated / 2


# The marker: an existing test, measured as it is. One on a class is for all its tests; the closest one wins.


@pytest.mark.gpumem(max_memory="100 MB")
class TestGenerate:
    """Writing on from a prompt."""

    @needs_values
    def test_continues_the_prompt(self, gpt, tokens):
        generated = gpt.generate(tokens, 4)
        assert generated.shape == (8, 260)
        assert generated[:, :256].equal(tokens)

    @pytest.mark.gpumem(max_memory="40 MB")
    def test_takes_a_prompt_of_one_byte(self, gpt, tokens):
        assert gpt.generate(tokens[:1, :1], 8).shape == (1, 9)


@needs_values
@pytest.mark.gpumem(max_gb=0.1)
def test_training_learns_the_bytes_of_python_sources(device):
    torch.manual_seed(0)
    model = GPT(GPTConfig(layers=2)).to(device)
    optimizer = torch.optim.AdamW(model.parameters(), lr=3e-3)
    losses = []
    for step in range(12):
        batch = token_batch(8, 128, seed=step).to(device)
        loss = next_token_loss(model(batch), batch)
        loss.backward()
        optimizer.step()
        optimizer.zero_grad(set_to_none=True)
        losses.append(loss.item())
    assert losses[0] > 5.0, "before training, every byte is about as likely as any other: log(256) is 5.5"
    assert losses[-1] < 4.0
