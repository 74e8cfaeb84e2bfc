"""Activation checkpointing for any model, without changes in the model's code.

Forward does not save some activations, and backward recomputes them.
"""

from __future__ import annotations

import functools
from collections import Counter
from contextlib import ExitStack, contextmanager
from typing import TYPE_CHECKING, Any

from pytest_gpumem.base.errors import ConfigError
from pytest_gpumem.base.units import word_form
from pytest_gpumem.measuring.step_config.blocks import (
    Block,
    described,
    modules_matching,
    pattern_of_called,
    repeated_blocks,
)
from pytest_gpumem.measuring.step_config.checkpoint_kinds import each_alone
from pytest_gpumem.measuring.steps.segments import Segment
from pytest_gpumem.torch_support.static_access import class_name, instance_dict, is_a

if TYPE_CHECKING:
    from collections.abc import Callable, Container, Iterator, Sequence

    import torch

    from pytest_gpumem.measuring.step_config.config import StepConfig
    from pytest_gpumem.measuring.steps.segments import Forward


class BlockRuns:
    """Counter for the calls and runs of each checkpointed part (a block, a module, or a segment with several blocks).

    The model calls a part in forward. Backward runs the part again without a call, so a recomputed part has more runs than
    calls.

    Example:
        A block that is called once in forward and recomputed in backward has 1 call and 2 runs.
    """

    def __init__(self) -> None:
        self.calls: Counter[str] = Counter()
        self.runs: Counter[str] = Counter()
        self.segments: list[Segment] = []
        self.modules: set[int] = set()
        """The ids of all modules called within `watched`, also of modules in other models."""

    def again(self) -> int:
        """Return how many calls backward has recomputed so far."""
        return self.runs.total() - self.calls.total()

    @contextmanager
    def watched(self) -> Iterator[None]:
        """Record the modules called within the context."""
        from torch.nn.modules.module import register_module_forward_pre_hook

        with register_module_forward_pre_hook(lambda module, _inputs: self.modules.add(id(module))):
            yield

    def check(self, model: torch.nn.Module, config: StepConfig) -> None:
        """Raise `ConfigError` if backward recomputed no checkpointed part.

        A single recomputed part is enough, because a step may skip other parts, for example with LayerDrop.
        """
        if not self.calls:
            return
        for segment in self.segments:
            segment.check_ended()
        idle = [path for path in self.calls if not self.calls[path]]
        if len(idle) == len(self.calls):
            raise ConfigError(f"checkpoint={config.checkpoint}: {_none_ran(model, config, self.modules, idle)}")
        saved = [path for path in self.calls if self.calls[path]]
        if not any(self.runs[path] > self.calls[path] for path in saved):
            raise ConfigError(
                f"checkpoint={config.checkpoint}: {_some(saved)} ran in forward, but backward did not recompute any of "
                "these modules (they are frozen, or no gradient flows through them)"
            )


@contextmanager
def activation_checkpointing(
    model: torch.nn.Module, config: StepConfig, runs: BlockRuns | None = None
) -> Iterator[None]:
    """Apply ``config.checkpoint`` within the context: forward saves only some activations, and backward recomputes the others.

    Modules, parameters and their names do not change. Only the ``forward`` methods of some modules are replaced, and restored
    at the end. Forward and recomputation draw the same random numbers.

    Args:
        model: The model.
        config: The step config.
        runs: The counter for calls and runs; ``None`` to count nothing, as for a compiled model.

    Raises:
        ConfigError: The model has no block or module to recompute.
    """
    with ExitStack() as stack:
        for module, forward in _replacements(model, config, runs):
            stack.enter_context(_forward_replaced(module, forward))
        if runs is not None:
            stack.enter_context(runs.watched())
        kind, argument = config.checkpointing
        stack.enter_context(kind.setting(argument))
        yield


def _replacements(
    model: torch.nn.Module, config: StepConfig, runs: BlockRuns | None
) -> Iterator[tuple[torch.nn.Module, Forward]]:
    ops = config.checkpointing.kind.saved_ops
    options = {"context_fn": _saving(ops)} if ops else {}
    for blocks in _recomputed(model, config):
        path = blocks[0].path if len(blocks) == 1 else f"{blocks[0].path} to {blocks[-1].path}"
        recompute = _recompute(path, runs, options)
        if len(blocks) == 1:
            forwards = [_recomputing(blocks[0].module.forward, recompute)]
        else:
            segment = Segment(blocks, recompute)
            forwards = segment.forwards()
            if runs is not None:
                runs.segments.append(segment)
        for block, forward in zip(blocks, forwards, strict=True):
            yield block.module, functools.wraps(block.module.forward)(forward)


