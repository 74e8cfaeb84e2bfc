"""The process group of a sharded step: the one that the test runs in, or one of a rank whose peers are not there."""

from __future__ import annotations

import atexit
import os
from contextlib import contextmanager
from typing import TYPE_CHECKING

from pytest_gpumem.step_config.errors import ConfigError
from pytest_gpumem.torch_support.private_api import FAKE, forget_meshes, forget_operators_of_meshes, store_of_nobody
from pytest_gpumem.torch_support.reachability import is_host
from pytest_gpumem.variables import WORLD_SIZE

if TYPE_CHECKING:
    from collections.abc import Iterator

    import torch

    from pytest_gpumem.step_config.config import StepConfig
    from pytest_gpumem.step_config.shard_kinds import Layout


@contextmanager
def layout_in_process_group(config: StepConfig, device: torch.device) -> Iterator[Layout]:
    """Yield the ranks of a sharded step, with a process group in place.

    A process group that is there is used. One is made of the ranks that ``torchrun`` started, and stays: ranks that leave one
    and meet again at the same address may miss each other. Without either, the rank that the config names is alone: its
    collectives return its own parts in place of the others'.

    Raises:
        ConfigError: The config speaks of other ranks than there are.
    """
    import torch.distributed as dist

    if not dist.is_available():
        raise ConfigError(f"shard={config.shard} needs torch.distributed, which this build of torch lacks")
    if dist.is_initialized():
        forget_operators_of_meshes()
        yield _layout(config, dist.get_world_size(), dist.get_rank())
        return
    real = int(os.environ.get(WORLD_SIZE, "1"))
    if real > 1 and "RANK" in os.environ:
        layout = _layout(config, real, int(os.environ["RANK"]))
        dist.init_process_group("gloo" if is_host(device) else "cpu:gloo,cuda:nccl")
        atexit.register(dist.destroy_process_group)
        yield layout
        return
    layout = _layout(config, None, None)
    forget_meshes()
    dist.init_process_group(FAKE, store=store_of_nobody(), rank=layout.rank, world_size=layout.world)
    try:
        yield layout
    finally:
        dist.destroy_process_group()
        forget_meshes()


def is_alone() -> bool:
    """Return whether the ranks of the process group, but this one, are not there."""
    import torch.distributed as dist

    return dist.get_backend() == FAKE


def _layout(config: StepConfig, world: int | None, rank: int | None) -> Layout:
    """Return the ranks that the config speaks of, which are those of the process group if there is one."""
    if world is not None:
        for name, said, real in (("world", config.world, world), ("rank", config.rank or None, rank)):
            if said is not None and said != real:
                raise ConfigError(
                    f"{name}={said}, but this is rank {rank} of a process group of {world}; leave {name}= out"
                )
    assert config.sharding is not None, "only called for a sharded step"
    try:
        return config.sharding.over(world or config.world, config.rank if rank is None else rank)
    except ValueError as error:
        raise ConfigError(str(error)) from None
