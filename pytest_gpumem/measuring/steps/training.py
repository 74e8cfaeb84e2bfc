"""The phases of a training step: forward and backward for each micro-batch, then the optimizer with clipping and scaling."""

from __future__ import annotations

from contextlib import contextmanager, nullcontext
from dataclasses import dataclass, field
from functools import partial
from typing import TYPE_CHECKING, Any

from pytest_gpumem.measuring.measure.reading import Phase
from pytest_gpumem.measuring.step_config.checkpoint_kinds import KINDS
from pytest_gpumem.measuring.steps.batches import call_model, micro_batches
from pytest_gpumem.measuring.steps.model_step import loss_of
from pytest_gpumem.measuring.steps.precision import autocasting, scaler_of
from pytest_gpumem.measuring.steps.sharded_optimizer import clip_gradients

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator, Mapping
    from contextlib import AbstractContextManager

    import torch

    from pytest_gpumem.measuring.step_config.config import StepConfig
    from pytest_gpumem.measuring.steps.model_step import Loss
    from pytest_gpumem.measuring.steps.pipeline import Pipeline


@dataclass
class Training:
    """A training step's model, batch, optimizer and loss. ``run`` is the model or its compiled form."""

    model: torch.nn.Module
    run: Callable[..., Any]
    batch: Any
    optimizer: torch.optim.Optimizer | None
    loss: Loss | None
    config: StepConfig
    device: torch.device
    scaler: torch.amp.GradScaler | None = None
    before_optimizer: Callable[[], object] | None = None
    """A function to call before the optimizer, when all gradients exist. Only the dry run uses this."""
    pipeline: Pipeline | None = None
    """The pipeline stage on this rank; ``None`` without a pipeline. Its schedule runs forward and backward."""
    buckets: Mapping[int, torch.Tensor] | None = None
    """The same as `BuiltModel.buckets`."""
    unreduced: Callable[[], AbstractContextManager[object]] = nullcontext
    """The same as `BuiltModel.unreduced`."""
    _losses: list[torch.Tensor] = field(default_factory=list)

    def __post_init__(self) -> None:
        if self.optimizer is not None:
            self.scale_gradients()

    def phases(self) -> list[Phase]:
        """Return the step's phases: forward and backward for each micro-batch, then the optimizer.

        The model's output is freed when the loss is computed, and the loss is freed when the step ends. The optimizer phase
        clips the gradients, updates the parameters, and calls ``zero_grad``, so all steps begin in the same state.

        Example:
            With ``accumulate=2``: forward, backward, forward, backward, optimizer.
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
        """Create a gradient scaler if the precision needs it. A step with an optimizer does this by itself."""
        self.scaler = scaler_of(self.config.precision, self.device)

    def scale(self) -> float | None:
        """Return the gradients' scale; ``None`` without a gradient scaler. The call waits for the device."""
        return None if self.scaler is None else self.scaler.get_scale()

    @contextmanager
    def _around_forward(self) -> Iterator[None]:
        kind, argument = self.config.checkpointing
        casting = autocasting(self.config.precision, self.device, cached=kind.cached_casts)
        offloading = KINDS["offload"].around_forward(None) if "activations" in self.config.offloaded else nullcontext()
        with casting, kind.around_forward(argument), offloading:
            yield

    def _pipelined(self) -> None:
        assert self.pipeline is not None, "phases() has checked this"
        with self._around_forward():
            self.pipeline.run()

    def _forward(self, batch: Any, parts: int, *, last: bool) -> None:
        with nullcontext() if last else self.unreduced(), self._around_forward():
            loss = loss_of(call_model(self.run, batch), batch, self.loss)
            # Each loss replaces the previous loss, as in a loop over micro-batches.
            self._losses[:] = [loss / parts if parts > 1 else loss]

    def _backward(self) -> None:
        loss = self._losses[-1]
        if self.scaler is not None:
            loss = self.scaler.scale(loss)
        loss.backward()  # type: ignore[no-untyped-call]

    def _optimize(self) -> None:
        assert self.optimizer is not None, "phases() has checked this"
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
