"""Trainers that are made and dropped, each with a DataLoader that accelerate has prepared."""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch

if TYPE_CHECKING:
    from pytest_gpumem import Gpumem


def test_trainers_that_are_dropped_keep_nothing(gpumem: Gpumem) -> None:
    from accelerate import Accelerator

    def train() -> None:
        data = torch.ones(64, 4096, device=gpumem.device)
        loader = Accelerator(cpu=gpumem.device.type == "cpu").prepare(torch.utils.data.DataLoader(data, batch_size=16))
        for batch in loader:
            batch.sum()

    gpumem.measure(train)
    gpumem.assert_no_growth(train)
