"""The optimizer for a step whose parameters or optimizer state are sharded or offloaded, and gradient clipping."""

from __future__ import annotations

from functools import partial
from typing import TYPE_CHECKING, Any, cast

from pytest_gpumem.base.errors import ConfigError
from pytest_gpumem.measuring.steps.model_step import import_quietly
from pytest_gpumem.torch_support.static_access import attribute, is_a

if TYPE_CHECKING:
    from collections.abc import Iterable

    import torch

    from pytest_gpumem.measuring.step_config.config import StepConfig
    from pytest_gpumem.measuring.steps.model_step import OptimizerOrFactory


def adapted_factory(maker: OptimizerOrFactory, config: StepConfig) -> OptimizerOrFactory:
    """Return a factory for the optimizer that applies the config's sharding and offloading.

    Args:
        maker: A function that creates the plain optimizer.
        config: The step config.

    Raises:
        ConfigError: ``maker`` is an existing optimizer, or a package is missing.
    """
    import torch

    sharding, on_host = config.sharding, "optimizer" in config.offloaded
    if is_a(maker, torch.optim.Optimizer):
        raise ConfigError(
            f"{config} creates an optimizer for sharded or offloaded parameters, so an existing optimizer cannot be used; pass "
            "a function: optimizer=lambda parameters: ..."
        )
    make: Any = maker
    if on_host:
        return partial(_host_optimizer(), optimizer_class=make)

    def make_sharded(parameters: Iterable[torch.nn.Parameter]) -> torch.optim.Optimizer:
        optimizer: torch.optim.Optimizer = make(parameters)
        if sharding is not None and sharding.data is not None and sharding.data.shards_optimizer:
            zero: Any = import_quietly("torch.distributed.optim").ZeroRedundancyOptimizer
            kind: Any = type(optimizer)
            # Pass only the parameter groups, because each group already contains the optimizer's arguments.
            return cast("torch.optim.Optimizer", zero(optimizer.param_groups, lambda groups, **_: kind(groups)))
        optimizer.param_groups[:] = [
            {**group, "params": on_one_mesh}
            for group in optimizer.param_groups
            for on_one_mesh in parameter_groups(group["params"])
        ]
        return optimizer

    return make_sharded


def _host_optimizer() -> Any:
    """Return torchao's wrapper, which keeps an optimizer's state and a copy of the parameters in the host's memory."""
    try:
        return import_quietly("torchao.optim").CPUOffloadOptimizer
    except ImportError:
        raise ConfigError(
            "offload=optimizer needs torchao (pip install 'pytest-gpumem[torchao]'), which is not installed"
        ) from None


def local_optimizer(optimizer: torch.optim.Optimizer) -> torch.optim.Optimizer:
    """Return the inner optimizer, which keeps its state on this device. A plain optimizer is returned unchanged.

    A ``ZeroRedundancyOptimizer`` contains an optimizer for this rank. torchao's ``CPUOffloadOptimizer`` contains an optimizer
    for small parameters.
    """
    import torch

    candidates = (attribute(optimizer, name) for name in ("optim", "d_opt"))
    return next((inner for inner in candidates if is_a(inner, torch.optim.Optimizer)), optimizer)


def clip_gradients(parameters: Iterable[torch.nn.Parameter], norm: float) -> None:
    """Clip gradients to a norm. Unlike torch's function, this function also accepts a mix of sharded and plain gradients."""
    import torch

    parameters = [parameter for parameter in parameters if parameter.grad is not None]
    groups = parameter_groups(parameters)
    if len(groups) < 2:
        torch.nn.utils.clip_grad_norm_(parameters, norm)
        return
    from torch.distributed.tensor import DTensor

    norms = []
    for group in groups:
        total = torch.nn.utils.get_total_norm([parameter.grad for parameter in group if parameter.grad is not None])
        norms.append(total.full_tensor() if is_a(total, DTensor) else total)
    coefficient = (norm / (torch.linalg.vector_norm(torch.stack(norms)) + 1e-6)).clamp(max=1.0)
    for group in groups:
        for parameter in group:
            gradient: Any = parameter.grad
            (gradient.to_local() if is_a(gradient, DTensor) else gradient).mul_(coefficient)


def parameter_groups(parameters: Iterable[torch.nn.Parameter]) -> list[list[torch.nn.Parameter]]:
    """Group the parameters by their device mesh, because an operator cannot take parameters from several meshes."""
    groups: dict[object, list[torch.nn.Parameter]] = {}
    for parameter in parameters:
        groups.setdefault(getattr(parameter, "device_mesh", None), []).append(parameter)
    return list(groups.values())
