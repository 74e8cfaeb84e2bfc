"""What is around a step: the model's mode, matrix precision, key/value cache and autocast."""

from __future__ import annotations

from contextlib import contextmanager
from typing import TYPE_CHECKING

from pytest_gpumem.steps.inference import caching
from pytest_gpumem.steps.model_step import in_mode
from pytest_gpumem.steps.precision import float32_precision
from pytest_gpumem.torch_support.private_api import outside_autocast

if TYPE_CHECKING:
    from collections.abc import Iterator

    import torch

    from pytest_gpumem.devices.contract import Device
    from pytest_gpumem.steps.config import StepConfig


@contextmanager
def surroundings(model: torch.nn.Module, config: StepConfig, device: Device, *, training: bool) -> Iterator[None]:
    """Mode, matrix precision, key/value cache and autocast as the config wants them, whatever is outside."""
    # With cache=on the calls say so themselves.
    cache = False if training or config.cache == "off" else None
    with (
        in_mode(model, training=training),
        float32_precision(config.precision, device),
        caching(model, cache, required=config.cache == "off"),
        outside_autocast(device.torch_device.type),
    ):
        yield
