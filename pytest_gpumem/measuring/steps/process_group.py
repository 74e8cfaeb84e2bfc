"""The process group for a sharded step: the test's own group, torchrun's ranks, or a fake group with this rank alone."""

from __future__ import annotations

import atexit
import os
from contextlib import contextmanager
from typing import TYPE_CHECKING

from pytest_gpumem.base.errors import ConfigError
from pytest_gpumem.base.variables import WORLD_SIZE
from pytest_gpumem.torch_support.private_api.distributed import (
    FAKE,
    forget_meshes,
    forget_operators_of_meshes,
    store_of_nobody,
)
from pytest_gpumem.torch_support.reachability import is_host

if TYPE_CHECKING:
    from collections.abc import Iterator

    import torch

    from pytest_gpumem.measuring.step_config.config import StepConfig
    from pytest_gpumem.measuring.step_config.shard_kinds import Layout


@contextmanager
def layout_in_process_group(config: StepConfig, device: torch.device) -> Iterator[Layout]:
    """Yield the layout of ranks for a sharded step, within a process group.

    - If the test has created a process group, this group is used.
    - If ``torchrun`` started this process, a group with torchrun's ranks is created. The group stays until the process exits,
      because ranks that leave a group and create another group at the same address may miss each other.
    - Otherwise a fake group is created, in which only the config's rank exists. In this group, a collective returns the rank's
      own parts in place of the other ranks' parts.

    Raises:
        ConfigError: The config's ``world`` or ``rank`` differs from the process group.
    """
    import torch.distributed as dist

    if not dist.is_available():
        raise ConfigError(f"shard={config.shard} needs torch.distributed, which this build of torch lacks")
    if dist.is_initialized():
        forget_operators_of_meshes()
        yield _layout(config, dist.get_world_size(), dist.get_rank())
        return
    world = int(os.environ.get(WORLD_SIZE, "1"))
    if world > 1 and "RANK" in os.environ:
        layout = _layout(config, world, int(os.environ["RANK"]))
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
    """Return whether the process group is fake, so only this rank exists."""
    import torch.distributed as dist

    return dist.get_backend() == FAKE


def _layout(config: StepConfig, world: int | None, rank: int | None) -> Layout:
    """Return the layout for the config's ranks. ``world`` and ``rank`` come from the process group, if there is a group."""
    if world is not None:
        for name, configured, actual in (("world", config.world, world), ("rank", config.rank or None, rank)):
            if configured is not None and configured != actual:
                raise ConfigError(
                    f"{name}={configured}, but this is rank {rank} in a process group with {world} ranks; leave {name}= out"
                )
    assert config.sharding is not None, "only called for a sharded step"
    try:
        return config.sharding.over(world or config.world, config.rank if rank is None else rank)
    except ValueError as error:
        raise ConfigError(str(error)) from None
