"""Global settings that a step runs under, whatever is set outside: mode, matrix precision, key/value cache and autocast."""

from __future__ import annotations

from contextlib import contextmanager, nullcontext
from typing import TYPE_CHECKING, Any

from pytest_gpumem.devices.contract import CannotRun
from pytest_gpumem.step_config.errors import ConfigError
from pytest_gpumem.steps.batches import feed, micro_batches
from pytest_gpumem.steps.precision import autocasting, float32_precision
from pytest_gpumem.torch_support.private_api import outside_autocast
from pytest_gpumem.torch_support.static_access import attribute, is_a, named_modules

if TYPE_CHECKING:
    from collections.abc import Iterator

    import torch

    from pytest_gpumem.devices.contract import Device
    from pytest_gpumem.step_config.config import StepConfig


@contextmanager
def surroundings(model: torch.nn.Module, config: StepConfig, device: Device, *, training: bool) -> Iterator[None]:
    """Set mode, matrix precision, key/value cache, autocast and routing as in the config, whatever is set outside."""
    # With cache=on the calls say so themselves.
    cache = False if training or config.cache == "off" else None
    with (
        in_mode(model, training=training),
        float32_precision(config.precision, device),
        caching(model, cache, required=config.cache == "off"),
        outside_autocast(device.torch_device.type),
        device.routed(config.routing),
    ):
        yield


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
    """Return whether a tensor is a parameter or buffer of a lazy module that has not been called."""
    import torch

    return is_a(tensor, torch.nn.UninitializedParameter, torch.nn.UninitializedBuffer)


def can_run(device: Device, config: StepConfig) -> tuple[str, ...]:
    """Return notes on what the device runs in another way; raise `CannotRun` if it cannot run a step under this config."""
    more = ["offload"] if config.offloaded else []
    if config.sharding is not None:
        more += ["cp"] if config.sharding.degree("cp") > 1 else []
        more += ["fully_shard"] if config.sharding.fully else []
    for feature in (config.precision, config.checkpointing.kind.name, config.compile, *more):
        why_not = None if feature is None else device.lacks(feature)
        if why_not is not None:
            raise CannotRun(why_not)
    emulated = None if config.precision is None else device.emulates(config.precision)
    return () if emulated is None else (emulated,)


@contextmanager
def in_mode(model: torch.nn.Module, training: bool) -> Iterator[None]:
    """Put the model into training or evaluation mode; each module goes back to its own afterwards."""
    modes = [(module, module.training) for module in model.modules()]
    model.train(training)
    try:
        yield
    finally:
        for module, mode in modes:
            module.training = mode


@contextmanager
def caching(model: torch.nn.Module, cache: bool | None, *, required: bool) -> Iterator[None]:
    """Set whether the model keeps keys and values by default (``config.use_cache``); ``None`` leaves it.

    Raises `ConfigError` for a model without such a switch, if it is ``required``.
    Training has no use for them, and trainers switch them off; recomputed blocks would even add theirs twice.
    """
    # As they are kept: what has a config may be anybody's module, and what it calls its config anything.
    found = (attribute(module, "config") for _, module in named_modules(model))
    configs = {id(config): config for config in found if is_a(attribute(config, "use_cache"), bool)}
    if cache is None:
        yield
        return
    if required and not configs:
        raise ConfigError(
            f"{type(model).__name__} has no config.use_cache, by which a key/value cache is switched on and off"
        )
    before = [(config, attribute(config, "use_cache")) for config in configs.values()]
    for config, _ in before:
        object.__setattr__(config, "use_cache", cache)
    try:
        yield
    finally:
        for config, value in before:
            object.__setattr__(config, "use_cache", value)
