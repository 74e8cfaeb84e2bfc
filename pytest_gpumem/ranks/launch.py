"""The launch of a distributed job's ranks, from the environment that torchrun sets."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

from pytest_gpumem.ranks.errors import LaunchError
from pytest_gpumem.units import agreeing
from pytest_gpumem.values.rank import Rank
from pytest_gpumem.variables import WORLD_SIZE

if TYPE_CHECKING:
    from collections.abc import Mapping

_NEEDED = ("RANK", "LOCAL_RANK", "MASTER_ADDR", "MASTER_PORT")


@dataclass(frozen=True, slots=True)
class Launch:
    """This process among the ranks of a job."""

    rank: Rank
    local_rank: int
    """The rank's number on this machine, by which it has a GPU."""
    ranks_here: int
    """The number of ranks on this machine, as far as the launcher says."""
    address: str
    port: int
    agent_store: bool
    """True if the launcher itself serves a key/value store at that address (torchrun), and not rank 0."""
    attempt: str
    """The run and its restart, by which keys in the store are told apart."""

    @property
    def command(self) -> tuple[str, ...]:
        """The words before the arguments of pytest that launch as many ranks."""
        nodes = self.rank.world // self.ranks_here
        several = [f"--nnodes={nodes}"] if nodes > 1 else []
        return ("torchrun", *several, f"--nproc-per-node={self.ranks_here}", "-m", "pytest")


def launch_of(environ: Mapping[str, str]) -> Launch | None:
    """Return how this process was launched; ``None`` where it is the only one.

    Args:
        environ: ``WORLD_SIZE``, ``RANK``, ``LOCAL_RANK``, ``MASTER_ADDR`` and ``MASTER_PORT``, as torchrun sets them.

    Raises:
        LaunchError: ``WORLD_SIZE`` is more than 1 and another variable is missing, or is no number in its range.
    """
    if not environ.get(WORLD_SIZE):
        return None
    world = _number(environ, WORLD_SIZE, 1)
    if world == 1:
        return None
    missing = [name for name in _NEEDED if not environ.get(name)]
    if missing:
        raise LaunchError(
            f"WORLD_SIZE is {world}, and {' and '.join(missing)} {agreeing(len(missing), 'is', 'are')} not set: launch the "
            f"ranks with `torchrun --nproc-per-node={world} -m pytest ...`, which sets them, or unset WORLD_SIZE to measure "
            "one process"
        )
    rank = _number(environ, "RANK", 0, world)
    ranks_here = _number(environ, "LOCAL_WORLD_SIZE", 1) if environ.get("LOCAL_WORLD_SIZE") else world
    return Launch(
        Rank(rank, world),
        _number(environ, "LOCAL_RANK", 0, world),
        ranks_here if world % ranks_here == 0 else world,
        environ["MASTER_ADDR"],
        _number(environ, "MASTER_PORT", 1, 65536),
        environ.get("TORCHELASTIC_USE_AGENT_STORE") == "True",
        f"{environ.get('TORCHELASTIC_RUN_ID', 'run')}/{environ.get('TORCHELASTIC_RESTART_COUNT', '0')}",
    )


def _number(environ: Mapping[str, str], name: str, least: int, beyond: int | None = None) -> int:
    text = environ[name]
    try:
        number = int(text)
    except ValueError:
        number = least - 1
    if number < least or not text.isascii() or (beyond is not None and number >= beyond):
        upper = "" if beyond is None else f" to {beyond - 1}"
        raise LaunchError(f"{name} is {text!r}, expected a whole number from {least}{upper}, as torchrun sets it")
    return number
