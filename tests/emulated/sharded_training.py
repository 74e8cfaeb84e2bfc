"""A training job for tests: each rank trains its shard of a small Llama by FSDP2. torchrun starts it.

``--checkpoint`` saves the sharded state after the last step. ``PLANTED`` in the environment gives rank 1 more memory than rank 0:

- ``tensor``: 8 MiB that stay.
- ``sequence``: four times the tokens in each batch.
"""

from __future__ import annotations

import os
import sys
from typing import TYPE_CHECKING

import torch
from accelerate import Accelerator
from accelerate.utils import FullyShardedDataParallelPlugin, set_seed
from torch.utils.data import DataLoader
from transformers import LlamaConfig, LlamaForCausalLM

if TYPE_CHECKING:
    from collections.abc import Iterator

SIZES = {"hidden_size": 256, "intermediate_size": 512, "num_hidden_layers": 2, "num_attention_heads": 4}
CONFIG = LlamaConfig(vocab_size=256, num_key_value_heads=2, use_cache=False, **SIZES)
STEPS, TOKENS = 3, 128


class Tokens(torch.utils.data.Dataset[torch.Tensor]):
    """Random sequences of ``length`` tokens, one for each step of each rank."""

    def __init__(self, length: int, ranks: int) -> None:
        self.sequences = torch.randint(CONFIG.vocab_size, (STEPS * ranks, length))

    def __len__(self) -> int:
        return len(self.sequences)

    def __getitem__(self, index: int) -> torch.Tensor:
        return self.sequences[index]


def losses(accelerator: Accelerator, length: int) -> Iterator[float]:
    """Train for `STEPS` steps, and yield the mean loss of all ranks after each."""
    model = LlamaForCausalLM(CONFIG)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-4)
    batches = DataLoader(Tokens(length, accelerator.num_processes))
    model, optimizer, batches = accelerator.prepare(model, optimizer, batches)
    for tokens in batches:
        loss = model(input_ids=tokens, labels=tokens).loss
        accelerator.backward(loss)
        optimizer.step()
        optimizer.zero_grad()
        yield accelerator.reduce(loss.detach(), "mean").item()


def main() -> None:
    """Train, print each step's loss, and save the state if asked to."""
    set_seed(0)
    sharding = FullyShardedDataParallelPlugin(
        fsdp_version=2,
        auto_wrap_policy="transformer_based_wrap",
        transformer_cls_names_to_wrap=["LlamaDecoderLayer"],
        state_dict_type="SHARDED_STATE_DICT",
    )
    accelerator = Accelerator(mixed_precision="bf16", fsdp_plugin=sharding)
    planted = os.environ.get("PLANTED") if accelerator.process_index == 1 else None
    kept = [torch.ones(8 << 20, dtype=torch.uint8, device=accelerator.device)] if planted == "tensor" else []
    for step, loss in enumerate(losses(accelerator, TOKENS * 4 if planted == "sequence" else TOKENS), start=1):
        accelerator.print(f"step {step} of {STEPS}: loss {loss:.3f}")
    if "--checkpoint" in sys.argv:
        accelerator.save_state("checkpoint")
    kept.clear()
    accelerator.end_training()


if __name__ == "__main__":
    main()
