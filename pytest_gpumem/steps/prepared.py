"""Steps made ready to run: built on their device, initialised, tried and checkpointed, as their config asks for."""

from __future__ import annotations

from contextlib import ExitStack, contextmanager, nullcontext
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from pytest_gpumem.devices.contract import CannotRun
from pytest_gpumem.steps.batches import feed, micro_batches, on_device
from pytest_gpumem.steps.checkpointing import checkpointed
from pytest_gpumem.steps.compiling import compile_now, compiled, warnings_of_compiling
from pytest_gpumem.steps.config import ConfigError
from pytest_gpumem.steps.dry_run import DryRun, dry_run, dry_run_inference
from pytest_gpumem.steps.inference import caching, infer_phases, quantized
from pytest_gpumem.steps.measured import PLAIN, PreparedStep
from pytest_gpumem.steps.model_step import build_model, build_optimizer, given_model, in_mode, precision_of
from pytest_gpumem.steps.optimizers import optimizer_named
from pytest_gpumem.steps.precision import autocasting, batch_in_precision, float32_precision, in_precision
from pytest_gpumem.steps.random_numbers import random_numbers_given_back
from pytest_gpumem.steps.runner import Phase
from pytest_gpumem.steps.training import Training
from pytest_gpumem.torch_support.private_api import compiled_graphs, outside_autocast
from pytest_gpumem.torch_support.static_access import is_a

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator

    import torch

    from pytest_gpumem.devices.contract import Device
    from pytest_gpumem.explain.sites import Site
    from pytest_gpumem.steps.config import StepConfig
    from pytest_gpumem.steps.measured import MeasuringContext
    from pytest_gpumem.steps.model_step import Loss, ModelOrFactory, OptimizerOrFactory


