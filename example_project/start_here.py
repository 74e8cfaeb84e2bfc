"""The snippets of the start in one file: the tests of the README and of docs/guide/start.md, and a training script.

In this folder:

    pytest start_here.py --gpumem-update=new        # record baselines
    pytest start_here.py --gpumem-baseline          # compare with them
    gpumem run start_here.py --gpumem-update=new    # the same for the script
    gpumem run start_here.py --gpumem-baseline

Then replace 2048 by 4096 twice, and compare again: two tests fail. pytest collects this file only if the command names it.
"""

import pytest
import torch

DEVICE = "cuda" if torch.cuda.is_available() else "cpu"  # also "cuda" on an emulated GPU


# README.md: mark a test, or measure a training step


@pytest.fixture(scope="module")
def model():
    return torch.nn.Sequential(torch.nn.Linear(512, 2048), torch.nn.GELU(), torch.nn.Linear(2048, 512)).to(DEVICE)


@pytest.mark.gpumem(max_memory="60 MB")  # the call is measured; the budget is optional
def test_forward(model):
    model(torch.ones(256, 512, device=DEVICE))


def test_train_step(gpumem, model):  # warmed up, then forward + backward + optimizer
    gpumem.train_step(model, torch.ones(256, 512), loss=lambda output, _: output.square().mean())


# docs/guide/start.md: more about the marker


@pytest.fixture(scope="session")
def layer():
    return torch.nn.Linear(1024, 1024, device=DEVICE)


@pytest.mark.gpumem  # measured, and compared with its baseline
def test_layer(layer):
    assert layer(torch.ones(8, 1024, device=DEVICE)).shape == (8, 1024)


@pytest.mark.gpumem(max_memory="60 MB", max_retained="1 kB")
class TestInference:
    """Held to budgets, with or without a baseline."""

    def test_one(self, layer):
        with torch.inference_mode():
            layer(torch.ones(1, 1024, device=DEVICE))

    # The closest marker wins; max_retained still holds.
    @pytest.mark.gpumem(max_memory="80 MB")
    def test_many(self, layer):
        with torch.inference_mode():
            layer(torch.ones(1024, 1024, device=DEVICE))


# A training script, for gpumem run


def train(steps=100):
    network = torch.nn.Sequential(torch.nn.Linear(512, 1024), torch.nn.GELU(), torch.nn.Linear(1024, 512)).to(DEVICE)
    optimizer = torch.optim.AdamW(network.parameters())
    for _ in range(steps):
        network(torch.ones(64, 512, device=DEVICE)).square().mean().backward()
        optimizer.step()
        optimizer.zero_grad()


if __name__ == "__main__":
    train()
