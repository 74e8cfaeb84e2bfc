"""What a model's step is made of: the model on its device, its optimizer and its loss."""

from __future__ import annotations

from contextlib import contextmanager
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Iterator

    import torch

    ModelOrFactory = torch.nn.Module | Callable[[], torch.nn.Module]
    OptimizerOrFactory = torch.optim.Optimizer | Callable[[Iterable[torch.nn.Parameter]], torch.optim.Optimizer]
    Loss = Callable[[Any, Any], torch.Tensor]


class NotAStep(ValueError):
    """Model, batch, loss and optimizer do not make a step; the message says what is missing."""


def build_model(model_or_factory: ModelOrFactory, device: torch.device) -> torch.nn.Module:
    """The model on ``device``: as it is when one was given, built there when a factory (or class) was.

    Raises ``TypeError`` for anything else, and `NotAStep` for a model that is somewhere else.
    """
    import torch

    if isinstance(model_or_factory, torch.nn.Module):
        elsewhere = {str(p.device) for p in model_or_factory.parameters() if p.device.type != device.type}
        if elsewhere:
            raise NotAStep(
                f"the model is on {', '.join(sorted(elsewhere))}, but this step is measured on {device}; "
                "move it with model.to(gpumem.device), or pass a function that builds it"
            )
        return model_or_factory
    if not callable(model_or_factory):
        raise TypeError(f"expected a torch.nn.Module or a function that builds one, got {model_or_factory!r}")
    with torch.device(device):
        model = model_or_factory()
    if not isinstance(model, torch.nn.Module):
        raise TypeError(f"{_name(model_or_factory)} returned {type(model).__name__}, not a torch.nn.Module")
    return model.to(device)


def build_optimizer(
    optimizer: OptimizerOrFactory | None, model: torch.nn.Module, steps_given_model: bool
) -> torch.optim.Optimizer:
    """The optimizer of the model's trainable parameters: ``torch.optim.AdamW`` with its defaults unless told otherwise.

    ``optimizer`` may be a class or function that takes the parameters, or, for a model that was given and not built here,
    an optimizer that exists.
    """
    import torch

    trainable = [parameter for parameter in model.parameters() if parameter.requires_grad]
    if not trainable:
        raise NotAStep("the model has no parameter that requires a gradient; measure it with gpumem.infer_step")
    if isinstance(optimizer, torch.optim.Optimizer):
        theirs = {id(p) for group in optimizer.param_groups for p in group["params"]}
        if not steps_given_model or theirs.isdisjoint(map(id, trainable)):
            raise NotAStep(
                "the optimizer holds none of the model's parameters; pass a function: optimizer=lambda parameters: ..."
            )
        return optimizer
    made: object = (optimizer or torch.optim.AdamW)(trainable)
    if not isinstance(made, torch.optim.Optimizer):
        raise TypeError(f"optimizer={_name(optimizer)} returned {type(made).__name__}, not a torch.optim.Optimizer")
    return made


def loss_of(output: Any, batch: Any, loss: Loss | None) -> torch.Tensor:
    """The scalar to differentiate: ``loss(output, batch)``, or ``output.loss``, ``output["loss"]``, or a scalar output.

    Raises `NotAStep` when there is none, or when it does not depend on the model.
    """
    import torch

    if loss is not None:
        value = loss(output, batch)
    elif isinstance(output, dict) and "loss" in output:
        value = output["loss"]
    else:
        value = getattr(output, "loss", output)
    if not isinstance(value, torch.Tensor) or value.numel() != 1:
        raise NotAStep(
            f"there is no scalar loss: {'loss(...)' if loss else 'the model'} returned {_kind(value)}; "
            "pass loss=lambda output, batch: ..., which returns one number"
        )
    if not value.requires_grad:
        raise NotAStep("the loss does not depend on any parameter that requires a gradient")
    return value


@contextmanager
def in_mode(model: torch.nn.Module, training: bool) -> Iterator[None]:
    """The model in training or evaluation mode; each module goes back to its own afterwards."""
    modes = [(module, module.training) for module in model.modules()]
    model.train(training)
    try:
        yield
    finally:
        for module, mode in modes:
            module.training = mode


_PRECISIONS = {"float32": "fp32", "bfloat16": "bf16", "float16": "fp16", "float64": "fp64"}


def precision_of(model: torch.nn.Module) -> str:
    """The precision that a plain step of the model runs in, by its floating-point parameters: ``"fp32"``, ``"bf16+fp32"``."""
    kinds = {str(p.dtype).removeprefix("torch.") for p in model.parameters() if p.is_floating_point()}
    return "+".join(sorted(_PRECISIONS.get(kind, kind) for kind in kinds)) or "fp32"


def parameters_of(model: torch.nn.Module) -> int:
    """The number of the model's parameters; tied ones count once."""
    return sum(parameter.numel() for parameter in model.parameters())


def _kind(value: object) -> str:
    import torch

    if isinstance(value, torch.Tensor):
        return f"{str(value.dtype).removeprefix('torch.')}{list(value.shape)}"
    return type(value).__name__


def _name(thing: object) -> str:
    return getattr(thing, "__qualname__", repr(thing))
