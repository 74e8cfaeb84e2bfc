"""A pipeline stage, run by torch's 1F1B schedule, which alternates one forward with one backward.

Even if no other rank exists, a stage has as many live micro-batches as in a real pipeline.
"""

from __future__ import annotations

import warnings
from contextlib import ExitStack
from typing import TYPE_CHECKING, Any

from pytest_gpumem.base.errors import ConfigError
from pytest_gpumem.measuring.step_config.blocks import repeated_blocks
from pytest_gpumem.measuring.step_config.checkpoint_kinds import in_segments
from pytest_gpumem.measuring.steps.batches import arguments_of, map_tensors, micro_batches
from pytest_gpumem.measuring.steps.global_settings import caching
from pytest_gpumem.measuring.steps.model_step import loss_of

if TYPE_CHECKING:
    from collections.abc import Iterable

    import torch
    from torch.distributed import ProcessGroup

    from pytest_gpumem.measuring.step_config.config import StepConfig
    from pytest_gpumem.measuring.steps.model_step import Loss


class Pipeline:
    """This rank's stage in a model that is split between its repeated blocks. The 1F1B schedule runs the stage.

    ``module`` is the part of the model on this rank. ``torch.export`` must be able to trace the model.

    Example:
        A model with 8 blocks over 4 ranks: stage 1 is on rank 1 and contains blocks 2 and 3.
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
        """Split the model. Parameters stay on meta.

        Args:
            model: The complete model, on meta.
            buffers: The model's buffers on the device, with values, by name.
            batch: The complete batch, with all micro-batches. Each tensor's first dimension is the number of samples.
            loss: A function with the arguments output and batch.
            config: The step config, with the number of micro-batches in ``accumulate``.
            group: The process group. Each rank in the group runs a stage.
            device: The stage's device.

        Raises:
            ConfigError: The model cannot be split in this way. The message has the reason.
        """
        from torch.distributed.pipelining import Schedule1F1B, SplitPoint, pipeline

        parts = micro_batches(batch, config.accumulate)
        self._batch, self._parts, self._loss = batch, parts, loss
        stages, number = group.size(), group.rank()
        if len(parts) < stages:
            raise ConfigError(
                f"shard={config.shard}: the 1F1B schedule needs at least as many micro-batches as stages; "
                f"add accumulate={stages} or more"
            )
        lists = repeated_blocks(model, config.blocks)
        (blocks,) = lists if len(lists) == 1 else ([block for block_list in lists for block in block_list],)
        try:
            first = [segment[0].path for segment in in_segments([blocks], stages)]
        except ValueError as error:
            raise ConfigError(f"shard={config.shard}: {error}") from None
        args, kwargs = arguments_of(map_tensors(parts[0], lambda tensor: tensor.to("meta")))
        with warnings.catch_warnings(), ExitStack() as stack:
            # torch.export warns about its own internals.
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
        # Without a loss function, the schedule would run no backward.
        self._schedule = Schedule1F1B(stage, len(parts), loss_fn=self._loss_of)
        holders = sorted({block.path.rpartition(".")[0] for block in blocks})
        self.blocks = f"{holders[0]}.*" if len(holders) == 1 else config.blocks
        """The pattern for repeated blocks in `module`. They cannot be detected, because a traced module has no block lists."""

    def run(self) -> None:
        """Run forward and backward of all micro-batches, in the schedule's order."""
        import torch

        args, kwargs = arguments_of(self._batch)
        # `_takes` has a flag for each model input, positional inputs first. Pass only inputs that the first stage takes.
        is_taken_by_first = self._takes if self._is_first else ()
        positional = [argument for argument, is_taken in zip(args, is_taken_by_first, strict=False) if is_taken]
        keyword_pairs = zip(kwargs.items(), is_taken_by_first[len(args) :], strict=False)
        keywords: dict[str, Any] = {name: value for (name, value), is_taken in keyword_pairs if is_taken}
        if self._is_last:
            keywords["target"] = torch.arange(len(self._parts))
        self._schedule.step(*positional, **keywords)

    def _loss_of(self, output: Any, number: torch.Tensor) -> torch.Tensor:
        """Return a micro-batch's loss. The schedule passes the number of the micro-batch in place of a target."""
        return loss_of(output, self._parts[int(number)], self._loss)


def _inputs_of_first_stage(graph: torch.fx.Graph, config: StepConfig) -> tuple[bool, ...]:
    """Return a flag for each model input: True if the first stage takes this input.

    Args:
        graph: The graph that calls the stages.
        config: The step config, for messages.

    Raises:
        ConfigError: A stage after the first takes a model input, but such a stage gets only the previous stage's result.
    """
    inputs = [node for node in graph.nodes if node.op == "placeholder"]
    stages = [node for node in graph.nodes if node.op == "call_module"]
    for model_input in inputs:
        last_stage = max((stages.index(user) for user in model_input.users if user in stages), default=0)
        if last_stage > 0:
            raise ConfigError(
                f"shard={config.shard}: stage {last_stage} takes the model's input {model_input.name!r}, but stages after the "
                "first get only the previous stage's result; pass the input on through the blocks, or create it in the model"
            )
    return tuple(bool(model_input.users) for model_input in inputs)


def _innermost(error: BaseException) -> str:
    """Return the first line of the original error, which torch has wrapped in other errors."""
    while error.__cause__ is not None:
        error = error.__cause__
    return f"{type(error).__name__}: {error}".partition("\n")[0]


def _put_buffers(module: torch.nn.Module, buffers: dict[str, torch.Tensor]) -> None:
    """Replace the module's buffers on meta with buffers that have values."""
    for path, owner in module.named_modules():
        for name, _ in list(owner.named_buffers(recurse=False)):
            value = buffers.get(f"{path}.{name}" if path else name)
            if value is not None:
                setattr(owner, name, value)
