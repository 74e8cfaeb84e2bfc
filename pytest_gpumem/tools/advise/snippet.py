"""Write a step config as a code snippet to paste into a training loop."""

from __future__ import annotations

import json
from dataclasses import fields
from typing import TYPE_CHECKING

from pytest_gpumem.measuring.steps.model_step import eight_bit_module
from pytest_gpumem.measuring.steps.precision import dtype_of, precision_named

if TYPE_CHECKING:
    from collections.abc import Sequence

    from pytest_gpumem.measuring.models.lora import Lora
    from pytest_gpumem.measuring.models.task import Task
    from pytest_gpumem.measuring.step_config.config import StepConfig
    from pytest_gpumem.measuring.step_config.shard_kinds import Sharding

    BlockContainer = str | tuple[str, ...]
    """Module path of a list with the model's repeated blocks, such as ``"transformer.h"``, or the paths of single blocks."""


def code_snippet(
    config: StepConfig, device_type: str, containers: Sequence[BlockContainer], lora: Lora | None = None
) -> list[str]:
    """Return Python lines for the set-up and the training step with a config.

    The lines use names from the user's code: ``model``, ``batches`` (a list with the micro-batches, or with the whole batch)
    and ``loss_of(model, batch)``.

    Args:
        config: A config for which `is_shown` is true.
        device_type: ``"cuda"`` or ``"cpu"``.
        containers: The module paths of the model's repeated blocks.
        lora: The adapters to add to the model, if any.

    Example:
        For ``amp-bf16``, the lines for the step are ::

            for batch in batches:
                with torch.autocast("cuda", dtype=torch.bfloat16):
                    loss = loss_of(model, batch)
                loss.backward()
            optimizer.step()
            optimizer.zero_grad(set_to_none=True)
    """
    return [*_set_up(config, device_type, containers, lora), "", *_step(config, device_type)]


_SHOWN = ("precision", "checkpoint", "blocks", "accumulate", "optimizer", "weights", "shard", "world", "rank", "reduce")


def is_shown(config: StepConfig) -> bool:
    """Return whether a snippet exists for a config. All configs in a search have a snippet, but some configs named by users
    have none.
    """
    other_fields = [field.name for field in fields(config) if field.name not in _SHOWN]
    default = type(config)()
    precision, sharding = precision_named(config.precision), config.sharding
    return (
        all(getattr(config, name) == getattr(default, name) for name in other_fields)
        and config.optimizer in ("adamw", "adamw-8bit")
        and (precision is None or not precision.tf32)
        and (sharding is None or _is_sharding_shown(config, sharding))
    )


def _is_sharding_shown(config: StepConfig, sharding: Sharding) -> bool:
    """Return whether a snippet exists for a sharding.

    Tensor parallelism needs a plan for each model, and micro-batches with DDP need ``no_sync``, so no snippet exists for
    either.
    """
    kind = sharding.data
    if kind is None or sharding.parts:
        return False
    optimizer = config.optimizer == "adamw" or not kind.shards_optimizer
    return optimizer and (config.accumulate == 1 or not kind.wrapped)


def code_of(config: StepConfig, device_type: str, containers: Sequence[BlockContainer], task: Task) -> list[str]:
    """Return the code for a config and a task, or a comment with the config's name if there is no snippet."""
    if not is_shown(config) or (config.blocks is not None and not containers):
        return [f'# no snippet exists; a test can pass config="{config}" to a step of the fixture']
    if task.trains:
        return code_snippet(config, device_type, containers, task.lora)
    return inference_snippet(config, device_type, task.new_tokens)