@contextmanager
def surroundings(model: torch.nn.Module, config: StepConfig, device: Device, *, training: bool) -> Iterator[None]:
    """Mode, matrix precision, key/value cache and autocast as the config wants them, whatever is outside."""
    # With cache=on the calls say so themselves.
    cache = False if training or config.cache == "off" else None
    with (
        in_mode(model, training=training),
        float32_precision(config.precision, device),
        caching(model, cache, required=config.cache == "off"),
        outside_autocast(device.torch_device.type),
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
    """Whether it is a parameter or buffer of a lazy module that has not been called."""
    import torch

    return is_a(tensor, torch.nn.UninitializedParameter, torch.nn.UninitializedBuffer)


@dataclass(frozen=True, slots=True, kw_only=True)
class PreparedTrainStep(PreparedStep):
    """A training step that is ready to run under its config."""

    training: Training


@contextmanager
def prepared_function(
    context: MeasuringContext, fn: Callable[[], object], items: float | None = None
) -> Iterator[PreparedStep]:
    """Within, ``fn()`` stands ready as a step that repeats. What it holds belongs to the step."""
    with random_numbers_given_back(context.device):
        foreign = context.begin(fn)
        yield PreparedStep(
            context=context, name="measure", phases=[Phase("step", fn)], foreign=foreign, held=fn, items=items
        )


@contextmanager
def prepared_train_step(
    context: MeasuringContext,
    model_or_factory: ModelOrFactory,
    batch: Any,
    *,
    config: StepConfig | None = None,
    loss: Loss | None = None,
    optimizer: OptimizerOrFactory | None = None,
    items: float | str | None = None,
) -> Iterator[PreparedTrainStep]:
    """Within, a training step stands ready: forward + backward + optimizer.

    It is built on the device, rehearsed if a config was given, and checkpointed. Without a config it runs plainly, in the
    model's own precision, with AdamW. Raises `ConfigError`, ``ValueError`` or ``TypeError`` when it makes no step, and
    `CannotRun` where the device cannot.
    """
    config_given, config = config is not None, config or PLAIN
    config.only_for("train_step")
    if optimizer is not None and config.optimizer != PLAIN.optimizer:
        raise ConfigError(
            f"optimizer= is given, and the step config says optimizer={config.optimizer}; give one of them"
        )
    device = context.device.torch_device
    can_run(context.device, config)
    batch = batch_in_precision(on_device(batch, device), config.precision)
    given = given_model(model_or_factory)
    if given is not None:
        # Gradients that somebody left would be in the first step and not in the others.
        given.zero_grad(set_to_none=True)
    with ExitStack() as stack:
        stack.enter_context(random_numbers_given_back(context.device))
        foreign = context.begin((given, batch, optimizer))
        creation_sites: dict[int, Site] = {}
        with context.born(creation_sites):
            model = in_precision(build_model(model_or_factory, device), config.precision, given is not None)
            initialise(model, batch, config, context.device, training=True)
        made = None
        if optimizer is not None or config.optimizer != "none":
            maker = optimizer_named(config.optimizer) if optimizer is None else optimizer
            made = build_optimizer(maker, model, given is not None)
        training = Training(model, model, batch, made, loss, config, device)
        stack.callback(model.zero_grad, set_to_none=True)
        if config.optimizer.endswith("-8bit"):
            # It compiles its step by itself.
            stack.enter_context(warnings_of_compiling())
        stack.enter_context(surroundings(model, config, context.device, training=True))
        seen = dry_run(training) if config_given else DryRun()
        stack.enter_context(checkpointed(model, config))
        training.run = stack.enter_context(compiled(model, config.compile))
        phases = training.phases()
        compile_now(phases, config.compile)
        compiles = config.compile != "none"
        # A scale that falls in every step tells nothing of the next one.
        scales = training.scaler is not None and not seen.overflows
        yield PreparedTrainStep(
            context=context,
            name="train_step",
            phases=phases,
            foreign=foreign,
            held=(model, batch, made, training.scaler),
            model=model,
            optimizer=made,
            batch=batch,
            config=config,
            items=items,
            state=(lambda: (compiled_graphs(), training.scale() if scales else None)) if compiles or scales else None,
            notes=seen.notes,
            recomputed=seen.recomputed,
            creation_sites=creation_sites,
            training=training,
        )


@contextmanager
def prepared_infer_step(
    context: MeasuringContext,
    model_or_factory: ModelOrFactory,
    batch: Any,
    *,
    config: StepConfig | None = None,
    items: float | str | None = None,
) -> Iterator[PreparedStep]:
    """Within, one forward pass stands ready, or with ``cache=on`` a prompt and the token after it.

    Raises as `prepared_train_step`.
    """
    config = config or PLAIN
    config.only_for("infer_step")
    device = context.device.torch_device
    can_run(context.device, config)
    batch = batch_in_precision(on_device(batch, device), config.precision)
    given = given_model(model_or_factory)
    with ExitStack() as stack:
        stack.enter_context(random_numbers_given_back(context.device))
        foreign = context.begin((given, batch))
        creation_sites: dict[int, Site] = {}
        with context.born(creation_sites):
            model = in_precision(build_model(model_or_factory, device), config.precision, given is not None)
            initialise(model, batch, config, context.device, training=False)
            precision = precision_of(model)
            model = quantized(model, config, given is not None)
        stack.enter_context(surroundings(model, config, context.device, training=False))
        dry_run_inference(infer_phases(model, model, batch, config, device), config)
        run = stack.enter_context(compiled(model, config.compile))
        phases = infer_phases(model, run, batch, config, device)
        compile_now(phases, config.compile)
        yield PreparedStep(
            context=context,
            name="infer_step",
            phases=phases,
            foreign=foreign,
            held=(model, batch),
            model=model,
            batch=batch,
            config=config,
            precision=precision,
            items=items,
            state=compiled_graphs if config.compile != "none" else None,
            creation_sites=creation_sites,
        )


def can_run(device: Device, config: StepConfig) -> None:
    """Raises `CannotRun` when the device cannot run a step under this config."""
    for feature in (config.precision, config.checkpointing.kind.name, config.compile):
        why_not = None if feature is None else device.lacks(feature)
        if why_not is not None:
            raise CannotRun(why_not)
