"""Estimates by formula, of packages that others have published, for the same model, batch and step.

They are called as their commands call them, with all that is known of the model: its published sizes, not a name of the hub.
"""

from __future__ import annotations

import json
import tempfile
from dataclasses import dataclass
from importlib.util import find_spec
from pathlib import Path
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from collections.abc import Callable

NEEDS = (
    "accelerate transformers, and without their dependencies: hf-mem==0.5.6 torch-kitsune==0.7.0 torch-preflight==0.5.0"
)
RANK = 8


@dataclass(frozen=True)
class Step:
    """A step to be estimated.

    ``kind`` is ``"forward"``, ``"generate"``, ``"train"`` (with AdamW) or ``"LoRA"``, of rank 8 on queries and values.
    ``length`` counts tokens of a sample; ``generated`` tokens come on top.
    """

    kind: str
    samples: int
    length: int
    half: bool
    generated: int = 0
    adapters: int = 0
    """Parameters of the adapters."""
    accumulated: int = 1


def accelerate(_: dict[str, Any], parameters: int, step: Step) -> int | None:
    """``accelerate estimate-memory``: the weights, and for training four times as many bytes."""
    from accelerate.commands.estimate import estimate_training_usage

    whole = 4 * parameters
    if step.kind == "LoRA":
        return None
    if step.kind == "train":
        return int(estimate_training_usage(whole, "bfloat16" if step.half else "float32")["step"])
    return whole // 2 if step.half else whole


def hf_mem(config: dict[str, Any], parameters: int, step: Step) -> int | None:
    """``hf-mem --experimental``: the weights, and the cache of keys and values."""
    from hf_mem.safetensors.kv_cache import compute_safetensors_kv_cache_size

    if step.kind not in ("forward", "generate"):
        return None
    weights = parameters * (2 if step.half else 4)
    known = {
        "hidden_size": config.get("hidden_size", config.get("n_embd")),
        "num_attention_heads": config.get("num_attention_heads", config.get("n_head")),
        "num_hidden_layers": config.get("num_hidden_layers", config.get("n_layer")),
        **({"num_key_value_heads": 1} if config.get("multi_query") else {}),
        **{key: config[key] for key in ("num_key_value_heads",) if key in config},
    }
    tokens = step.length + step.generated
    return weights + int(compute_safetensors_kv_cache_size(known, "BF16", tokens, step.samples))


def kitsune(config: dict[str, Any], _: int, step: Step) -> int | None:
    """``kitsune predict`` (or ``lora``, ``kv-cache``): by the modules, and 15 % on top."""
    import torch
    import transformers
    from kitsune.predict.estimator import predict_memory
    from kitsune.predict.kv_cache_estimator import estimate_kv_cache
    from kitsune.predict.lora_estimator import LoRAConfig, estimate_lora_memory

    with tempfile.TemporaryDirectory() as folder:
        Path(folder, "config.json").write_text(json.dumps(config), encoding="utf-8")
        parsed = transformers.AutoConfig.from_pretrained(folder)
    dtype = torch.bfloat16 if step.half else torch.float32
    with torch.device("meta"):
        model = getattr(transformers, config["architectures"][0])(parsed).to(dtype)
    shape = (step.length,)
    if step.kind == "generate":
        return int(estimate_kv_cache(model, step.length + step.generated, step.samples, dtype).total_bytes)
    if step.kind == "LoRA":
        targets = ["query_key_value"] if config["model_type"] == "gpt_neox" else ["q_proj", "v_proj"]
        settings = LoRAConfig(rank=RANK, target_modules=targets)
        return int(estimate_lora_memory(model, shape, step.samples, dtype, settings).total_bytes)
    trains = step.kind == "train"
    found = predict_memory(model, shape, step.samples, dtype, "adamw" if trains else "none", training=trains)
    return int(found.total_bytes)


def preflight(config: dict[str, Any], _: int, step: Step) -> int | None:
    """``torch-preflight estimate``: by the sizes of layers, less the CUDA context, which others do not count."""
    from torch_preflight.vram.costmodel import estimate
    from torch_preflight.vram.providers.hub import shape_from_config
    from torch_preflight.vram.providers.static import from_shape
    from torch_preflight.vram.types import PrecisionMode, RunConfig

    shape = shape_from_config(config)
    if shape is None:
        return None
    profile = from_shape(shape)
    run = RunConfig(
        batch_size=step.samples,
        seq_len=step.length,
        precision=PrecisionMode.PURE_BF16 if step.half else PrecisionMode.FP32,
        accumulation_steps=step.accumulated,
        generation=step.kind == "generate",
        max_context=step.length + step.generated if step.kind == "generate" else None,
        inference_only=step.kind in ("forward", "generate"),
        frozen_fraction=1 - step.adapters / profile.param_count if step.kind == "LoRA" else 0.0,
        flash_attention=config.get("attn_implementation") != "eager",
    )
    breakdown = estimate(profile, run).breakdown
    return int(breakdown.total - breakdown.cuda_context)


PEERS: dict[str, tuple[str, Callable[[dict[str, Any], int, Step], int | None]]] = {
    "accelerate": ("accelerate", accelerate),
    "hf-mem": ("hf_mem", hf_mem),
    "torch-kitsune": ("kitsune", kitsune),
    "torch-preflight": ("torch_preflight", preflight),
}
"""By the name on the package index: the module that it installs, and its estimate."""


def lacking() -> list[str]:
    """Return the names of those that are not installed."""
    return [name for name, (module, _) in PEERS.items() if find_spec(module) is None]
