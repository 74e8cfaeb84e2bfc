"""A process that a test, its fixtures or its session started."""

from __future__ import annotations

from dataclasses import dataclass

from pytest_gpumem.base.processes import signal_name
from pytest_gpumem.base.shown_command import shown_command
from pytest_gpumem.facts.values.annotations import Count


@dataclass(frozen=True, slots=True)
class ProcessDetails:
    """The process of a measurement such as ``call: -m vllm.entrypoints``. No verdict depends on it, and no baseline stores it.

    Example: ``ProcessDetails(2, 3, ("python", "-m", "vllm.entrypoints", "--api-key", "***"), "torchrun", still_runs=True)``
    """

    number: Count
    """The process's position among the test's processes on the device, in the order of their ranks and starts. The first has
    the number 1."""
    among: Count
    """The number of the test's processes on the device."""
    command: tuple[str, ...] = ()
    """The program with its arguments. The values of options and variables named as secrets (``--api-key``, ``HF_TOKEN``,
    ``password``) are ``***``, and a long command is cut. A secret under another name is shown. A process from
    ``multiprocessing`` has the name there instead: ``("multiprocessing", "SpawnProcess-1")``."""
    parent: str | None = None
    """The parent's program, such as ``torchrun``; ``None`` if it is unknown."""
    rank: Count | None = None
    """The process's rank; ``None`` without a rank."""
    local_rank: Count | None = None
    """The process's rank on this machine; ``None`` if no launcher has set ``LOCAL_RANK``."""
    still_runs: bool = False
    """True if the process still ran after the call, region, step or command."""
    status: int | None = None
    """The exit status of an ended process; -15 after SIGTERM, and -2 after Ctrl-C (SIGINT).

    ``None`` if the process still ran or the status is unknown: another program replaced the process (``exec``), or there is no
    glibc or no C compiler."""

    @property
    def text(self) -> str:
        """A clause: ``process 2 of 3: python -m vllm.entrypoints --port 8000, child of torchrun, ended with status 1``."""
        rank = [] if self.rank is None else [f"rank {self.rank}"]
        if self.local_rank not in (None, self.rank):
            rank.append(f"rank {self.local_rank} on its machine")
        clauses = [
            f"process {self.number} of {self.among}: {shown_command(self.command)}",
            *rank,
            *([] if self.parent is None else [f"child of {self.parent}"]),
            "still running" if self.still_runs else f"ended{_end_of(self.status)}",
        ]
        return ", ".join(clauses)


def _end_of(status: int | None) -> str:
    if status is None:
        return ""
    return f" with status {status}" if status >= 0 else f" by {signal_name(-status)}"
