"""Training steps of PEFT's methods on Llama 3.2 3B's shapes, as PEFT's comparison of methods makes them.

Weights are what the initialisation launches, tokens are random: peaks do not depend on values, but for the padding mask,
which decides how attention is computed. `published_finetuning.py` calls it.
"""

from __future__ import annotations

from typing import Any

import peft
import torch
from transformers import LlamaConfig, LlamaForCausalLM

BATCH = 4
PADDED = 3
"""Tokens by which the shortest text of a batch is shorter: its attention has a mask."""
LENGTHS_AFTER = (0.8, 0.7, 0.6)
"""Of the longest. Batches of a bucket get shorter and shorter."""
SHAPES = LlamaConfig(
    vocab_size=128256,
    hidden_size=3072,
    intermediate_size=8192,
    num_hidden_layers=28,
    num_attention_heads=24,
    num_key_value_heads=8,
    head_dim=128,
    max_position_embeddings=131072,
    rms_norm_eps=1e-5,
    tie_word_embeddings=True,
    rope_parameters={
        "rope_type": "llama3",
        "rope_theta": 500000.0,
        "factor": 32.0,
        "high_freq_factor": 4.0,
        "low_freq_factor": 1.0,
        "original_max_position_embeddings": 8192,
    },
)


def _settings(method: str) -> Any:
    """Return the settings that a published row was measured with."""
    if method == "adalora":
        return peft.AdaLoraConfig(
            init_r=64,
            target_r=32,
            r=8,
            lora_alpha=8,
            tinit=200,
            tfinal=500,
            deltaT=1,
            total_step=5000,
            beta1=0.85,
            beta2=0.85,
        )
    if method == "glora":
        return peft.GloraConfig(
            r=8,
            config_A_B="vector",
            config_C="vector",
            config_D_E="constant",
            target_modules=["q_proj", "v_proj"],
            task_type="CAUSAL_LM",
        )
    if method == "ln_tuning":
        return peft.LNTuningConfig()
    if method == "tinylora":
        return peft.TinyLoraConfig(r=2, u=64, projection_seed=42)
    return peft.LoraConfig(r=32, lora_alpha=64, task_type="CAUSAL_LM")


def _shapes_of_svd(matrix: torch.Tensor, **_: Any) -> tuple[torch.Tensor, ...]:
    """Return tensors of the shapes that a reduced decomposition has: an emulated GPU has no cuSOLVER."""
    rows, columns = matrix.shape
    rank = min(rows, columns)
    return matrix.new_empty(rows, rank), matrix.new_empty(rank), matrix.new_empty(rank, columns)


def run_method(asked: dict[str, Any]) -> dict[int, dict[str, int]]:
    """Train a few steps with batches of each length, the longest first and with an empty cache.

    Args:
        asked: ``method``, its name in PEFT's results; ``lengths``, in tokens.

    Returns:
        Peaks in bytes by length: what was requested and reserved, and the trainable ``parameters``.
    """
    torch.linalg.svd = _shapes_of_svd
    torch.set_default_dtype(torch.bfloat16)
    with torch.device("cuda"):
        base = LlamaForCausalLM(SHAPES)
    torch.set_default_dtype(torch.float32)
    model = peft.get_peft_model(base, _settings(asked["method"]))
    model.train()
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-4, weight_decay=0.1)
    outputs: Any = None  # lives until the next step's forward has returned, as there
    made = 0

    def step(length: int) -> None:
        nonlocal outputs, made
        made += 1
        mask = torch.ones(BATCH, length, dtype=torch.int64)
        mask[-1, -PADDED:] = 0
        tokens = torch.randint(1000, (BATCH, length))
        labels = tokens.masked_fill(mask == 0, -100)
        batch = {"input_ids": tokens.cuda(), "attention_mask": mask.cuda(), "labels": labels.cuda()}
        optimizer.zero_grad()
        outputs = model(**batch, num_items_in_batch=int(mask.sum()))
        outputs.loss.backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        if asked["method"] == "adalora":
            model.base_model.update_and_allocate(made)

    step(200)
    found = {}
    for length in asked["lengths"]:
        torch.cuda.empty_cache()
        torch.cuda.reset_peak_memory_stats()
        step(length)
        for share in LENGTHS_AFTER:
            step(int(length * share))
        found[length] = {
            "requested": torch.cuda.memory_stats()["requested_bytes.all.peak"],
            "reserved": torch.cuda.max_memory_reserved(),
            "parameters": model.get_nb_trainable_parameters()[0],
        }
    return found
