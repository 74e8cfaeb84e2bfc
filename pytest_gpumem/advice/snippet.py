"""The lines of code that make a step config, for people to paste into their training loop."""

from __future__ import annotations

from typing import TYPE_CHECKING

from pytest_gpumem.steps.checkpointing import SAVED_OPERATORS
from pytest_gpumem.steps.optimizers import eight_bit_module
from pytest_gpumem.steps.precision import precision_named

if TYPE_CHECKING:
    from collections.abc import Sequence

    from pytest_gpumem.steps.config import StepConfig

    Holder = str | tuple[str, ...]
    """The path of a list of blocks, or the paths of blocks that are not a whole list."""


def recipe(config: StepConfig, device_type: str, holders: Sequence[Holder]) -> list[str]:
    """Python lines: what is done once, and the step.

    ``holders`` lead to the model's blocks. The lines use ``model``, ``batches`` (the micro-batches of a step, or the one
    batch) and ``loss_of(model, batch)``. For the configs that `advice.ladder` tries.
    """
    return [*_once(config, device_type, holders), "", *_step(config, device_type)]


def _once(config: StepConfig, device_type: str, holders: Sequence[Holder]) -> list[str]:
    kind = config.checkpointing.kind
    precision = precision_named(config.precision)
    imports, lines = ["import torch"], []
    if precision is not None and precision.weights != "float32":
        lines.append(f"model.to(torch.{precision.weights})")
    if kind in ("blocks", "ops"):
        imports.insert(0, "import functools")
        options = ""
        names = ["checkpoint"]
        if kind == "ops":
            names = ["CheckpointPolicy", "checkpoint", "create_selective_checkpoint_contexts"]
            options = ", context_fn=save_dear_operators"
            lines += _policy()
        imports.append(f"from torch.utils.checkpoint import {', '.join(names)}")
        for holder in holders:
            lines += [
                f"for block in {_reached(holder)}:",
                f"    block.forward = functools.partial(checkpoint, block.forward, use_reentrant=False{options})",
            ]
    if config.optimizer.endswith("-8bit"):
        module, name = eight_bit_module(config.optimizer)
        imports.append(f"from {module} import {name}")
        lines.append(f"optimizer = {name}(model.parameters())")
    else:
        lines.append("optimizer = torch.optim.AdamW(model.parameters())")
    if precision is not None and precision.scaled:
        lines.append(f'scaler = torch.amp.GradScaler("{device_type}")')
    return [*imports, "", *lines]


def _reached(path: Holder) -> str:
    """The expression for a list of blocks: ``model.transformer.h``, ``model``, ``model.get_submodule("0.blocks")``."""
    if not isinstance(path, str):
        names = ", ".join(f'"{one}"' for one in path)
        return f"map(model.get_submodule, [{names}])"
    if all(part.isidentifier() for part in path.split(".")):
        return f"model.{path}"
    return f'model.get_submodule("{path}")' if path else "model"


def _policy() -> list[str]:
    import torch

    operators = [name for name in SAVED_OPERATORS if hasattr(torch.ops.aten, name)]
    return [
        "SAVED = {",
        *(f"    torch.ops.aten.{name}.default," for name in operators),
        "}",
        "",
        "",
        "def save_or_recompute(context, operator, *args, **kwargs):",
        "    return CheckpointPolicy.MUST_SAVE if operator in SAVED else CheckpointPolicy.PREFER_RECOMPUTE",
        "",
        "",
        "save_dear_operators = functools.partial(create_selective_checkpoint_contexts, save_or_recompute)",
    ]


def _step(config: StepConfig, device_type: str) -> list[str]:
    precision = precision_named(config.precision)
    contexts = []
    if precision is not None and precision.autocast is not None:
        # Selective checkpointing needs each cast to be done again, as in the step that was measured.
        cache = ", cache_enabled=False" if config.checkpointing.kind == "ops" else ""
        contexts.append(f'torch.autocast("{device_type}", dtype=torch.{precision.autocast}{cache})')
    if config.checkpointing.kind == "offload":
        contexts.append("torch.autograd.graph.save_on_cpu(pin_memory=True)")
    loss = "loss = loss_of(model, batch)" + (f" / {config.accumulate}" if config.accumulate > 1 else "")
    scaled = precision is not None and precision.scaled
    several = f"  # the batch in {config.accumulate} parts" if config.accumulate > 1 else ""
    forward = [f"with {', '.join(contexts)}:", f"    {loss}"] if contexts else [loss]
    return [
        f"for batch in batches:{several}",
        *(f"    {line}" for line in [*forward, "scaler.scale(loss).backward()" if scaled else "loss.backward()"]),
        *(("scaler.step(optimizer)", "scaler.update()") if scaled else ("optimizer.step()",)),
        "optimizer.zero_grad(set_to_none=True)",
    ]