def _recomputed(model: torch.nn.Module, config: StepConfig) -> list[Sequence[Block]]:
    """Return groups of modules. Backward recomputes each group as a whole. Raises `ConfigError` if there are no groups."""
    kind, argument = config.checkpointing
    if kind.recomputed is None:
        return []
    lists = repeated_blocks(model, config.blocks) if kind.on_blocks else [_modules(model, config, argument)]
    try:
        groups = list(kind.recomputed(lists, argument))
    except ValueError as error:
        raise ConfigError(str(error)) from None
    if not groups:
        longest = max(map(len, lists))
        raise ConfigError(
            f"checkpoint={config.checkpoint}: the longest list of blocks in {type(model).__name__} has only {longest} blocks"
        )
    return groups


def _modules(model: torch.nn.Module, config: StepConfig, pattern: str) -> list[Block]:
    import torch

    matching = modules_matching(model, pattern)
    for path, module in matching:
        if is_a(module, torch.nn.ModuleList, torch.nn.ModuleDict):
            raise ConfigError(
                f"checkpoint={config.checkpoint}: {path} is a {type(module).__name__}, which is never called; "
                f"write checkpoint={config.checkpointing.kind.name}:{path}.*"
            )
    return matching


def _recomputing(forward: Forward, recompute: Callable[..., Any]) -> Forward:
    def recomputed(*args: Any, **kwargs: Any) -> Any:
        return recompute(forward, *args, **kwargs)

    return recomputed


def _recompute(path: str, runs: BlockRuns | None, options: dict[str, Any]) -> Callable[..., Any]:
    """Return ``recompute(function, *args)``, which runs ``function`` now, and again in backward if gradients are enabled."""
    import torch
    from torch.utils.checkpoint import checkpoint

    def recompute(function: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
        if not torch.is_grad_enabled():
            return function(*args, **kwargs)
        return checkpoint(function, *args, use_reentrant=False, **options, **kwargs)

    if runs is None:
        return recompute
    runs.calls[path] = 0

    def counted(function: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
        def run(*args: Any, **kwargs: Any) -> Any:
            runs.runs[path] += 1
            return function(*args, **kwargs)

        runs.calls[path] += 1
        return recompute(run, *args, **kwargs)

    return counted


def _saving(ops: Sequence[str]) -> Callable[[], Any]:
    """Return a ``context_fn`` for ``checkpoint``, which saves the outputs of these ATen operators.

    Backward recomputes the outputs of all other operators.
    """
    import torch
    from torch.utils.checkpoint import CheckpointPolicy, create_selective_checkpoint_contexts

    packets = [getattr(torch.ops.aten, name) for name in ops if hasattr(torch.ops.aten, name)]
    saved = {getattr(packet, overload) for packet in packets for overload in packet.overloads()}

    def policy(_context: object, operator: object, *_args: object, **_kwargs: object) -> CheckpointPolicy:
        return CheckpointPolicy.MUST_SAVE if operator in saved else CheckpointPolicy.PREFER_RECOMPUTE

    return functools.partial(create_selective_checkpoint_contexts, policy)


@contextmanager
def _forward_replaced(module: torch.nn.Module, forward: Forward) -> Iterator[None]:
    attributes = instance_dict(module)
    assert attributes is not None, "a module has an instance dict"
    # Write to the instance dict directly, because a module may override __setattr__.
    original = dict.get(attributes, "forward")
    dict.__setitem__(attributes, "forward", forward)
    try:
        yield
    finally:
        if original is None:
            dict.pop(attributes, "forward")
        else:
            dict.__setitem__(attributes, "forward", original)


def _none_ran(model: torch.nn.Module, config: StepConfig, called: Container[int], idle: list[str]) -> str:
    """Return a message for a step in which no checkpointed module ran.

    If blocks are checkpointed, the message suggests a pattern for modules that forward calls.
    """
    if not config.checkpointing.kind.on_blocks:
        return f"{_some(idle)} did not run in this step"
    lists = repeated_blocks(model, config.blocks)
    name = class_name(type(model))
    source = f"blocks={config.blocks} selects" if config.blocks else f"the blocks of {name} were detected as"
    members = word_form(len(lists), "the modules in", "the modules in the lists")
    reason = f"{source} {members} {described(lists)}, but forward calls none of these modules"
    running = pattern_of_called(model, called)
    if running is None:
        return f"{reason}; name modules that forward calls with blocks=PATTERN"
    pattern, blocks = running
    # Segments need a loop that passes a single tensor from block to block. The suggested modules may have no such loop, so
    # suggest checkpoint=blocks.
    kind = config.checkpoint if config.checkpointing.kind.recomputed is each_alone else "blocks"
    example = f"checkpoint={kind},blocks={pattern}"
    return f"{reason}; name modules that forward calls, such as {described([blocks])} with '{example}'"


def _some(paths: list[str]) -> str:
    return ", ".join(paths[:3]) + (f" and {len(paths) - 3} more" if len(paths) > 3 else "")
