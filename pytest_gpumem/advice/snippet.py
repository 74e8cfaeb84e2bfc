"""Code snippet of a step config, for people to paste into their training loop."""

from __future__ import annotations

import json
from dataclasses import fields
from typing import TYPE_CHECKING

from pytest_gpumem.steps.model_step import eight_bit_module
from pytest_gpumem.steps.precision import precision_named

if TYPE_CHECKING:
    from collections.abc import Sequence

    from pytest_gpumem.models.lora import Lora
    from pytest_gpumem.models.task import Task
    from pytest_gpumem.step_config.config import StepConfig

    BlockContainer = str | tuple[str, ...]
    """The path of a list of blocks, or the paths of blocks that are not a whole list."""


def code_snippet(
    config: StepConfig, device_type: str, containers: Sequence[BlockContainer], lora: Lora | None = None
) -> list[str]:
    """Return lines of Python: the set-up, with adapters if there are any, and the step.

    ``containers`` have the model's blocks. The lines use ``model``, ``batches`` (the micro-batches of a step, or the one
    batch) and ``loss_of(model, batch)``. For the configs that `advice.search_order` tries.
    """
    return [*_once(config, device_type, containers, lora), "", *_step(config, device_type)]


_SHOWN = ("precision", "checkpoint", "blocks", "accumulate", "optimizer", "weights")


def is_shown(config: StepConfig) -> bool:
    """Return whether the code of a config is known here, as of all that are searched: not of every one that may be named."""
    others = [one.name for one in fields(config) if one.name not in _SHOWN]
    default = type(config)()
    precision = precision_named(config.precision)
    return (
        all(getattr(config, name) == getattr(default, name) for name in others)
        and config.optimizer in ("adamw", "adamw-8bit")
        and (precision is None or not (precision.tf32 or precision.computed))
    )


def code_of(config: StepConfig, device_type: str, containers: Sequence[BlockContainer], task: Task) -> list[str]:
    """Return the code that makes a config, of what the model does; or how it is named, where its code is not known here."""
    if not is_shown(config):
        return [f'# as in @pytest.mark.gpumem and fixtures: config="{config}"']
    if task.trains:
        return code_snippet(config, device_type, containers, task.lora)
    return inference_snippet(config, device_type, task.new_tokens)


def inference_snippet(config: StepConfig, device_type: str, new_tokens: int | None = None) -> list[str]:
    """Return lines of Python that run a model under a config of `search_order.INFERENCE`, or have it generate ``new_tokens``.

    They use ``model`` and ``batch``.
    """
    imports, lines = ["import torch"], []
    precision = precision_named(config.precision)
    if precision is not None and precision.weights != "float32":
        lines.append(f"model.to(torch.{precision.weights})")
    if config.weights is not None:
        imports.append("from torchao.quantization import Int8WeightOnlyConfig, quantize_")
        lines.append("quantize_(model, Int8WeightOnlyConfig())")
    contexts = ["torch.inference_mode()"]
    if precision is not None and precision.autocast is not None:
        contexts.append(f'torch.autocast("{device_type}", dtype=torch.{precision.autocast})')
    call = "model(**batch)"
    if new_tokens is not None:
        call = f"model.generate(**batch, max_new_tokens={new_tokens}, do_sample=False, num_beams=1)"
    return [*imports, "", "model.eval()", *lines, f"with {', '.join(contexts)}:", f"    output = {call}"]


def _once(config: StepConfig, device_type: str, containers: Sequence[BlockContainer], lora: Lora | None) -> list[str]:
    snippet = config.checkpointing.kind.snippet
    precision = precision_named(config.precision)
    imports, lines = [*snippet.imports], []
    if lora is not None:
        imports.append("from peft import LoraConfig, get_peft_model")
        arguments = ", ".join(f"{name}={json.dumps(value)}" for name, value in lora.arguments().items())
        lines.append(f"model = get_peft_model(model, LoraConfig({arguments}))")
    if precision is not None and precision.weights != "float32":
        lines.append(f"model.to(torch.{precision.weights})")
    lines += snippet.setup()
    if snippet.each_block:
        for container in containers:
            lines += [f"for block in {_reached(container)}:", f"    {snippet.each_block}"]
    if config.optimizer.endswith("-8bit"):
        module, name = eight_bit_module(config.optimizer)
        imports.append(f"from {module} import {name}")
        lines.append(f"optimizer = {name}(model.parameters())")
    else:
        lines.append("optimizer = torch.optim.AdamW(model.parameters())")
    if precision is not None and precision.scaled:
        lines.append(f'scaler = torch.amp.GradScaler("{device_type}")')
    return [*imports, "", *lines]


def _reached(path: BlockContainer) -> str:
    """Return the expression for a list of blocks: ``model.transformer.h``, ``model``, ``model.get_submodule("0.blocks")``."""
    if not isinstance(path, str):
        names = ", ".join(f'"{one}"' for one in path)
        return f"map(model.get_submodule, [{names}])"
    if all(part.isidentifier() for part in path.split(".")):
        return f"model.{path}"
    return f'model.get_submodule("{path}")' if path else "model"


def _step(config: StepConfig, device_type: str) -> list[str]:
    precision, kind = precision_named(config.precision), config.checkpointing.kind
    contexts = []
    if precision is not None and precision.autocast is not None:
        cache = "" if kind.cached_casts else ", cache_enabled=False"
        contexts.append(f'torch.autocast("{device_type}", dtype=torch.{precision.autocast}{cache})')
    if kind.snippet.around_forward:
        contexts.append(kind.snippet.around_forward)
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
