"""Parts of a model's step: the model on its device, its optimizer and its loss."""

from __future__ import annotations

import functools
import importlib
import logging
import traceback
import warnings
import weakref
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any

from pytest_gpumem.explain.recording import is_out_of_memory
from pytest_gpumem.measure.random_numbers import RandomNumbers
from pytest_gpumem.measurement import Workload
from pytest_gpumem.step_config.config import OPTIMIZER_CLASSES
from pytest_gpumem.step_config.errors import ConfigError, NotAStep
from pytest_gpumem.steps.batches import describe
from pytest_gpumem.torch_support.private_api import load_compiler
from pytest_gpumem.torch_support.static_access import class_name, dtype_and_shape, is_a, parameters_of, tensor_text

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Iterator
    from types import ModuleType

    import torch

    from pytest_gpumem.step_config.config import StepConfig

    ModelOrFactory = torch.nn.Module | Callable[[], torch.nn.Module]
    OptimizerFactory = Callable[[Iterable[torch.nn.Parameter]], torch.optim.Optimizer]
    OptimizerOrFactory = torch.optim.Optimizer | OptimizerFactory
    Loss = Callable[[Any, Any], torch.Tensor]


_CLASSES = {**OPTIMIZER_CLASSES, "adafactor": "Adafactor"}
_EIGHT_BIT = {"adam-8bit": "Adam8bit", "adamw-8bit": "AdamW8bit"}


def build_model(model_or_factory: ModelOrFactory, device: torch.device) -> torch.nn.Module:
    """Return the model on ``device``: the one that was given, or one that the given factory (or class) builds there.

    Raises ``TypeError`` for anything else, and `NotAStep` for a model that is somewhere else.
    """
    import torch

    given = given_model(model_or_factory)
    if given is not None:
        elsewhere = {str(p.device) for p in given.parameters() if p.device.type != device.type}
        if elsewhere:
            raise NotAStep(
                f"the model is on {', '.join(sorted(elsewhere))}, but this step is measured on {device}; "
                "move it with model.to(gpumem.device), or pass a function that builds it"
            )
        return given
    if not callable(model_or_factory):
        raise TypeError(f"expected a torch.nn.Module or a function that builds one, got {_name(model_or_factory)}")
    model = built_on(device, model_or_factory)
    if not is_a(model, torch.nn.Module):
        raise TypeError(f"{_name(model_or_factory)} returned {class_name(type(model))}, not a torch.nn.Module")
    is_split = any(
        parameter.device.type == device.type and parameter.device != device for parameter in model.parameters()
    )
    return model if is_split else model.to(device)


def built_on(device: torch.device, factory: Callable[[], Any]) -> Any:
    """Return what ``factory`` makes while tensors are created on ``device`` by default.

    One that fails so, as it draws with a generator of the CPU, say, or reads an array of NumPy, is called again without a
    default device, with the same random numbers: what it returns may then be elsewhere.

    Raises:
        Exception: The factory's own error without a default device, whose cause is the one with it.
    """
    import torch

    numbers = RandomNumbers.now(None)
    try:
        with torch.device(device):
            return factory()
    except Exception as error:
        if is_out_of_memory(error):
            raise
        with_device = error
    # What it has made is let go.
    traceback.clear_frames(with_device.__traceback__)
    numbers.restore()
    try:
        return factory()
    except Exception as error:
        raise error from with_device


def given_model(model_or_factory: ModelOrFactory) -> torch.nn.Module | None:
    """Return the model if one was given and not a function that builds it; of a `weakref.proxy` the model behind it."""
    import torch

    if is_a(model_or_factory, *weakref.ProxyTypes) and isinstance(model_or_factory, torch.nn.Module):
        return next(model_or_factory.modules())
    return model_or_factory if is_a(model_or_factory, torch.nn.Module) else None


