"""Build models with parameters on torch's meta device, without memory. Later, each rank allocates memory only for its shard."""

from __future__ import annotations

import weakref
from contextlib import contextmanager, suppress
from typing import TYPE_CHECKING

from pytest_gpumem.base.errors import ConfigError
from pytest_gpumem.measuring.steps.global_settings import is_uninitialised
from pytest_gpumem.measuring.steps.model_source import ModelFactory, built_on
from pytest_gpumem.measuring.steps.precision import in_precision
from pytest_gpumem.torch_support.garbage_collector import everything_in_sight
from pytest_gpumem.torch_support.private_api.attributes import replaced
from pytest_gpumem.torch_support.reachability import alive
from pytest_gpumem.torch_support.static_access import is_a

if TYPE_CHECKING:
    from collections.abc import Callable, Collection, Iterator

    import torch

    from pytest_gpumem.measuring.step_config.config import StepConfig
    from pytest_gpumem.measuring.steps.model_source import ModelSource


@contextmanager
def parameters_on_meta() -> Iterator[None]:
    """Create parameters within the context on the meta device, without memory. Buffers get memory.

    So a function can build a model that is larger than the device's memory, and each rank then allocates only its shard.
    """
    import torch

    register = torch.nn.Module.register_parameter
    meta_by_id: dict[int, tuple[weakref.ref[torch.nn.Parameter], torch.nn.Parameter]] = {}

    def on_meta(module: torch.nn.Module, name: str, parameter: torch.nn.Parameter | None) -> None:
        if parameter is not None and type(parameter) is torch.nn.Parameter and not parameter.is_meta:
            reference, on_meta_device = meta_by_id.get(id(parameter), (None, None))
            if on_meta_device is None or reference is None or reference() is not parameter:
                on_meta_device = torch.nn.Parameter(parameter.to("meta"), requires_grad=parameter.requires_grad)
                # Remember the new parameter, so a parameter with two names stays a single parameter.
                meta_by_id[id(parameter)] = weakref.ref(parameter), on_meta_device
            parameter = on_meta_device
        register(module, name, parameter)

    with replaced(torch.nn.Module, "register_parameter", on_meta):
        yield


def build_in_precision(source: ModelSource, config: StepConfig, device: torch.device) -> torch.nn.Module:
    """Return the model in the config's precision: the model passed by the test, or a new model on the device.

    If sharding replaces the model's parameters, they are created on the meta device, unless building needs their values.

    Args:
        source: The model's source.
        config: The step config.
        device: The step's device.

    Raises:
        ConfigError: Sharding would permanently change an existing model, which the factory returned.
    """
    import torch

    if config.sharding is None or not config.sharding.in_place:
        return source.model_on(device, config.precision)
    assert isinstance(source, ModelFactory), "an existing model is refused before"
    with everything_in_sight():
        # The existing modules are kept alive until the model is built, so Python does not reuse their ids.
        modules_before = alive(torch.nn.Module)
    model = _built_on_meta(source.factory, device) or source.build(device)
    _refuse_existing(model, {id(module) for module in modules_before}, config)
    return in_precision(model, config.precision)


def _refuse_existing(model: torch.nn.Module, existing: Collection[int], config: StepConfig) -> None:
    """Raise `ConfigError` if the model contains a module with parameters that existed before the function was called.

    ``existing`` contains the ids of all earlier modules.
    """
    for path, part in model.named_modules():
        if id(part) in existing and next(part.parameters(), None) is not None:
            origin = f"a model whose {path} existed before" if path else "a model that existed before"
            raise ConfigError(
                f"shard={config.shard} changes the model for good, but the function returned {origin}; build all modules in "
                "the function, or return copy.deepcopy(model)"
            )


def _built_on_meta(factory: Callable[[], torch.nn.Module], device: torch.device) -> torch.nn.Module | None:
    """Return the model with its parameters on meta, or ``None`` if the model cannot be built with parameters on meta.

    This is the case for a model that creates parameters only in its first call, or reads parameters while it is built.
    """
    import torch

    # Ignore errors here. If the factory also fails without the meta device, the caller raises the second error.
    with suppress(Exception), parameters_on_meta():
        model = built_on(device, factory)
        if is_a(model, torch.nn.Module) and not any(map(is_uninitialised, model.parameters())):
            # A buffer on meta was computed from parameters, so it would have no values.
            return None if any(buffer.is_meta for buffer in model.buffers()) else _with_buffers_on(device, model)
    return None


def _with_buffers_on(device: torch.device, model: torch.nn.Module) -> torch.nn.Module:
    """Move the model's buffers to a device, because ``model.to`` refuses parameters on meta. Shared buffers stay shared."""
    moved = {id(buffer): buffer if buffer.device == device else buffer.to(device) for buffer in model.buffers()}
    for owner in model.modules():
        for name, buffer in owner.named_buffers(recurse=False, remove_duplicate=False):
            setattr(owner, name, moved[id(buffer)])
    return model


def materialise(model: torch.nn.Module, device: torch.device, *, parameters_on_host: bool) -> None:
    """Allocate memory for parameters on meta, and fill them with random values as in a newly created model.

    Args:
        model: The model. It is changed.
        device: The device for the parameters.
        parameters_on_host: True to place the parameters in the host's memory.
    """
    import torch

    missing = [parameter for parameter in model.parameters() if parameter.is_meta]
    if not missing and not parameters_on_host:
        return
    buffers = [
        (owner, name, buffer) for owner in model.modules() for name, buffer in owner.named_buffers(recurse=False)
    ]
    target = torch.device("cpu") if parameters_on_host else device
    if missing:
        model.to_empty(device=target)
    else:
        model.to(target)
    for owner, name, buffer in buffers:
        setattr(owner, name, buffer)
    with torch.no_grad():
        for name, parameter in model.named_parameters() if missing else ():
            values = getattr(parameter, "to_local", lambda unsharded=parameter: unsharded)()
            if not (values.is_floating_point() or values.is_complex()):
                values.zero_()
            elif values.dim() > 1:
                torch.nn.init.normal_(values, std=_STD)
            else:
                values.fill_(1.0 if name.endswith("weight") else 0.0)


_STD = 0.02
"""The standard deviation of initial weights in GPT-2 and most later language models (Radford et al. 2019)."""
