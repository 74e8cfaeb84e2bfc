"""Settings that apply only while a step runs: the model's mode, matrix precision, key/value cache, autocast and routing."""

from __future__ import annotations

from contextlib import contextmanager, nullcontext
from typing import TYPE_CHECKING, Any

from pytest_gpumem.base.errors import CannotRun, ConfigError
from pytest_gpumem.measuring.steps.batches import call_model, micro_batches
from pytest_gpumem.measuring.steps.precision import autocasting, float32_precision
from pytest_gpumem.torch_support.private_api.numerics import outside_autocast
from pytest_gpumem.torch_support.static_access import attribute, is_a, named_modules

if TYPE_CHECKING:
    from collections.abc import Iterator

    import torch

    from pytest_gpumem.measuring.devices.contract import Device
    from pytest_gpumem.measuring.step_config.config import StepConfig


@contextmanager
def global_settings(model: torch.nn.Module, config: StepConfig, device: Device, *, training: bool) -> Iterator[None]:
    """Apply the config's settings within the context, and restore the previous settings at the end.

    The settings are training or evaluation mode, matrix precision, key/value cache and routing. A surrounding autocast is
    switched off.
    """
    # With cache=on, the model's config stays unchanged, because each call passes use_cache=True.
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
    """Run forward once if the model has uninitialised parameters or buffers (a lazy module such as ``LazyLinear``).

    torch's documentation requires this before an optimizer is created, weights are quantised or the model is compiled. Forward
    does not run under ``torch.inference_mode``, because parameters created in this mode can never be trained.

    Args:
        model: The model.
        batch: The step's batch.
        config: The step config.
        device: The step's device.
        training: True for a training step.
    """
    import torch

    if not is_lazy(model):
        return
    with (
        global_settings(model, config, device, training=training),
        nullcontext() if training else torch.no_grad(),
        autocasting(config.precision, device.torch_device),
    ):
        call_model(model, micro_batches(batch, config.accumulate)[0])


def is_lazy(model: torch.nn.Module) -> bool:
    """Return whether the model's first forward creates some of its parameters or buffers."""
    return any(is_uninitialised(tensor) for tensor in (*model.parameters(), *model.buffers()))


def is_uninitialised(tensor: torch.Tensor) -> bool:
    """Return whether a tensor is a parameter or buffer that gets its shape only in the first call of a lazy module."""
    import torch

    return is_a(tensor, torch.nn.UninitializedParameter, torch.nn.UninitializedBuffer)


def can_run(device: Device, config: StepConfig) -> tuple[str, ...]:
    """Check that the device can run a step under this config, and return notes on features emulated by the device.

    For example, a GPU may compute bfloat16 in float32, because it has no hardware for bfloat16.

    Raises:
        CannotRun: The device cannot run a step under this config.
    """
    features = ["offload"] if config.offloaded else []
    if config.sharding is not None:
        features += ["cp"] if config.sharding.degree("cp") > 1 else []
        features += ["fully_shard"] if config.sharding.fully else []
    for feature in (config.precision, config.checkpointing.kind.name, config.compile, *features):
        why_not = None if feature is None else device.lacks(feature)
        if why_not is not None:
            raise CannotRun(why_not)
    emulated = None if config.precision is None else device.emulates(config.precision)
    return () if emulated is None else (emulated,)


@contextmanager
def in_mode(model: torch.nn.Module, training: bool) -> Iterator[None]:
    """Set the model to training or evaluation mode, and restore each module's mode at the end."""
    modes = [(module, module.training) for module in model.modules()]
    model.train(training)
    try:
        yield
    finally:
        for module, mode in modes:
            module.training = mode


@contextmanager
def caching(model: torch.nn.Module, cache: bool | None, *, required: bool) -> Iterator[None]:
    """Set ``config.use_cache`` in the model within the context.

    Training does not need cached keys and values, so trainers switch the cache off. A block that backward recomputes would even
    add its keys and values twice.

    Args:
        model: The model.
        cache: The value for ``use_cache``, or ``None`` to leave it unchanged.
        required: True to raise an error if the model has no ``use_cache``.

    Raises:
        ConfigError: The model has no ``config.use_cache``, but ``required`` is true.
    """
    # Read the attributes without running code, because any module may have any object as its config.
    candidates = (attribute(module, "config") for _, module in named_modules(model))
    configs = {id(config): config for config in candidates if is_a(attribute(config, "use_cache"), bool)}
    if cache is None:
        yield
        return
    if required and not configs:
        raise ConfigError(
            f"cache=off needs a model with config.use_cache, which switches the key/value cache on and off; "
            f"{type(model).__name__} has no such setting"
        )
    values_before = [(config, attribute(config, "use_cache")) for config in configs.values()]
    for config, _ in values_before:
        object.__setattr__(config, "use_cache", cache)
    try:
        yield
    finally:
        for config, value in values_before:
            object.__setattr__(config, "use_cache", value)
