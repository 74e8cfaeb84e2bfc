"""Decisions that ranks make together while they measure, for example how often a step runs.

A step may exchange data with the same step on other ranks. A single rank with an extra step would wait forever.

For example, two ranks ask whether their peaks have settled. Rank 0 calls ``consensus.all(True)`` and rank 1 calls
``consensus.all(False)``. Both calls return ``False``, so both ranks run another step.
"""

from __future__ import annotations

import sys
import threading
import time
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple

from pytest_gpumem.facts.values.rank import Rank
from pytest_gpumem.measuring.ranks.errors import RankLost
from pytest_gpumem.torch_support.private_api.dispatch import beneath_modes

if TYPE_CHECKING:
    from collections.abc import Iterator, Sequence

    import torch

    from pytest_gpumem.measuring.ranks.board import Board

_SHARE_BETWEEN_LOOKS = 0.1
"""The poll interval as a share of the elapsed wait, so ranks resume almost together for a timed step.

For example, after a wait of 10 ms a rank polls again within 1 ms.
"""
_SECONDS_BETWEEN_LOOKS = (0.00005, 0.02)
"""The shortest and the longest poll interval. Longer intervals would delay a step, and shorter intervals load a core."""
_SECONDS_BETWEEN_ROLL_CALLS = 0.1
_SECONDS_OF_REST, _MOST_SECONDS_OF_REST, _LOOKS_AT_REST = 0.003, 1.0, 3
"""Threads are at rest if they sleep in three looks in a row, 3 ms apart. The wait for rest ends after 1 s."""
_SECONDS_OF_TWO_LOOKS_OF_NCCL = 0.25
"""A thread of ProcessGroupNCCL checks every 0.1 s for completed collectives. This time covers two checks."""


class Alone:
    """A process without other ranks, which decides by itself."""

    several = False
    """True if the job has other ranks."""

    def exchange(self, value: Any) -> list[Any]:
        """Return the values from all ranks, ordered by rank. Raises `RankLost` if a rank will not send its value."""
        return [value]

    def all(self, value: bool) -> bool:
        """Return whether ``value`` is true on every rank."""
        return all(self.exchange(value))

    def any(self, value: bool) -> bool:
        """Return whether ``value`` is true on any rank."""
        return any(self.exchange(value))

    def first(self, clause: str | None) -> str | None:
        """Return the clause from the first rank with a clause, preceded by the rank's name if there are several ranks."""
        return clause

    @contextmanager
    def in_turn(self) -> Iterator[None]:
        """Run the context's code on each rank in turn, so ranks cannot wait for each other's locks.

        This is no barrier: a rank goes on after its own turn.
        """
        yield

    def rest(self) -> None:
        """Wait before a step until the threads of collectives have released their tensors."""

    def release(self) -> None:
        """Have the process group release the tensors of its collectives, before and after a measurement.

        ProcessGroupNCCL releases the tensors of a collective only in its next collective. Without this call, a deleted model
        would be freed during the next test's step.
        """


ALONE = Alone()


def failure_key(test: int, rank: int) -> str:
    """Return the store's key for the failure text of ``rank``, on which the failure started."""
    return f"test/{test}/failed/{rank}"


def _others_sleep() -> bool:
    """Return whether all other threads in the process sleep. Return True if the system has no ``/proc``."""
    own_thread = str(threading.get_native_id())
    for thread in Path("/proc/self/task").glob("[0-9]*"):
        # A thread that has ended in the meantime has no file.
        with suppress(OSError):
            state = (thread / "stat").read_bytes().rpartition(b") ")[2][:1]
            if thread.name != own_thread and state not in (b"S", b"I", b"Z"):
                return False
    return True


def _has_nccl() -> bool:
    """Return whether this process has a process group whose collectives run on GPUs."""
    dist: Any = sys.modules.get("torch.distributed")
    return (
        dist is not None and dist.is_available() and dist.is_initialized() and "nccl" in str(dist.get_backend_config())
    )


