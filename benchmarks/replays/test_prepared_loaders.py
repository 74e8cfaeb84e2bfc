"""Trainers that end in the middle of an epoch and are dropped, each with a DataLoader that accelerate has prepared."""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch

if TYPE_CHECKING:
    from pytest_gpumem import Gpumem


def train(device: torch.device) -> None:
    from accelerate import Accelerator

    data = torch.ones(64, 4096, device=device)
    loader = Accelerator(cpu=device.type == "cpu").prepare(torch.utils.data.DataLoader(data, batch_size=16))
    next(iter(loader)).sum()


def test_train(gpumem: Gpumem) -> None:
    gpumem.measure(lambda: train(gpumem.device))


def test_trainers_that_are_dropped_keep_nothing(gpumem: Gpumem) -> None:
    gpumem.assert_no_growth(lambda: train(gpumem.device))
