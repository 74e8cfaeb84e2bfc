"""A training step, made ready under its config: forward, backward and optimizer."""

from __future__ import annotations

from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any

from pytest_gpumem.measure.prepared import PreparedStep
from pytest_gpumem.measure.random_numbers import random_numbers_given_back
from pytest_gpumem.step_config.config import StepConfig
from pytest_gpumem.step_config.errors import ConfigError
from pytest_gpumem.steps.batches import on_device, work_in
from pytest_gpumem.steps.built import Built
from pytest_gpumem.steps.checkpointing import checkpointed
from pytest_gpumem.steps.compiling import compile_now, compiled, warnings_of_compiling
from pytest_gpumem.steps.dry_run import DryRun, counted_again, dry_run
from pytest_gpumem.steps.model_step import build_model, build_optimizer, given_model, optimizer_named, workload_of
from pytest_gpumem.steps.precision import batch_in_precision, in_precision
from pytest_gpumem.steps.process_group import layout_in_process_group
from pytest_gpumem.steps.sharded_optimizer import adapted, local_optimizer
from pytest_gpumem.steps.sharding import build_sharded, part_of_sequence, sequence_shared
from pytest_gpumem.steps.surroundings import can_run, initialise, surroundings
from pytest_gpumem.steps.training import Training
from pytest_gpumem.torch_support.private_api import compiled_graphs

if TYPE_CHECKING:
    from collections.abc import Iterator

    from pytest_gpumem.measure.context import MeasuringContext
    from pytest_gpumem.steps.model_step import Loss, ModelOrFactory, OptimizerOrFactory


@dataclass(frozen=True, slots=True, kw_only=True)
class PreparedTrainStep(PreparedStep):
    """A training step that is ready to run under its config."""

    training: Training


def _build(context: MeasuringContext, factory: ModelOrFactory, batch: Any, config: StepConfig) -> Built:
    """Return the model as it was given, or built on the device in the config's precision."""
    with context.creation_sites() as creation_sites:
        model = build_model(factory, context.device.torch_device)
        model = in_precision(model, config.precision, given_model(factory) is not None)
        initialise(model, batch, config, context.device, training=True)
    return Built(model, model, config.blocks, creation_sites)


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
    """Make a training step ready to run: forward + backward + optimizer.

    It is built on the device, run dry if a config was given, and checkpointed. Without a config it runs plainly, in the
    model's own precision, with AdamW. Raises `ConfigError`, ``ValueError`` or ``TypeError`` when it makes no step, and
    `CannotRun` where the device cannot.
    """
    config_given, config = config is not None, config or StepConfig()
    said = config
    config.only_for("train_step")
    if optimizer is not None and config.optimizer != StepConfig().optimizer:
        raise ConfigError(
            f"optimizer= is given, and the step config says optimizer={config.optimizer}; give one of them"
        )
    device = context.device.torch_device
    emulated = can_run(context.device, config)
    batch = batch_in_precision(on_device(batch, device), config.precision)
    given = given_model(model_or_factory)
    if given is not None:
        # Gradients that were left would be in the first step and not in the others.
        given.zero_grad(set_to_none=True)
    maker = optimizer if optimizer is not None or config.optimizer == "none" else optimizer_named(config.optimizer)
    shared = config.sharding is not None or bool(config.offloaded)
    if "optimizer" in config.offloaded and given is not None:
        raise ConfigError(
            f"{config}: hooks of the offloading optimizer would stay; pass a function that builds the model"
        )
    if maker is not None and shared:
        maker = adapted(maker, config)
    with ExitStack() as stack:
        stack.enter_context(random_numbers_given_back(context.device))
        layout = None
        if config.sharding is not None:
            layout = stack.enter_context(layout_in_process_group(config, device))
            stack.enter_context(sequence_shared(layout, device))
            batch = part_of_sequence(batch, layout)
        not_own = context.begin((given, batch, optimizer))
        if layout is not None:
            built = build_sharded(context, model_or_factory, batch, loss, config, layout)
        else:
            built = _build(context, model_or_factory, batch, config)
        model, run = built.model, built.run
        made = None if maker is None else build_optimizer(maker, model, given is not None)
        config = replace(config, blocks=built.blocks)
        training = Training(model, run, batch, made, loss, config, device)
        training.pipeline, training.unreduced, training.buckets = built.pipeline, built.unreduced, built.buckets
        stack.callback(model.zero_grad, set_to_none=True)
        if config.optimizer.endswith("-8bit"):
            # It compiles its step by itself.
            stack.enter_context(warnings_of_compiling())
        stack.enter_context(surroundings(model, config, context.device, training=True))
        tried = dry_run(training, context.device) if config_given else DryRun()
        stack.enter_context(checkpointed(model, config))
        compiles = config.compile != "none"
        if compiles:
            training.run = stack.enter_context(compiled(run, config.compile))
        phases, again = counted_again(training.phases(), tried.recomputed)
        if compiles:
            compile_now(phases, config.compile)
        # A scale that falls in every step does not show whether the next one repeats it.
        scales = training.scaler is not None and not tried.overflows
        yield PreparedTrainStep(
            context=context,
            workload=workload_of("train_step", model, batch, said),
            work=work_in(batch, items),
            phases=phases,
            not_own=not_own,
            held=(model, batch, made, training.scaler, built.buckets),
            model=model,
            optimizer=local_optimizer(made) if made is not None and shared else made,
            batch=batch,
            compiled=compiles,
            state=(lambda: (compiled_graphs(), training.scale() if scales else None)) if compiles or scales else None,
            notes=(*emulated, *built.notes, *tried.notes),
            creation_sites=built.creation_sites,
            buckets={} if built.buckets is None else built.buckets,
            training=training,
            recomputed=lambda: again.number,
        )
