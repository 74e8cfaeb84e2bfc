"""Read from torchrun's environment variables whether this process is a rank in a distributed job, and which one."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

from pytest_gpumem.base.errors import LaunchError
from pytest_gpumem.base.units import word_form
from pytest_gpumem.base.variables import WORLD_SIZE
from pytest_gpumem.facts.values.rank import Rank

if TYPE_CHECKING:
    from collections.abc import Mapping

_NEEDED = ("RANK", "LOCAL_RANK", "MASTER_ADDR", "MASTER_PORT")


@dataclass(frozen=True, slots=True)
class Launch:
    """The launch of this rank of a distributed job, by torchrun or another launcher.

    For example, if a job runs on two machines with four GPUs each, the second machine's first rank has ``rank`` 4 of 8,
    ``local_rank`` 0 and ``ranks_here`` 4.
    """

    rank: Rank
    local_rank: int
    """The rank's number on this machine, which is also the index of its GPU."""
    ranks_here: int
    """The number of ranks on this machine, as the launcher has set it."""
    address: str
    """The host of the key/value store that the ranks share."""
    port: int
    """The port of the key/value store."""
    agent_store: bool
    """True if the launcher has started the key/value store's server; false if rank 0 has to start it."""
    attempt: str
    """The run's id and how often the launcher has restarted the run: ``run/0``. All keys in the store begin with this text."""

    @property
    def command(self) -> tuple[str, ...]:
        """The beginning of a command that launches as many ranks as this job has. pytest's arguments have to be added."""
        nodes = self.rank.world // self.ranks_here
        nodes_option = [f"--nnodes={nodes}"] if nodes > 1 else []
        return ("torchrun", *nodes_option, f"--nproc-per-node={self.ranks_here}", "-m", "pytest")


def launch_of(environ: Mapping[str, str]) -> Launch | None:
    """Return how this rank was launched; ``None`` if this process is not a rank in a distributed job.

    Args:
        environ: The environment variables, in which torchrun sets ``WORLD_SIZE``, ``RANK``, ``LOCAL_RANK``, ``MASTER_ADDR``
            and ``MASTER_PORT``.

    Raises:
        LaunchError: A variable has an invalid value, or ``WORLD_SIZE`` is above 1 and another variable is missing.
    """
    if not environ.get(WORLD_SIZE):
        return None
    world = _number(environ, WORLD_SIZE, 1)
    if world == 1:
        return None
    missing = [name for name in _NEEDED if not environ.get(name)]
    if missing:
        raise LaunchError(
            f"WORLD_SIZE is {world}, and {' and '.join(missing)} {word_form(len(missing), 'is', 'are')} not set: launch the "
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
