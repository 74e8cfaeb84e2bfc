"""The optimizer of a sharded step: what each rank keeps of its state, what lies in the host's memory, and clipping."""

from __future__ import annotations

from functools import partial
from typing import TYPE_CHECKING, Any, cast

from pytest_gpumem.step_config.errors import ConfigError
from pytest_gpumem.steps.model_step import import_quietly
from pytest_gpumem.torch_support.static_access import attribute, is_a

if TYPE_CHECKING:
    from collections.abc import Iterable

    import torch

    from pytest_gpumem.step_config.config import StepConfig
    from pytest_gpumem.steps.model_step import OptimizerOrFactory


def adapted(maker: OptimizerOrFactory, config: StepConfig) -> OptimizerOrFactory:
    """Return what makes the optimizer as the config's sharding and offloading have it.

    Raises:
        ConfigError: The optimizer exists already, or a package is missing.
    """
    import torch

    sharding, on_host = config.sharding, "optimizer" in config.offloaded
    if is_a(maker, torch.optim.Optimizer):
        raise ConfigError(
            f"{config}: an optimizer of other parameters is made than the model's; pass a function: "
            "optimizer=lambda parameters: ..."
        )
    make: Any = maker
    if on_host:
        return partial(_host_optimizer(), optimizer_class=make)

    def made(parameters: Iterable[torch.nn.Parameter]) -> torch.optim.Optimizer:
        optimizer: torch.optim.Optimizer = make(parameters)
        if sharding is not None and sharding.data is not None and sharding.data.shards_optimizer:
            zero: Any = import_quietly("torch.distributed.optim").ZeroRedundancyOptimizer
            kind: Any = type(optimizer)
            # Each group has all that the optimizer was made with.
            return cast("torch.optim.Optimizer", zero(optimizer.param_groups, lambda groups, **_: kind(groups)))
        optimizer.param_groups[:] = [
            {**group, "params": alike}
            for group in optimizer.param_groups
            for alike in parameter_groups(group["params"])
        ]
        return optimizer

    return made


def _host_optimizer() -> Any:
    """Return torchao's optimizer around another one whose state, and a copy of the parameters, are in the host's memory."""
    try:
        return import_quietly("torchao.optim").CPUOffloadOptimizer
    except ImportError:
        raise ConfigError(
            "offload=optimizer needs torchao (pip install 'pytest-gpumem[torchao]'), which is not installed"
        ) from None


def local_optimizer(optimizer: torch.optim.Optimizer) -> torch.optim.Optimizer:
    """Return the optimizer that keeps state on the device, within one that shares it out.

    Within a ``ZeroRedundancyOptimizer`` that of this rank, within torchao's ``CPUOffloadOptimizer`` that of small parameters.
    """
    import torch

    inner = (attribute(optimizer, name) for name in ("optim", "d_opt"))
    return next((one for one in inner if is_a(one, torch.optim.Optimizer)), optimizer)


def clip_gradients(parameters: Iterable[torch.nn.Parameter], norm: float) -> None:
    """Clip gradients to a norm, also those of which some are sharded and some are not, which torch refuses to mix."""
    import torch

    parameters = [parameter for parameter in parameters if parameter.grad is not None]
    groups = parameter_groups(parameters)
    if len(groups) < 2:
        torch.nn.utils.clip_grad_norm_(parameters, norm)
        return
    from torch.distributed.tensor import DTensor

    norms = []
    for group in groups:
        total = torch.nn.utils.get_total_norm([one.grad for one in group if one.grad is not None])
        norms.append(total.full_tensor() if is_a(total, DTensor) else total)
    coefficient = (norm / (torch.linalg.vector_norm(torch.stack(norms)) + 1e-6)).clamp(max=1.0)
    for group in groups:
        for parameter in group:
            gradient: Any = parameter.grad
            (gradient.to_local() if is_a(gradient, DTensor) else gradient).mul_(coefficient)


def parameter_groups(parameters: Iterable[torch.nn.Parameter]) -> list[list[torch.nn.Parameter]]:
    """Return the parameters in groups that one operator may take together: those that are sharded alike over one mesh."""
    groups: dict[object, list[torch.nn.Parameter]] = {}
    for parameter in parameters:
        groups.setdefault(getattr(parameter, "device_mesh", None), []).append(parameter)
    return list(groups.values())
