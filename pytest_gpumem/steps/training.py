"""A training step: micro-batches, scaled gradients, clipping, the optimizer, zeroed gradients; made ready under its config."""

from __future__ import annotations

from contextlib import ExitStack, contextmanager, nullcontext
from dataclasses import dataclass, field, replace
from functools import partial
from typing import TYPE_CHECKING, Any

from pytest_gpumem.steps.batches import feed, micro_batches, on_device
from pytest_gpumem.steps.checkpoint_kinds import KINDS
from pytest_gpumem.steps.checkpointing import checkpointed
from pytest_gpumem.steps.compiling import compile_now, compiled, warnings_of_compiling
from pytest_gpumem.steps.config import ConfigError
from pytest_gpumem.steps.dry_run import DryRun, counted_again, dry_run
from pytest_gpumem.steps.model_step import Built, build_model, build_optimizer, given_model, loss_of, optimizer_named
from pytest_gpumem.steps.precision import autocasting, batch_in_precision, in_precision, scaler_of
from pytest_gpumem.steps.prepared import PLAIN, PreparedStep, can_run, initialise, surroundings
from pytest_gpumem.steps.process_group import layout_in_process_group
from pytest_gpumem.steps.random_numbers import random_numbers_given_back
from pytest_gpumem.steps.reading import Phase
from pytest_gpumem.steps.sharded_optimizer import adapted, clip_gradients, local_optimizer
from pytest_gpumem.steps.sharding import build_sharded, part_of_sequence, sequence_shared
from pytest_gpumem.torch_support.private_api import compiled_graphs

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator, Mapping
    from contextlib import AbstractContextManager

    import torch

    from pytest_gpumem.steps.config import StepConfig
    from pytest_gpumem.steps.model_step import Loss, ModelOrFactory, OptimizerOrFactory
    from pytest_gpumem.steps.pipeline import Pipeline
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
    pipeline: Pipeline | None = None
    """The stage whose schedule is forward and backward of all micro-batches."""
    buckets: Mapping[int, torch.Tensor] | None = None
    """As of `Built`."""
    unreduced: Callable[[], AbstractContextManager[object]] = nullcontext
    """A context around forward in which backward leaves gradients as this rank's own."""
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
            for number, part in enumerate(parts, 1)
            for phase in (
                Phase("forward", partial(self._forward, part, len(parts), last=number == len(parts))),
                Phase("backward", self._backward),
            )
        ]
        if self.pipeline is not None:
            phases = [Phase("backward", self._pipelined)]
        if self.optimizer is None:
            return [*phases, Phase("backward", self._without_optimizer)]
        return [*phases, Phase("optimizer", self._optimize)]

    def scale_gradients(self) -> None:
        """Scale gradients if the precision asks for it, also without an optimizer."""
        self.scaler = scaler_of(self.config.precision, self.device)

    def scale(self) -> float | None:
        """Return the scale of the gradients; reading it waits for the device."""
        return None if self.scaler is None else self.scaler.get_scale()

    @contextmanager
    def _around_forward(self) -> Iterator[None]:
        kind, argument = self.config.checkpointing
        casting = autocasting(self.config.precision, self.device, cached=kind.cached_casts)
        offloading = KINDS["offload"].around_forward(None) if "activations" in self.config.offloaded else nullcontext()
        with casting, kind.around_forward(argument), offloading:
            yield

    def _pipelined(self) -> None:
        assert self.pipeline is not None, "phases() looks"
        with self._around_forward():
            self.pipeline.run()

    def _forward(self, batch: Any, parts: int, *, last: bool) -> None:
        with nullcontext() if last else self.unreduced(), self._around_forward():
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
            clip = torch.nn.utils.clip_grad_norm_ if self.config.sharding is None else clip_gradients
            clip(self.model.parameters(), self.config.clip)


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
    config_given, config = config is not None, config or PLAIN
    said = config
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
        foreign = context.begin((given, batch, optimizer))
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
        tried = dry_run(training, context.together) if config_given else DryRun()
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
            name="train_step",
            phases=phases,
            foreign=foreign,
            held=(model, batch, made, training.scaler, built.buckets),
            model=model,
            optimizer=local_optimizer(made) if made is not None and shared else made,
            batch=batch,
            config=said,
            items=items,
            state=(lambda: (compiled_graphs(), training.scale() if scales else None)) if compiles or scales else None,
            notes=(*built.notes, *tried.notes),
            creation_sites=built.creation_sites,
            buckets={} if built.buckets is None else built.buckets,
            training=training,
            again=again,
        )
