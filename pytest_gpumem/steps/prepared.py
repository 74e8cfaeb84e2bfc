"""A model's step, ready to run: built on its device, rehearsed, checkpointed, in the surroundings that its config wants."""

from __future__ import annotations

from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from pytest_gpumem.devices.contract import CannotRun
from pytest_gpumem.measurement import Workload
from pytest_gpumem.steps.batches import describe, on_device
from pytest_gpumem.steps.checkpointing import checkpointed
from pytest_gpumem.steps.compiling import compile_now, compiled, warnings_of_compiling
from pytest_gpumem.steps.config import ConfigError, StepConfig
from pytest_gpumem.steps.dry_run import DryRun, dry_run
from pytest_gpumem.steps.lazy import initialise
from pytest_gpumem.steps.model_step import build_model, build_optimizer, given_model, parameters_of, precision_of
from pytest_gpumem.steps.optimizers import optimizer_named
from pytest_gpumem.steps.precision import batch_in_precision, in_precision
from pytest_gpumem.steps.random_numbers import random_numbers_given_back
from pytest_gpumem.steps.surroundings import surroundings
from pytest_gpumem.steps.training import Training
from pytest_gpumem.torch_support.private_api import compiled_graphs

if TYPE_CHECKING:
    from collections.abc import Iterator, Mapping

    from pytest_gpumem.devices.contract import Device
    from pytest_gpumem.explain.recording import Subject
    from pytest_gpumem.explain.sites import Site
    from pytest_gpumem.explain.tracker import Tracker
    from pytest_gpumem.steps.measuring_context import MeasuringContext, Start
    from pytest_gpumem.steps.model_step import Loss, ModelOrFactory, OptimizerOrFactory
    from pytest_gpumem.steps.runner import Phase, StepFigures

_PLAIN = StepConfig()


@dataclass(frozen=True, slots=True)
class PreparedTrainStep:
    """A training step that is ready to run under its config, on ``bench``; ``start`` is what was live before its model."""

    bench: MeasuringContext
    training: Training
    phases: tuple[Phase, ...]
    start: Start
    seen: DryRun
    creation_sites: Mapping[int, Site]

    def measure(self) -> StepFigures:
        """Run the step until it repeats, then measure it."""
        training = self.training
        compiles = training.config.compile != "none"
        # A scale that falls in every step tells nothing of the next one.
        scales = training.scaler is not None and not self.seen.overflows
        return self.bench.measure(
            self.phases,
            self.start,
            held=self.held,
            state=(lambda: (compiled_graphs(), training.scale() if scales else None)) if compiles or scales else None,
            compiled=compiles,
        )

    def subject(self) -> Subject:
        """The step as it is recorded."""
        training = self.training

        def know(tracker: Tracker) -> None:
            tracker.know(training.model, training.optimizer, training.batch)

        return self.bench.subject(
            self.phases,
            self.start,
            held=self.held,
            know=know,
            births_of=self.creation_sites,
            compiled=training.config.compile != "none",
        )

    def held(self) -> object:
        """What leads to everything that the step holds between steps."""
        training = self.training
        return training.model, training.batch, training.optimizer, training.scaler

    def workload(self) -> Workload:
        """What is trained, and how."""
        model = self.training.model
        config = self.training.config.text(precision_of(model))
        return Workload("train_step", config, parameters_of(model), describe(self.training.batch))


@contextmanager
def prepared_train_step(
    bench: MeasuringContext,
    model_or_factory: ModelOrFactory,
    batch: Any,
    *,
    config: StepConfig | None = None,
    loss: Loss | None = None,
    optimizer: OptimizerOrFactory | None = None,
) -> Iterator[PreparedTrainStep]:
    """Within, a training step stands ready: built on the bench's device, rehearsed if a config was given, checkpointed.

    Raises as `measure_train_step`.
    """
    config_given, config = config is not None, config or _PLAIN
    config.only_for("train_step")
    if optimizer is not None and config.optimizer != _PLAIN.optimizer:
        raise ConfigError(
            f"optimizer= is given, and the step config says optimizer={config.optimizer}; give one of them"
        )
    device = bench.device.torch_device
    can_run(bench.device, config)
    batch = batch_in_precision(on_device(batch, device), config.precision)
    given = given_model(model_or_factory)
    if given is not None:
        # Gradients that somebody left would be in the first step and not in the others.
        given.zero_grad(set_to_none=True)
    with ExitStack() as stack:
        stack.enter_context(random_numbers_given_back(bench.device))
        start = bench.begin((given, batch, optimizer))
        creation_sites: dict[int, Site] = {}
        with bench.born(creation_sites):
            model = in_precision(build_model(model_or_factory, device), config.precision, given is not None)
            initialise(model, batch, config, bench.device, training=True)
        made = None
        if optimizer is not None or config.optimizer != "none":
            maker = optimizer_named(config.optimizer) if optimizer is None else optimizer
            made = build_optimizer(maker, model, given is not None)
        training = Training(model, model, batch, made, loss, config, device)
        stack.callback(model.zero_grad, set_to_none=True)
        if config.optimizer.endswith("-8bit"):
            # It compiles its step by itself.
            stack.enter_context(warnings_of_compiling())
        stack.enter_context(surroundings(model, config, bench.device, training=True))
        seen = dry_run(training) if config_given else DryRun()
        stack.enter_context(checkpointed(model, config))
        training.run = stack.enter_context(compiled(model, config.compile))
        phases = training.phases()
        compile_now(phases, config.compile)
        yield PreparedTrainStep(bench, training, tuple(phases), start, seen, creation_sites)


def can_run(device: Device, config: StepConfig) -> None:
    """Raises `CannotRun` when the device cannot run a step under this config."""
    for feature in (config.precision, config.checkpointing.kind.name, config.compile):
        why_not = None if feature is None else device.lacks(feature)
        if why_not is not None:
            raise CannotRun(why_not)
