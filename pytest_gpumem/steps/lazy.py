"""Lazy modules (`torch.nn.LazyLinear`), whose parameters have no shape before the model's first forward pass."""

from __future__ import annotations

from contextlib import nullcontext
from typing import TYPE_CHECKING, Any

from pytest_gpumem.steps.batches import feed, micro_batches
from pytest_gpumem.steps.precision import autocasting
from pytest_gpumem.steps.surroundings import surroundings
from pytest_gpumem.torch_support.static_access import is_a

if TYPE_CHECKING:
    import torch

    from pytest_gpumem.devices.contract import Device
    from pytest_gpumem.steps.config import StepConfig


def initialise(model: torch.nn.Module, batch: Any, config: StepConfig, device: Device, *, training: bool) -> None:
    """Run a model that has uninitialised parameters or buffers forward once, as its step does; nothing for other models.

    Before an optimizer is made, the weights are quantised or the model is compiled, as torch's documentation asks for. In the
    first step of inference they would become inference tensors, which cannot be trained any more.
    """
    import torch

    if not any(is_uninitialised(tensor) for tensor in (*model.parameters(), *model.buffers())):
        return
    with (
        surroundings(model, config, device, training=training),
        nullcontext() if training else torch.no_grad(),
        autocasting(config.precision, device.torch_device),
    ):
        feed(model, micro_batches(batch, config.accumulate)[0])


def is_uninitialised(tensor: torch.Tensor) -> bool:
    """Whether it is a parameter or buffer of a lazy module that has not been called."""
    import torch

    return is_a(tensor, torch.nn.UninitializedParameter, torch.nn.UninitializedBuffer)
