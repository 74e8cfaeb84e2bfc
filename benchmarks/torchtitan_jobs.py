"""Runs one rank of a pretraining job with torchtitan's own trainer, without its peers, a tokenizer and a data set.

Peaks do not depend on values: weights are what `torch.empty` gives and torchtitan initialises, tokens are random.
`published_pretraining.py` calls it.
"""

from __future__ import annotations

import os
from dataclasses import replace
from typing import TYPE_CHECKING, Any

import torch
import torch.distributed as dist
from torchtitan.components.loss import cross_entropy_loss
from torchtitan.components.metrics import MetricsProcessor
from torchtitan.config_manager import ConfigManager, JobConfig
from torchtitan.protocols import train_spec
from torchtitan.train import Trainer

from pytest_gpumem.torch_support.private_api.distributed import FAKE, store_of_nobody

if TYPE_CHECKING:
    from collections.abc import Iterator

VOCABULARY = 128_256
"""Llama 3's."""
NAME = "llama3-alone"
"""Name under which torchtitan finds the model with this module's stand-ins."""


class Tokenizer:
    """Stand-in for a tokenizer, with the attributes that torchtitan reads."""

    n_words = VOCABULARY
    eos_id = 0


class RandomTokens:
    """Batches of random tokens, without end."""

    def __init__(self, batch: int, length: int) -> None:
        self.shape = batch, length

    def __iter__(self) -> Iterator[tuple[dict[str, torch.Tensor], torch.Tensor]]:
        while True:
            yield {"input": torch.randint(VOCABULARY, self.shape)}, torch.randint(VOCABULARY, self.shape)


class Peaks(MetricsProcessor):
    """Keeps the peaks that torchtitan would log."""

    def __init__(self, job_config: JobConfig, parallel_dims: Any, model_args: object = None) -> None:
        super().__init__(job_config, parallel_dims)
        self.kept: list[dict[str, int]] = []

    def log(self, step: int, global_avg_loss: float, global_max_loss: float, extra_metrics: object = None) -> None:
        """Keep the peaks since the last time."""
        stats = torch.cuda.memory_stats()
        names = {"active": "active_bytes", "reserved": "reserved_bytes", "requested": "requested_bytes"}
        peaks = {name: stats[f"{key}.all.peak"] for name, key in names.items()}
        self.kept.append({**peaks, "retries": stats["num_alloc_retries"]})
        self.device_memory_monitor.reset_peak_stats()


def run_job(asked: dict[str, Any]) -> list[dict[str, int]]:
    """Train with one rank of a job.

    Args:
        asked: ``ranks`` of the job, of which the first runs; ``arguments`` of torchtitan; ``steps``; ``compile_loss``, whether
            the loss is compiled where the model is.

    Returns:
        Peaks of each step, in bytes, with the number of times that the allocator gave back its cache until then.
    """
    # Read by torchtitan, and by torch's launcher.
    os.environ |= {"WORLD_SIZE": str(asked["ranks"]), "RANK": "0", "LOCAL_RANK": "0"}
    # torchtitan asks for NCCL, which would wait for the others.
    init = dist.init_process_group
    dist.init_process_group = lambda **_: init(FAKE, store=store_of_nobody(), rank=0, world_size=asked["ranks"])
    own = [f"--model.name={NAME}", f"--training.steps={asked['steps']}", "--metrics.log_freq=1", "--training.seed=0"]
    config = ConfigManager().parse_args([*own, *asked["arguments"]])
    batch = RandomTokens(config.training.local_batch_size, config.training.seq_len)
    spec = replace(
        train_spec.get_train_spec("llama3"),
        name=NAME,
        build_tokenizer_fn=lambda _: Tokenizer(),
        build_dataloader_fn=lambda **_: batch,
        build_metrics_processor_fn=Peaks,
    )
    if not asked["compile_loss"]:
        spec = replace(spec, build_loss_fn=lambda _: cross_entropy_loss)
    train_spec.register_train_spec(spec)
    trainer = Trainer(config)
    trainer.train()
    return trainer.metrics_processor.kept