def let_threads_rest(looks: int = 1, seconds: float = 0.0005) -> None:
    """Wait until all other threads sleep in several looks in a row, or for at most `_MOST_SECONDS_OF_REST`.

    A gloo thread may free tensors late. If the main thread went on first, such a free would count in the next step.

    Args:
        looks: The number of looks in a row in which all threads have to sleep.
        seconds: The time between two looks.
    """
    deadline, sleeping_looks = time.monotonic() + _MOST_SECONDS_OF_REST, 0
    while sleeping_looks < looks and time.monotonic() < deadline:
        time.sleep(seconds)  # releases the interpreter's lock for waiting threads
        sleeping_looks = sleeping_looks + 1 if _others_sleep() else 0


class Point(NamedTuple):
    """The progress of a rank.

    ``test`` counts measured tests, and ``step`` counts the exchanges in a test (not training steps). Both count from 1, and 0
    is before the first. ``waits`` is true while the rank waits for the other ranks. For example, ``Point(2, 5, True)`` waits
    in the fifth exchange of the second measured test.
    """

    test: int = 0
    step: int = 0
    waits: bool = False


class Consensus(Alone):
    """A rank that decides together with the other ranks. Every rank has to make the same calls in the same order."""

    several = True

    def __init__(self, board: Board, rank: Rank) -> None:
        self.rank = rank
        self.point = Point()
        self._board = board
        self._scope = "session"
        self._all_reduced: torch.Tensor | None = None
        """The tensor for `release`'s collective. It is made only once, because the process group keeps the tensor alive."""

    def comes_to(self, where: str) -> None:
        """Write this rank's current work to the store at once.

        If the rank crashes before its next sign of life, rank 0 reports this work.
        """
        self._board.put(f"where/{self.rank.number}", where)

    def first(self, clause: str | None) -> str | None:
        clauses = self.exchange(clause)
        number = next((number for number, value in enumerate(clauses) if value is not None), None)
        return None if number is None else f"on {Rank(number, self.rank.world)}: {clauses[number]}"

    @contextmanager
    def in_turn(self) -> Iterator[None]:
        test, step, _ = self.point
        self.point, key = Point(test, step + 1, waits=True), f"{self._scope}/{step + 1}"
        if not self.rank.is_first:
            self._wait_for([f"{key}/{self.rank.number - 1}"], ending=False, ranks=[self.rank.number - 1])
        self.point = self.point._replace(waits=False)
        try:
            yield
        finally:
            self._board.put(f"{key}/{self.rank.number}", True)

    def rest(self) -> None:
        let_threads_rest(_LOOKS_AT_REST, _SECONDS_OF_REST)

    def release(self) -> None:
        # The exchange raises an error that names a missing rank. A collective would wait for this rank forever.
        if self.all(_has_nccl()):
            import torch
            import torch.distributed as dist

            time.sleep(_SECONDS_OF_TWO_LOOKS_OF_NCCL)
            with beneath_modes():  # the test's own modes may make fake tensors
                if self._all_reduced is None:
                    self._all_reduced = torch.zeros(1, device="cuda")
                dist.all_reduce(self._all_reduced)
        self.rest()

    def exchange(self, value: Any) -> list[Any]:
        test, step, _ = self.point
        self.point = Point(test, step + 1, waits=True)
        key = f"{self._scope}/{step + 1}"
        self._board.put(f"{key}/{self.rank.number}", value)
        keys = [f"{key}/{number}" for number in range(self.rank.world)]
        self._wait_for(keys, ending=False)
        values = self._board.get_all(keys)
        self.point = self.point._replace(waits=False)
        return values

    def begin_test(self) -> None:
        """Begin the next measured test. Later exchanges belong to this test."""
        self.point = Point(self.point.test + 1)
        self._scope = f"test/{self.point.test}"

    def end_test(self, outcome: Any, failure: str = "") -> list[Any] | None:
        """End the test and send this rank's outcome. Rank 0 waits for all ranks.

        Args:
            outcome: This rank's outcome, a value for JSON.
            failure: The failure text, if the test failed by itself on this rank. Other ranks may wait for this rank in a
                collective.

        Returns:
            The outcomes of all ranks on rank 0; ``None`` on other ranks.
        """
        self.point = self.point._replace(waits=True)
        if failure:
            self._board.put(failure_key(self.point.test, self.rank.number), failure)
        self._board.put(f"{self._scope}/end/{self.rank.number}", outcome)
        if not self.rank.is_first:
            return None
        keys = [f"{self._scope}/end/{number}" for number in range(self.rank.world)]
        self._wait_for(keys, ending=True)
        return self._board.get_all(keys)

    def decide(self, decision: Any) -> None:
        """Send the test's verdict from rank 0 to the other ranks."""
        self._board.put(f"{self._scope}/decision", decision)
        self.point = self.point._replace(waits=False)

    def decision(self) -> Any:
        """Return the verdict from rank 0."""
        keys = [f"{self._scope}/decision"]
        self._wait_for(keys, ending=True, ranks=[0])
        self.point = self.point._replace(waits=False)
        return self._board.get(keys[0])

    def end_session(self, report: Any) -> None:
        """Tell the other ranks that this rank runs no more tests, and send its report."""
        self._board.put(f"ended/{self.rank.number}", report)

    def ends_of_sessions(self) -> list[Any]:
        """Return the report that each rank sent by `end_session`."""
        return self._board.get_all(self._wait_for_all_ranks("ended"))

    def leave(self) -> None:
        """Wait until every rank is about to exit, because the launcher ends all ranks when a rank exits with an error."""
        self._board.put(f"left/{self.rank.number}", True)
        self._wait_for_all_ranks("left")

    def _wait_for_all_ranks(self, name: str) -> list[str]:
        """Wait until every rank has an entry called ``name``, and return the keys of these entries."""
        self.point = self.point._replace(waits=True)
        keys = [f"{name}/{number}" for number in range(self.rank.world)]
        self._wait_for(keys, ending=True, ranks=())
        self.point = self.point._replace(waits=False)
        return keys

    def _wait_for(self, keys: Sequence[str], *, ending: bool, ranks: Sequence[int] | None = None) -> None:
        """Wait until the store has all ``keys``. If this takes too long, the `Watch` ends the process.

        Args:
            keys: One entry for each rank, or a single entry.
            ending: True if the entries come at or after the end of a test, so a rank that ended its test is not lost.
            ranks: The ranks that write the entries (default: all). A rank that ended its session without its entry is lost. If
                the list is empty, no rank is checked.

        Raises:
            RankLost: A rank has ended its test or its session, and will not write its entry.
        """
        shortest, longest = _SECONDS_BETWEEN_LOOKS
        began = last_roll_call = time.monotonic()
        while not self._board.has(keys):
            waited = time.monotonic() - began
            time.sleep(min(max(_SHARE_BETWEEN_LOOKS * waited, shortest), longest))
            if time.monotonic() - last_roll_call > _SECONDS_BETWEEN_ROLL_CALLS:
                last_roll_call = time.monotonic()
                self._call_the_roll(keys, range(self.rank.world) if ranks is None else ranks, ending=ending)

    def _call_the_roll(self, keys: Sequence[str], ranks: Sequence[int], *, ending: bool) -> None:
        """Raise `RankLost` if a rank ended without writing its entry."""
        for number in ranks:
            key = keys[number if len(keys) > 1 else 0]
            for end_key, event in ((f"{self._scope}/end", "has ended the test"), ("ended", "runs no more tests")):
                if ending and end_key != "ended":
                    continue
                # Check the end first, because the rank may write its entry and then end between the two checks.
                if self._board.has([f"{end_key}/{number}"]) and not self._board.has([key]):
                    raise RankLost(f"{Rank(number, self.rank.world)} {event}")
