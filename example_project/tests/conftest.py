"""What the tests share: the device that this run measures, and models and batches on it."""

from __future__ import annotations

import pytest
import torch
from tiny_models import GPT
from tiny_models.data import token_batch


@pytest.fixture(scope="session")
def device(pytestconfig: pytest.Config) -> torch.device:
    """Where models and batches go: the device of ``--gpumem-device``, or what ``auto`` of pyproject.toml means here."""
    name = pytestconfig.getoption("--gpumem-device") or "auto"
    if name == "auto":
        name = "cuda" if torch.cuda.is_available() else "cpu"
    elif name.startswith("emulated:"):
        name = "cuda"
    return torch.device(name)


@pytest.fixture(scope="module")
def gpt(device: torch.device) -> GPT:
    """A GPT that the tests of a module share. Its bytes belong to every test that uses it."""
    return GPT().to(device)


@pytest.fixture(scope="module")
def tokens(device: torch.device) -> torch.Tensor:
    """A batch of 8 sequences of 256 bytes."""
    return token_batch(8, 256).to(device)