def build_optimizer(
    optimizer: OptimizerOrFactory | None, model: torch.nn.Module, steps_given_model: bool
) -> torch.optim.Optimizer:
    """Return the optimizer of the model's trainable parameters; by default ``torch.optim.AdamW`` with its defaults.

    ``optimizer`` may be a class or function that takes the parameters, or, for a model that was given and not built here,
    an optimizer that exists.
    """
    import torch

    trainable = [parameter for parameter in model.parameters() if parameter.requires_grad]
    if not trainable:
        raise NotAStep("the model has no parameter that requires a gradient; measure it with gpumem.infer_step")
    if is_a(optimizer, torch.optim.Optimizer):
        theirs = {id(p) for group in optimizer.param_groups for p in group["params"]}
        if not steps_given_model or theirs.isdisjoint(map(id, trainable)):
            raise NotAStep(
                "the optimizer holds none of the model's parameters; pass a function: optimizer=lambda parameters: ..."
            )
        return optimizer
    make: Any = torch.optim.AdamW if optimizer is None else optimizer
    made: object = make(trainable)
    if not is_a(made, torch.optim.Optimizer):
        raise TypeError(f"optimizer={_name(optimizer)} returned {class_name(type(made))}, not a torch.optim.Optimizer")
    return made


@contextmanager
def quietly() -> Iterator[None]:
    """Let warnings and log records be lost within."""
    disabled = logging.root.manager.disable
    # torchao logs each of its kernels that does not fit this machine, and torch what torchao still does the old way.
    logging.disable(max(disabled, logging.WARNING))
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            yield
    finally:
        logging.disable(disabled)


def import_quietly(name: str) -> ModuleType:
    """Import the module called ``name`` without its warnings and log records. Raises ``ImportError`` as ``import`` does."""
    with quietly():
        return importlib.import_module(name)


def optimizer_named(word: str) -> OptimizerFactory:
    """Return the factory of the optimizer that a config names (not ``none``), with its defaults.

    ``foreach`` and ``fused`` forms are asked for; without one the choice is torch's. Raises `ConfigError` when it needs
    a package that is not there.
    """
    import torch

    if word in _EIGHT_BIT:
        module, name = eight_bit_module(word)
        # torchao's optimizer compiles its step.
        load_compiler()
        eight_bit: OptimizerFactory = getattr(import_quietly(module), name)
        return eight_bit
    name, _, form = word.partition("-")
    optimizer: Any = getattr(torch.optim, _CLASSES[name])
    return functools.partial(optimizer, **({form: True} if form else {}))


def eight_bit_module(word: str) -> tuple[str, str]:
    """Return the module of an 8-bit optimizer, torchao's or bitsandbytes', and the name of its class there.

    Raises `ConfigError` when neither is installed.
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

    Raises `NotAStep` when there is none, or when it does not depend on the model.
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
        raise NotAStep("the loss does not depend on any parameter that requires a gradient")
    return value


_PRECISIONS = {"float32": "fp32", "bfloat16": "bf16", "float16": "fp16", "float64": "fp64"}


def precision_of(model: torch.nn.Module) -> str:
    """Return the precision of a plain step of the model, by its floating-point parameters: ``"fp32"``, ``"bf16+fp32"``."""
    kinds = {str(p.dtype).removeprefix("torch.") for p in model.parameters() if p.is_floating_point()}
    return "+".join(sorted(_PRECISIONS.get(kind, kind) for kind in kinds)) or "fp32"


def workload_of(
    name: str, model: torch.nn.Module, batch: object, config: StepConfig, precision: str | None = None
) -> Workload:
    """Return what a model's step is.

    Args:
        name: ``"train_step"`` or ``"infer_step"``.
        model: The model as it runs.
        batch: The batch of a step.
        config: As the test's author wrote it.
        precision: That of the model before its weights were quantised; by default it has it still.
    """
    return Workload(name, config.text(precision or precision_of(model)), parameters_of(model), describe(batch))


def _kind(value: object) -> str:
    import torch

    return tensor_text(*dtype_and_shape(value)) if is_a(value, torch.Tensor) else class_name(type(value))


def _name(thing: object) -> str:
    try:
        return str(getattr(thing, "__qualname__", None) or repr(thing))
    except Exception:  # noqa: BLE001 - it is named in a message, and has no name to give
        return f"<{class_name(type(thing))}>"
