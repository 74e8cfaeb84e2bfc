"""A training step of a linear layer, whose products run in two threads: the caller's and autograd's."""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch

if TYPE_CHECKING:
    from pytest_gpumem import Gpumem


def test_train_step(gpumem: Gpumem) -> None:
    model = torch.nn.Linear(1024, 1024, device=gpumem.device)
    gpumem.train_step(model, torch.ones(64, 1024, device=gpumem.device), loss=lambda output, _: output.square().mean())
