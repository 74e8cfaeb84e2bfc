"""A model that is built without memory for its parameters, which it gets once each rank has its shard."""

from __future__ import annotations

import weakref
from contextlib import contextmanager, suppress
from typing import TYPE_CHECKING

from pytest_gpumem.step_config.errors import ConfigError
from pytest_gpumem.steps.model_step import build_model, built_on, given_model
from pytest_gpumem.steps.precision import in_precision
from pytest_gpumem.steps.surroundings import is_uninitialised
from pytest_gpumem.torch_support.garbage_collector import everything_in_sight
from pytest_gpumem.torch_support.private_api import replaced
from pytest_gpumem.torch_support.reachability import alive
from pytest_gpumem.torch_support.static_access import is_a

if TYPE_CHECKING:
    from collections.abc import Collection, Iterator

    import torch

    from pytest_gpumem.step_config.config import StepConfig
    from pytest_gpumem.steps.model_step import ModelOrFactory


@contextmanager
def parameters_on_meta() -> Iterator[None]:
    """Have modules that are made within the context keep no memory for parameters; buffers are real.

    So a model that is larger than the device can be built, of which each rank holds a shard.
    """
    import torch

    register = torch.nn.Module.register_parameter
    made: dict[int, tuple[weakref.ref[torch.nn.Parameter], torch.nn.Parameter]] = {}

    def on_meta(module: torch.nn.Module, name: str, parameter: torch.nn.Parameter | None) -> None:
        if parameter is not None and type(parameter) is torch.nn.Parameter and not parameter.is_meta:
            reference, known = made.get(id(parameter), (None, None))
            if known is None or reference is None or reference() is not parameter:
                known = torch.nn.Parameter(parameter.to("meta"), requires_grad=parameter.requires_grad)
                # One that has two names stays one.
                made[id(parameter)] = weakref.ref(parameter), known
            parameter = known
        register(module, name, parameter)

    with replaced(torch.nn.Module, "register_parameter", on_meta):
        yield


def built(factory: ModelOrFactory, config: StepConfig, device: torch.device) -> torch.nn.Module:
    """Return the model in its precision, given or built on the device; what is to be sharded is built on meta if it can be.

    Raises:
        ConfigError: A model was given, or returned that existed before, and would stay sharded.
    """
    import torch

    given = given_model(factory) is not None
    changed = config.sharding is not None and config.sharding.in_place
    if changed and given:
        raise ConfigError(
            f"shard={config.shard} changes the model for good; pass a function that builds it, not the model"
        )
    if not changed:
        return in_precision(build_model(factory, device), config.precision, given)
    with everything_in_sight():
        # Kept until the model is there: no id is used again.
        before = alive(torch.nn.Module)
    model = _built_on_meta(factory, device) or build_model(factory, device)
    _refuse_existing(model, {id(one) for one in before}, config)
    return in_precision(model, config.precision, given)


def _refuse_existing(model: torch.nn.Module, existing: Collection[int], config: StepConfig) -> None:
    """Raise `ConfigError` where a part of the model that has parameters is one of the modules ``existing`` before."""
    for path, part in model.named_modules():
        if id(part) in existing and next(part.parameters(), None) is not None:
            which = f"whose {path} existed before" if path else "that existed before"
            raise ConfigError(
                f"shard={config.shard} changes the model for good, and the function that builds it returned one {which}; have "
                "it build all of it, or return copy.deepcopy(model)"
            )


def _built_on_meta(factory: ModelOrFactory, device: torch.device) -> torch.nn.Module | None:
    """Return the model with its parameters on meta; ``None`` if it has to be built for real.

    Its parameters are made when it is called, then, or what builds it reads them.
    """
    import torch

    if not callable(factory):
        return None
    # What is wrong with it shows when it is built for real.
    with suppress(Exception), parameters_on_meta():
        model = built_on(device, factory)
        if is_a(model, torch.nn.Module) and not any(map(is_uninitialised, model.parameters())):
            # A buffer that is computed from parameters has no values without them.
            return None if any(buffer.is_meta for buffer in model.buffers()) else _with_buffers_on(device, model)
    return None


def _with_buffers_on(device: torch.device, model: torch.nn.Module) -> torch.nn.Module:
    """Move the model's buffers, since ``model.to`` refuses parameters on meta; one that has two names stays one."""
    moved = {id(buffer): buffer if buffer.device == device else buffer.to(device) for buffer in model.buffers()}
    for owner in model.modules():
        for name, buffer in owner.named_buffers(recurse=False, remove_duplicate=False):
            setattr(owner, name, moved[id(buffer)])
    return model


def materialise(model: torch.nn.Module, device: torch.device, *, parameters_on_host: bool) -> None:
    """Give memory to parameters on meta, and values as large as those of a new model."""
    import torch

    missing = [parameter for parameter in model.parameters() if parameter.is_meta]
    if not missing and not parameters_on_host:
        return
    buffers = [
        (owner, name, buffer) for owner in model.modules() for name, buffer in owner.named_buffers(recurse=False)
    ]
    where = torch.device("cpu") if parameters_on_host else device
    if missing:
        model.to_empty(device=where)
    else:
        model.to(where)
    for owner, name, buffer in buffers:
        setattr(owner, name, buffer)
    with torch.no_grad():
        for name, parameter in model.named_parameters() if missing else ():
            values = getattr(parameter, "to_local", lambda whole=parameter: whole)()
            if not (values.is_floating_point() or values.is_complex()):
                values.zero_()
            elif values.dim() > 1:
                torch.nn.init.normal_(values, std=_STD)
            else:
                values.fill_(1.0 if name.endswith("weight") else 0.0)


_STD = 0.02
"""Standard deviation of the weights that GPT-2 and most later language models begin with (Radford et al. 2019)."""
