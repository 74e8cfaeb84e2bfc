"""Forward and backward of a three-dimensional convolution in bfloat16."""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch

if TYPE_CHECKING:
    from pytest_gpumem import Gpumem


def test_train_step(gpumem: Gpumem) -> None:
    model = torch.nn.Conv3d(32, 32, 3, padding=1).to(gpumem.device, torch.bfloat16)
    batch = torch.ones(2, 32, 8, 64, 64, device=gpumem.device, dtype=torch.bfloat16)
    gpumem.train_step(model, batch, loss=lambda output, _: output.float().mean())
