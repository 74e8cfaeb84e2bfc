"""A training step, prepared under its config: forward, backward and optimizer."""

from __future__ import annotations

from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any

from pytest_gpumem.base.errors import ConfigError
from pytest_gpumem.measuring.measure.prepared import PreparedStep
from pytest_gpumem.measuring.measure.random_numbers import restored_random_numbers
from pytest_gpumem.measuring.step_config.config import StepConfig
from pytest_gpumem.measuring.steps.batches import on_device, work_in
from pytest_gpumem.measuring.steps.built import BuiltModel
from pytest_gpumem.measuring.steps.checkpointing import activation_checkpointing
from pytest_gpumem.measuring.steps.compiling import compile_now, compiled_model, warnings_of_compiling
from pytest_gpumem.measuring.steps.dry_run import DryRun, counting_recomputation, dry_run
from pytest_gpumem.measuring.steps.global_settings import can_run, global_settings, initialise
from pytest_gpumem.measuring.steps.model_source import check_existing_model, creates_tensors
from pytest_gpumem.measuring.steps.model_step import build_optimizer, optimizer_named, workload_of
from pytest_gpumem.measuring.steps.precision import batch_in_precision
from pytest_gpumem.measuring.steps.process_group import layout_in_process_group
from pytest_gpumem.measuring.steps.sharded_optimizer import adapted_factory, local_optimizer
from pytest_gpumem.measuring.steps.sharding import build_sharded, part_of_sequence, sharing_sequences
from pytest_gpumem.measuring.steps.training import Training
from pytest_gpumem.torch_support.private_api.compiler import compiled_graphs

if TYPE_CHECKING:
    from collections.abc import Iterator

    from pytest_gpumem.measuring.measure.context import MeasuringContext
    from pytest_gpumem.measuring.steps.model_source import ModelSource
    from pytest_gpumem.measuring.steps.model_step import Loss, OptimizerOrFactory


@dataclass(frozen=True, slots=True, kw_only=True)
class PreparedTrainStep(PreparedStep):
    """A training step that is ready to run under its config."""

    training: Training


def _build(context: MeasuringContext, source: ModelSource, batch: Any, config: StepConfig) -> BuiltModel:
    """Return the test's model, or build a model on the device in the config's precision."""
    with context.creation_sites(creates=creates_tensors(source)) as creation_sites:
        model = source.model_on(context.device.torch_device, config.precision)
        initialise(model, batch, config, context.device, training=True)
    return BuiltModel(model, model, config.blocks, creation_sites)


@contextmanager
def prepared_train_step(
    context: MeasuringContext,
    source: ModelSource,
    batch: Any,
    *,
    config: StepConfig | None = None,
    loss: Loss | None = None,
    optimizer: OptimizerOrFactory | None = None,
    items: float | str | None = None,
) -> Iterator[PreparedTrainStep]:
    """Prepare a training step: forward, backward and optimizer.

    If the test passes a function instead of a model, the function builds the model on the device. If there is a config,
    checkpointing is applied, and a dry run checks that the config takes effect. Without a config, the step uses the model's own
    precision and AdamW.

    Args:
        context: The context in which the step is measured.
        source: The model's source, from `model_source`.
        batch: The batch, or a function that returns it.
        config: The step config.
        loss: A function with the arguments output and batch. See `loss_of` for the default.
        optimizer: An optimizer, or a function that creates one from the parameters. It cannot be combined with ``optimizer=``
            in the config.
        items: As in `work_in`.

    Raises:
        ConfigError: The config does not fit the model, or has no effect.
        ValueError: The batch does not fit the config.
        TypeError: The model or optimizer has the wrong type.
        CannotRun: The device cannot run the step.
    """
    has_config, config = config is not None, config or StepConfig()
    original_config = config
    config.only_for("train_step")
    if optimizer is not None and config.optimizer != StepConfig().optimizer:
        raise ConfigError(
            f"the test passes optimizer=, but the step config also has optimizer={config.optimizer}; leave one out"
        )
    device = context.device.torch_device
    emulated = can_run(context.device, config)
    batch = batch_in_precision(on_device(batch, device), config.precision)
    if source.existing is not None:
        check_existing_model(config)
        # Free old gradients, because they would be live in the first step, but not in later steps.
        source.existing.zero_grad(set_to_none=True)
    maker = optimizer if optimizer is not None or config.optimizer == "none" else optimizer_named(config.optimizer)
    shared = config.sharding is not None or bool(config.offloaded)
    if maker is not None and shared:
        maker = adapted_factory(maker, config)
    with ExitStack() as stack:
        stack.enter_context(restored_random_numbers(context.device))
        layout = None
        if config.sharding is not None:
            layout = stack.enter_context(layout_in_process_group(config, device))
            stack.enter_context(sharing_sequences(layout, device))
            batch = part_of_sequence(batch, layout)
        other_bytes = context.bytes_of_other_code((source.existing, batch, optimizer))
        if layout is not None:
            built = build_sharded(context, source, batch, loss, config, layout)
        else:
            built = _build(context, source, batch, config)
        model, run = built.model, built.run
        built_optimizer = None if maker is None else build_optimizer(maker, model, source)
        config = replace(config, blocks=built.blocks)
        training = Training(model, run, batch, built_optimizer, loss, config, device)
        training.pipeline, training.unreduced, training.buckets = built.pipeline, built.unreduced, built.buckets
        stack.callback(model.zero_grad, set_to_none=True)
        if config.optimizer.endswith("-8bit"):
            # 8-bit optimizers compile their step.
            stack.enter_context(warnings_of_compiling())
        stack.enter_context(global_settings(model, config, context.device, training=True))
        dry = dry_run(training, context.device) if has_config else DryRun()
        if config.checkpoint != "none":
            stack.enter_context(activation_checkpointing(model, config))
        compiles = config.compile != "none"
        if compiles:
            training.run = stack.enter_context(compiled_model(run, config.compile))
        phases, again = counting_recomputation(training.phases(), dry.recomputed)
        if compiles:
            compile_now(phases, config.compile)
        # If gradients overflow at every scale, the scale changes in every step, so ignore it when steps are compared.
        scales = training.scaler is not None and not dry.overflows
        yield PreparedTrainStep(
            context=context,
            workload=workload_of("train_step", model, batch, original_config),
            work=work_in(batch, items),
            phases=phases,
            other_bytes=other_bytes,
            held=(model, batch, built_optimizer, training.scaler, built.buckets),
            model=model,
            optimizer=local_optimizer(built_optimizer) if built_optimizer is not None and shared else built_optimizer,
            batch=batch,
            is_compiled=compiles,
            state=(lambda: (compiled_graphs(), training.scale() if scales else None)) if compiles or scales else None,
            notes=(*emulated, *built.notes, *dry.notes),
            creation_sites=built.creation_sites,
            buckets={} if built.buckets is None else built.buckets,
            training=training,
            recomputed=lambda: again.number,
        )