def inference_snippet(config: StepConfig, device_type: str, new_tokens: int | None = None) -> list[str]:
    """Return Python lines for an inference step, or for a generation with ``new_tokens`` tokens.

    The lines use the names ``model`` and ``batch`` from the user's code. Only the config's precision and weights are used.
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


def _set_up(config: StepConfig, device_type: str, containers: Sequence[BlockContainer], lora: Lora | None) -> list[str]:
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
            lines += [f"for block in {_blocks_expression(container)}:", f"    {snippet.each_block}"]
    if config.sharding is not None:
        needed, sharded = _shard_lines(config, config.sharding, device_type, containers)
        imports += needed
        lines += sharded
    if config.sharding is not None and config.sharding.data is not None and config.sharding.data.shards_optimizer:
        imports.append("from torch.distributed.optim import ZeroRedundancyOptimizer")
        # ZeroRedundancyOptimizer distributes all its parameters by size, even frozen ones. So pass only the trained parameters.
        trained = (
            "model.parameters()"
            if lora is None
            else "[weight for weight in model.parameters() if weight.requires_grad]"
        )
        lines.append(f"optimizer = ZeroRedundancyOptimizer({trained}, torch.optim.AdamW)")
    elif config.optimizer.endswith("-8bit"):
        module, name = eight_bit_module(config.optimizer)
        imports.append(f"from {module} import {name}")
        lines.append(f"optimizer = {name}(model.parameters())")
    else:
        lines.append("optimizer = torch.optim.AdamW(model.parameters())")
    if precision is not None and precision.scaled:
        lines.append(f'scaler = torch.amp.GradScaler("{device_type}")')
    return [*sorted(imports, key=lambda line: line.startswith("from ")), "", *lines]


def _shard_lines(
    config: StepConfig, sharding: Sharding, device_type: str, containers: Sequence[BlockContainer]
) -> tuple[list[str], list[str]]:
    """Return the imports and the other lines for sharding the model among ranks."""
    layout = sharding.over(config.world, config.rank)
    imports = ["import torch.distributed"]
    lines = [
        f"torch.distributed.init_process_group()  # torchrun starts {layout.world} such processes, each with a device"
    ]
    if not sharding.fully:
        return [*imports, "from torch.nn.parallel import DistributedDataParallel"], [
            *lines,
            "model = DistributedDataParallel(model)",
        ]
    assert sharding.data is not None, "this kind shards data"
    arguments, needed = [], ["fully_shard"]
    if sharding.replicas > 1:
        imports.append("from torch.distributed.device_mesh import init_device_mesh")
        dims = f'({sharding.replicas}, {layout.shards}), mesh_dim_names=("copies", "data")'
        lines.append(f'mesh = init_device_mesh("{device_type}", {dims})')
        arguments.append("mesh=mesh")
    precision = precision_named(config.precision)
    dtypes = {
        "param_dtype": None if precision is None else precision.computed,
        "reduce_dtype": None if config.reduce is None else dtype_of(config.reduce),
    }
    if any(dtypes.values()):
        needed.insert(0, "MixedPrecisionPolicy")
        policy_arguments = ", ".join(f"{name}=torch.{dtype}" for name, dtype in dtypes.items() if dtype)
        lines.append(f"policy = MixedPrecisionPolicy({policy_arguments})")
        arguments.append("mp_policy=policy")
    if sharding.data.reshard_after_forward is not None:
        arguments.append(f"reshard_after_forward={sharding.data.reshard_after_forward}")
    for container in containers:
        lines += [
            f"for block in {_blocks_expression(container)}:",
            f"    fully_shard({', '.join(['block', *arguments])})",
        ]
    lines.append(f"fully_shard({', '.join(['model', *arguments])})")
    return [*imports, f"from torch.distributed.fsdp import {', '.join(needed)}"], lines


def _blocks_expression(path: BlockContainer) -> str:
    """Return a Python expression for the blocks, such as ``model.transformer.h`` or ``model.get_submodule("0.blocks")``."""
    if not isinstance(path, str):
        names = ", ".join(f'"{block}"' for block in path)
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
    several = f"  # the batch as {config.accumulate} micro-batches" if config.accumulate > 1 else ""
    forward = [f"with {', '.join(contexts)}:", f"    {loss}"] if contexts else [loss]
    return [
        f"for batch in batches:{several}",
        *(f"    {line}" for line in [*forward, "scaler.scale(loss).backward()" if scaled else "loss.backward()"]),
        *(("scaler.step(optimizer)", "scaler.update()") if scaled else ("optimizer.step()",)),
        "optimizer.zero_grad(set_to_none=True)",
    ]
