"""A training step: micro-batches, scaled gradients, clipping, the optimizer, zeroed gradients; made ready under its config."""

from __future__ import annotations

from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, field
from functools import partial
from typing import TYPE_CHECKING, Any

from pytest_gpumem.steps.batches import feed, micro_batches, on_device
from pytest_gpumem.steps.checkpointing import checkpointed
from pytest_gpumem.steps.compiling import compile_now, compiled, warnings_of_compiling
from pytest_gpumem.steps.config import ConfigError
from pytest_gpumem.steps.dry_run import DryRun, dry_run
from pytest_gpumem.steps.model_step import build_model, build_optimizer, given_model, loss_of, optimizer_named
from pytest_gpumem.steps.precision import autocasting, batch_in_precision, in_precision, scaler_of
from pytest_gpumem.steps.prepared import PLAIN, PreparedStep, can_run, initialise, surroundings
from pytest_gpumem.steps.random_numbers import random_numbers_given_back
from pytest_gpumem.steps.runner import Phase
from pytest_gpumem.torch_support.private_api import compiled_graphs

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator

    import torch

    from pytest_gpumem.steps.config import StepConfig
    from pytest_gpumem.steps.model_step import Loss, ModelOrFactory, OptimizerOrFactory
    from pytest_gpumem.steps.prepared import MeasuringContext


@dataclass
class Training:
    """A training step's model, batch, optimizer and loss. ``run`` is the model as it is called: itself, or compiled."""

    model: torch.nn.Module
    run: Callable[..., Any]
    batch: Any
    optimizer: torch.optim.Optimizer | None
    loss: Loss | None
    config: StepConfig
    device: torch.device
    scaler: torch.amp.GradScaler | None = None
    before_optimizer: Callable[[], object] | None = None
    """Called when all gradients are there, in the dry run only."""
    _losses: list[torch.Tensor] = field(default_factory=list)

    def __post_init__(self) -> None:
        if self.optimizer is not None:
            self.scale_gradients()

    def phases(self) -> list[Phase]:
        """Return forward and backward of each micro-batch, then the optimizer with clipping and ``zero_grad``.

        The output lives until the loss is known, the loss until the end of the step. Gradients are freed at the end, as in
        a training loop whose step is a function, so that every step begins alike.
        """
        parts = micro_batches(self.batch, self.config.accumulate)
        phases = [
            phase
            for part in parts
            for phase in (
                Phase("forward", partial(self._forward, part, len(parts))),
                Phase("backward", self._backward),
            )
        ]
        if self.optimizer is None:
            return [*phases, Phase("backward", self._without_optimizer)]
        return [*phases, Phase("optimizer", self._optimize)]

    def scale_gradients(self) -> None:
        """Scale gradients if the precision asks for it, also without an optimizer."""
        self.scaler = scaler_of(self.config.precision, self.device)

    def scale(self) -> float | None:
        """Return the scale of the gradients; reading it waits for the device."""
        return None if self.scaler is None else self.scaler.get_scale()

    def _forward(self, batch: Any, parts: int) -> None:
        kind, argument = self.config.checkpointing
        casting = autocasting(self.config.precision, self.device, cached=kind.cached_casts)
        with casting, kind.around_forward(argument):
            loss = loss_of(feed(self.run, batch), batch, self.loss)
            # As in a loop over micro-batches, each loss takes the place of the one before.
            self._losses[:] = [loss / parts if parts > 1 else loss]

    def _backward(self) -> None:
        loss = self._losses[-1]
        if self.scaler is not None:
            loss = self.scaler.scale(loss)
        loss.backward()  # type: ignore[no-untyped-call]

    def _optimize(self) -> None:
        assert self.optimizer is not None, "phases() looks"
        if self.before_optimizer is not None:
            self.before_optimizer()
        if self.scaler is None:
            self._clip()
            self.optimizer.step()
        else:
            if self.config.clip is not None:
                self.scaler.unscale_(self.optimizer)
                self._clip()
            self.scaler.step(self.optimizer)
            self.scaler.update()
        self.optimizer.zero_grad(set_to_none=self.config.zero_grad == "set_to_none")
        self._losses.clear()

    def _without_optimizer(self) -> None:
        if self.before_optimizer is not None:
            self.before_optimizer()
        self._clip()
        self.model.zero_grad(set_to_none=self.config.zero_grad == "set_to_none")
        self._losses.clear()

    def _clip(self) -> None:
        import torch

        if self.config.clip is not None:
            torch.nn.utils.clip_grad_norm_(self.model.parameters(), self.config.clip)


@dataclass(frozen=True, slots=True, kw_only=True)
class PreparedTrainStep(PreparedStep):
    """A training step that is ready to run under its config."""

    training: Training


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
        # Gradients that were left would be in the first step and not in the others.
        given.zero_grad(set_to_none=True)
    with ExitStack() as stack:
        stack.enter_context(random_numbers_given_back(context.device))
        foreign = context.begin((given, batch, optimizer))
        with context.creation_sites() as creation_sites:
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
        tried = dry_run(training) if config_given else DryRun()
        stack.enter_context(checkpointed(model, config))
        compiles = config.compile != "none"
        if compiles:
            training.run = stack.enter_context(compiled(model, config.compile))
        phases = training.phases()
        if compiles:
            compile_now(phases, config.compile)
        # A scale that falls in every step does not show whether the next one repeats it.
        scales = training.scaler is not None and not tried.overflows
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
            notes=tried.notes,
            recomputed=tried.recomputed,
            creation_sites=creation_sites,
            training=training,
        )
