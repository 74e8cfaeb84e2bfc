"""Create the parts of a step beside the model: the optimizer, the loss and the workload."""

from __future__ import annotations

import functools
import importlib
import logging
import warnings
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any

from pytest_gpumem.base.errors import ConfigError, NotAStep
from pytest_gpumem.facts.measurement import Workload
from pytest_gpumem.measuring.step_config.config import OPTIMIZER_CLASSES
from pytest_gpumem.measuring.steps.batches import describe
from pytest_gpumem.measuring.steps.model_source import factory_name
from pytest_gpumem.torch_support.private_api.compiler import load_compiler
from pytest_gpumem.torch_support.static_access import class_name, dtype_and_shape, is_a, parameters_of, tensor_text

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Iterator
    from types import ModuleType

    import torch

    from pytest_gpumem.measuring.step_config.config import StepConfig
    from pytest_gpumem.measuring.steps.model_source import ModelSource

    OptimizerFactory = Callable[[Iterable[torch.nn.Parameter]], torch.optim.Optimizer]
    OptimizerOrFactory = torch.optim.Optimizer | OptimizerFactory
    Loss = Callable[[Any, Any], torch.Tensor]


_CLASSES = {**OPTIMIZER_CLASSES, "adafactor": "Adafactor"}
_EIGHT_BIT = {"adam-8bit": "Adam8bit", "adamw-8bit": "AdamW8bit"}


def build_optimizer(
    optimizer: OptimizerOrFactory | None, model: torch.nn.Module, source: ModelSource
) -> torch.optim.Optimizer:
    """Return an optimizer for the model's trainable parameters.

    Args:
        optimizer: A class or function that takes the parameters, or an existing optimizer. The default is
            ``torch.optim.AdamW``.
        model: The model.
        source: The model's source. Only for an `ExistingModel` may ``optimizer`` be an existing optimizer.

    Raises:
        NotAStep: The model has no trainable parameter, or the existing optimizer was created for other parameters.
        TypeError: ``optimizer`` is a class or function, but did not return an optimizer.
    """
    import torch

    trainable = [parameter for parameter in model.parameters() if parameter.requires_grad]
    if not trainable:
        raise NotAStep("the model has no parameter that requires a gradient; measure it with gpumem.infer_step")
    if is_a(optimizer, torch.optim.Optimizer):
        optimized = {id(parameter) for group in optimizer.param_groups for parameter in group["params"]}
        if source.existing is None or optimized.isdisjoint(map(id, trainable)):
            raise NotAStep(
                "the optimizer was created for other parameters than the model's; pass a function: "
                "optimizer=lambda parameters: ..."
            )
        return optimizer
    make: Any = torch.optim.AdamW if optimizer is None else optimizer
    new_optimizer: object = make(trainable)
    if not is_a(new_optimizer, torch.optim.Optimizer):
        returned = class_name(type(new_optimizer))
        raise TypeError(f"optimizer={factory_name(optimizer)} returned {returned}, not a torch.optim.Optimizer")
    return new_optimizer


@contextmanager
def quietly() -> Iterator[None]:
    """Suppress warnings and log records within the context."""
    disabled = logging.root.manager.disable
    # torchao logs each kernel that does not fit this machine. torch logs torchao's calls to deprecated functions.
    logging.disable(max(disabled, logging.WARNING))
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            yield
    finally:
        logging.disable(disabled)


def import_quietly(name: str) -> ModuleType:
    """Import the module ``name`` without its warnings and log records. Raises ``ImportError`` like ``import``."""
    with quietly():
        return importlib.import_module(name)


def optimizer_named(word: str) -> OptimizerFactory:
    """Return a factory for the optimizer that a config names. The optimizer's arguments have their defaults.

    Args:
        word: A word for ``optimizer=``, for example ``"adamw"`` or ``"adamw-fused"``, but not ``"none"``. Without
            ``-foreach`` or ``-fused``, torch chooses the implementation.

    Raises:
        ConfigError: The optimizer needs a package that is not installed.
    """
    import torch

    if word in _EIGHT_BIT:
        module, name = eight_bit_module(word)
        # torchao's 8-bit optimizers compile their step.
        load_compiler()
        eight_bit: OptimizerFactory = getattr(import_quietly(module), name)
        return eight_bit
    name, _, form = word.partition("-")
    optimizer: Any = getattr(torch.optim, _CLASSES[name])
    return functools.partial(optimizer, **({form: True} if form else {}))


def eight_bit_module(word: str) -> tuple[str, str]:
    """Return the name of the module with an 8-bit optimizer (from torchao or bitsandbytes), and the optimizer's class name.

    Raises:
        ConfigError: Neither package is installed.
    """
    for module in ("torchao.optim", "bitsandbytes.optim"):
        try:
            import_quietly(module)
        except ImportError:
            continue
        return module, _EIGHT_BIT[word]
    raise ConfigError(
        f"optimizer={word} needs torchao (pip install 'pytest-gpumem[torchao]') or bitsandbytes, and neither is installed"
    )


def loss_of(output: Any, batch: Any, loss: Loss | None) -> torch.Tensor:
    """Return the scalar to differentiate: ``loss(output, batch)``, or ``output.loss``, ``output["loss"]``, or a scalar output.

    Raises:
        NotAStep: There is no scalar loss, or the loss does not depend on the model's parameters.
    """
    import torch

    if loss is not None:
        value = loss(output, batch)
    elif is_a(output, dict) and "loss" in output:
        value = output["loss"]
    else:
        value = getattr(output, "loss", output)
    if not is_a(value, torch.Tensor) or value.numel() != 1:
        raise NotAStep(
            f"there is no scalar loss: {'loss(...)' if loss else 'the model'} returned {_kind(value)}; "
            "pass loss=lambda output, batch: ..., which returns one number"
        )
    if not value.requires_grad:
        raise NotAStep(
            "the loss does not depend on any parameter that requires a gradient; return a loss computed from the model's "
            "output, without detach()"
        )
    return value


_PRECISIONS = {"float32": "fp32", "bfloat16": "bf16", "float16": "fp16", "float64": "fp64"}


def precision_of(model: torch.nn.Module) -> str:
    """Return the precision of the model's floating-point parameters, for example ``"fp32"`` or ``"bf16+fp32"``."""
    dtypes = {str(p.dtype).removeprefix("torch.") for p in model.parameters() if p.is_floating_point()}
    return "+".join(sorted(_PRECISIONS.get(dtype, dtype) for dtype in dtypes)) or "fp32"


def workload_of(
    name: str, model: torch.nn.Module, batch: object, config: StepConfig, precision: str | None = None
) -> Workload:
    """Return the workload of a model's step.

    Args:
        name: ``"train_step"`` or ``"infer_step"``.
        model: The prepared model.
        batch: The step's batch.
        config: The step config as the test passed it.
        precision: The model's precision before quantisation. By default, the precision of the current parameters.
    """
    return Workload(name, config.text(precision or precision_of(model)), parameters_of(model), describe(batch))


def _kind(value: object) -> str:
    import torch

    return tensor_text(*dtype_and_shape(value)) if is_a(value, torch.Tensor) else class_name(type(value))
