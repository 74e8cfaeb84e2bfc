"""One stage of a pipeline over ranks, run by torch's schedule with as many live micro-batches as it has there."""

from __future__ import annotations

import warnings
from contextlib import ExitStack
from typing import TYPE_CHECKING, Any

from pytest_gpumem.step_config.blocks import repeated_blocks
from pytest_gpumem.step_config.checkpoint_kinds import in_segments
from pytest_gpumem.step_config.errors import ConfigError
from pytest_gpumem.steps.batches import arguments_of, mapped, micro_batches
from pytest_gpumem.steps.model_step import loss_of
from pytest_gpumem.steps.surroundings import caching

if TYPE_CHECKING:
    from collections.abc import Iterable

    import torch
    from torch.distributed import ProcessGroup

    from pytest_gpumem.step_config.config import StepConfig
    from pytest_gpumem.steps.model_step import Loss


class Pipeline:
    """This rank's stage of a model that is split between its repeated blocks, run by the 1F1B schedule.

    ``module`` is the part of the model that this rank holds. The model is traced with ``torch.export``, so it has to be one
    that this can trace.
    """

    def __init__(
        self,
        model: torch.nn.Module,
        buffers: Iterable[tuple[str, torch.Tensor]],
        batch: Any,
        loss: Loss | None,
        config: StepConfig,
        group: ProcessGroup,
        device: torch.device,
    ) -> None:
        """Split the model, whose parameters are on meta afterwards.

        Args:
            model: The whole model, on meta.
            buffers: Its buffers on the device, with their values, by name.
            batch: All micro-batches. Each of its tensors has the samples in its first dimension.
            loss: A function of output and batch.
            config: Says how many micro-batches there are.
            group: The ranks that have a stage each.
            device: The device that runs the stage.

        Raises:
            ConfigError: The model cannot be split so; the message says why.
        """
        from torch.distributed.pipelining import Schedule1F1B, SplitPoint, pipeline

        parts = micro_batches(batch, config.accumulate)
        self._batch, self._parts, self._loss = batch, parts, loss
        stages, number = group.size(), group.rank()
        if len(parts) < stages:
            raise ConfigError(
                f"shard={config.shard}: 1F1B runs at least as many micro-batches as there are stages; "
                f"add accumulate={stages} or more"
            )
        lists = repeated_blocks(model, config.blocks)
        (blocks,) = lists if len(lists) == 1 else ([block for one in lists for block in one],)
        try:
            first = [segment[0].path for segment in in_segments([blocks], stages)]
        except ValueError as error:
            raise ConfigError(f"shard={config.shard}: {error}") from None
        args, kwargs = arguments_of(mapped(parts[0], lambda tensor: tensor.to("meta")))
        with warnings.catch_warnings(), ExitStack() as stack:
            # What exporting says about itself.
            warnings.simplefilter("ignore")
            stack.enter_context(caching(model, False, required=False))
            try:
                split = pipeline(model, args, kwargs, split_spec=dict.fromkeys(first[1:], SplitPoint.BEGINNING))
            except Exception as error:
                raise ConfigError(
                    f"shard={config.shard}: torch.distributed.pipelining cannot split {type(model).__name__}: "
                    + _innermost(error)
                ) from error
            self._takes = _inputs_of_first_stage(split.split_gm.graph, config)
            stage = split.build_stage(number, device, group)
        self.module: torch.nn.Module = stage.submod
        _put_buffers(self.module, dict(buffers))
        self._is_first, self._is_last = number == 0, number == stages - 1
        # Without a loss no stage runs backward.
        self._schedule = Schedule1F1B(stage, len(parts), loss_fn=self._loss_of)
        holders = sorted({block.path.rpartition(".")[0] for block in blocks})
        self.blocks = f"{holders[0]}.*" if len(holders) == 1 else config.blocks
        """The pattern of the blocks: what is traced has lost the lists that they were in."""

    def run(self) -> None:
        """Run forward and backward of all micro-batches, in the schedule's order."""
        import torch

        args, kwargs = arguments_of(self._batch)
        # The trace has the positional ones first. What no stage takes is not given to the first one.
        first = self._takes if self._is_first else ()
        positional = [one for one, taken in zip(args, first, strict=False) if taken]
        named = zip(kwargs.items(), first[len(args) :], strict=False)
        given: dict[str, Any] = {name: value for (name, value), taken in named if taken}
        if self._is_last:
            given["target"] = torch.arange(len(self._parts))
        self._schedule.step(*positional, **given)

    def _loss_of(self, output: Any, number: torch.Tensor) -> torch.Tensor:
        """Return the loss of a micro-batch, which the schedule names by its number."""
        return loss_of(output, self._parts[int(number)], self._loss)


def _inputs_of_first_stage(graph: torch.fx.Graph, config: StepConfig) -> tuple[bool, ...]:
    """Return of each of the model's inputs whether the first stage takes it, from the graph that calls the stages.

    Raises:
        ConfigError: A later stage takes one: it gets only what the stage before returns.
    """
    inputs = [node for node in graph.nodes if node.op == "placeholder"]
    stages = [node for node in graph.nodes if node.op == "call_module"]
    for one in inputs:
        late = max((stages.index(user) for user in one.users if user in stages), default=0)
        if late > 0:
            raise ConfigError(
                f"shard={config.shard}: stage {late} takes the model's input {one.name!r} itself, and stages after the first "
                "get only what the one before returns; have the blocks pass it on, or make it in the model"
            )
    return tuple(bool(one.users) for one in inputs)


def _innermost(error: BaseException) -> str:
    """Return the first line of the error that torch wrapped in others."""
    while error.__cause__ is not None:
        error = error.__cause__
    return f"{type(error).__name__}: {error}".partition("\n")[0]


def _put_buffers(module: torch.nn.Module, buffers: dict[str, torch.Tensor]) -> None:
    """Give the module's buffers, which are on meta, their values."""
    for path, owner in module.named_modules():
        for name, _ in list(owner.named_buffers(recurse=False)):
            value = buffers.get(f"{path}.{name}" if path else name)
            if value is not None:
                setattr(owner, name, value)
