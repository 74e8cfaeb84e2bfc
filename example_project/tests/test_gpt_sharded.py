"""The memory of one rank of a job of eight, with nobody else there: its shard is real, and its peers are not."""

from __future__ import annotations

from tiny_models import GPT
from tiny_models.data import token_batch
from tiny_models.gpt import next_token_loss


def test_a_rank_of_fully_sharded_training(gpumem):
    gpumem.train_step(GPT, token_batch(4, 256), config="mp-bf16,reduce=fp32,shard=fsdp,world=8", loss=next_token_loss)
