"""Decisions that ranks make together while they measure: how often a step runs, until when it is timed.

A step may exchange data with those of other ranks. One that a single rank ran would wait for the others for ever.
"""

from __future__ import annotations

import sys
import threading
import time
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple

from pytest_gpumem.ranks.errors import RankLost
from pytest_gpumem.torch_support.private_api import beneath_modes
from pytest_gpumem.values.rank import Rank

if TYPE_CHECKING:
    from collections.abc import Iterator, Sequence

    import torch

    from pytest_gpumem.ranks.board import Board

_SHARE_BETWEEN_LOOKS = 0.1
"""Poll interval as a share of the time waited so far, so that ranks that time a step resume almost together."""
_SECONDS_BETWEEN_LOOKS = (0.00005, 0.02)
"""The shortest, and the longest: a wait must neither cost a step's time nor a core."""
_SECONDS_BETWEEN_ROLL_CALLS = 0.1
_SECONDS_OF_REST, _MOST_SECONDS_OF_REST, _LOOKS_AT_REST = 0.003, 1.0, 3
"""Threads are at rest when they sleep each time that they are looked at."""
_SECONDS_OF_TWO_LOOKS_OF_NCCL = 0.25
"""A thread of ProcessGroupNCCL looks every 0.1 s which collectives are done."""


class Alone:
    """A process without other ranks, which decides by itself."""

    several = False
    """True if there are others."""

    def exchange(self, mine: Any) -> list[Any]:
        """Return the values of all ranks, in their order. Raises `RankLost` if one of them will not give any."""
        return [mine]

    def all(self, mine: bool) -> bool:
        """Return whether every rank says so."""
        return all(self.exchange(mine))

    def any(self, mine: bool) -> bool:
        """Return whether any rank says so."""
        return any(self.exchange(mine))

    def first(self, mine: str | None) -> str | None:
        """Return the clause of the first rank that has one, with the rank's name if there are several."""
        return mine

    @contextmanager
    def in_turn(self) -> Iterator[None]:
        """Run rank by rank, so that no two of them wait for what the other holds."""
        yield

    def rest(self) -> None:
        """Let threads of collectives release what they hold, before a step."""

    def release(self) -> None:
        """Have the process group let go of what its collectives were given, before a measurement and behind it.

        ProcessGroupNCCL does so in its next collective: else a model that is gone would be freed in the next test's step.
        """


ALONE = Alone()


def failure_key(test: int, rank: int) -> str:
    """Return the key of the text with which a test failed by itself on a rank."""
    return f"test/{test}/failed/{rank}"


def _others_sleep() -> bool:
    """Return whether all threads but this one wait for something; where the system does not tell, that they do."""
    mine = str(threading.get_native_id())
    for thread in Path("/proc/self/task").glob("[0-9]*"):
        # A thread that has ended meanwhile has no file.
        with suppress(OSError):
            state = (thread / "stat").read_bytes().rpartition(b") ")[2][:1]
            if thread.name != mine and state not in (b"S", b"I", b"Z"):
                return False
    return True


def _has_nccl() -> bool:
    """Return whether this process has a process group whose collectives run on GPUs."""
    dist: Any = sys.modules.get("torch.distributed")
    return (
        dist is not None and dist.is_available() and dist.is_initialized() and "nccl" in str(dist.get_backend_config())
    )


def let_threads_rest(looks: int = 1, seconds: float = 0.0005) -> None:
    """Wait until all other threads sleep each time that they are looked at, or for `_MOST_SECONDS_OF_REST`.

    A thread of gloo that frees a block after the main one has gone on is not seen to free it.

    Args:
        looks: How often in a row they have to sleep.
        seconds: From one look to the next.
    """
    until, quiet = time.monotonic() + _MOST_SECONDS_OF_REST, 0
    while quiet < looks and time.monotonic() < until:
        time.sleep(seconds)  # without the interpreter's lock, for which a thread may wait
        quiet = quiet + 1 if _others_sleep() else 0


class Point(NamedTuple):
    """The progress of a rank. ``test`` and ``step`` count from 1; ``waits`` is true if it waits there for the others."""

    test: int = 0
    step: int = 0
    waits: bool = False


class Consensus(Alone):
    """One rank, which decides with the others. Every rank has to make the same calls in the same order."""

    several = True

    def __init__(self, board: Board, rank: Rank) -> None:
        self.rank = rank
        self.point = Point()
        self._board = board
        self._scope = "session"
        self._given: torch.Tensor | None = None
        """The tensor that `release` gives to a collective: kept, as the process group holds it from then on."""

    def comes_to(self, where: str) -> None:
        """Tell what this rank runs from now on, before its next sign of life: it may be its last."""
        self._board.put(f"where/{self.rank.number}", where)

    def first(self, mine: str | None) -> str | None:
        clauses = self.exchange(mine)
        number = next((number for number, clause in enumerate(clauses) if clause is not None), None)
        return None if number is None else f"on {Rank(number, self.rank.world)}: {clauses[number]}"

    @contextmanager
    def in_turn(self) -> Iterator[None]:
        test, step, _ = self.point
        self.point, key = Point(test, step + 1, waits=True), f"{self._scope}/{step + 1}"
        if not self.rank.is_first:
            self._wait_for([f"{key}/{self.rank.number - 1}"], ending=False, of=[self.rank.number - 1])
        self.point = self.point._replace(waits=False)
        try:
            yield
        finally:
            self._board.put(f"{key}/{self.rank.number}", True)

    def rest(self) -> None:
        let_threads_rest(_LOOKS_AT_REST, _SECONDS_OF_REST)

    def release(self) -> None:
        # Whoever is not there is named by the exchange; a collective would wait for it.
        if self.all(_has_nccl()):
            import torch
            import torch.distributed as dist

            time.sleep(_SECONDS_OF_TWO_LOOKS_OF_NCCL)
            with beneath_modes():  # not the test's own, which may make fake tensors
                if self._given is None:
                    self._given = torch.zeros(1, device="cuda")
                dist.all_reduce(self._given)
        self.rest()

    def exchange(self, mine: Any) -> list[Any]:
        test, step, _ = self.point
        self.point = Point(test, step + 1, waits=True)
        key = f"{self._scope}/{step + 1}"
        self._board.put(f"{key}/{self.rank.number}", mine)
        keys = [f"{key}/{number}" for number in range(self.rank.world)]
        self._wait_for(keys, ending=False)
        values = self._board.get_all(keys)
        self.point = self.point._replace(waits=False)
        return values

    def begin_test(self) -> None:
        """Begin the next measured test: what is exchanged from here on is of that."""
        self.point = Point(self.point.test + 1)
        self._scope = f"test/{self.point.test}"

    def end_test(self, mine: Any, failure: str = "") -> list[Any] | None:
        """End the test with what this rank has to say of it. Returns what all ranks say, on rank 0 only, when all have.

        Args:
            mine: This rank's.
            failure: The text of its failure, where it failed by itself: others may wait for it in a collective.
        """
        self.point = self.point._replace(waits=True)
        if failure:
            self._board.put(failure_key(self.point.test, self.rank.number), failure)
        self._board.put(f"{self._scope}/end/{self.rank.number}", mine)
        if not self.rank.is_first:
            return None
        keys = [f"{self._scope}/end/{number}" for number in range(self.rank.world)]
        self._wait_for(keys, ending=True)
        return self._board.get_all(keys)

    def decide(self, decision: Any) -> None:
        """Tell the other ranks how the test ended; by rank 0."""
        self._board.put(f"{self._scope}/decision", decision)
        self.point = self.point._replace(waits=False)

    def decision(self) -> Any:
        """Return what rank 0 decided of the test."""
        keys = [f"{self._scope}/decision"]
        self._wait_for(keys, ending=True, of=[0])
        self.point = self.point._replace(waits=False)
        return self._board.get(keys[0])

    def end_session(self, mine: Any) -> None:
        """Tell the others that this rank runs no more tests, with what it has to say of those it ran."""
        self._board.put(f"ended/{self.rank.number}", mine)

    def ends_of_sessions(self) -> list[Any]:
        """Return what every rank said at the end of its tests."""
        return self._board.get_all(self._all_of("ended"))

    def leave(self) -> None:
        """Wait until every rank is about to exit: the launcher ends the others as soon as one of them has exited in red."""
        self._board.put(f"left/{self.rank.number}", True)
        self._all_of("left")

    def _all_of(self, name: str) -> list[str]:
        """Wait until every rank has an entry of this name, and return their keys."""
        self.point = self.point._replace(waits=True)
        keys = [f"{name}/{number}" for number in range(self.rank.world)]
        self._wait_for(keys, ending=True, of=())
        self.point = self.point._replace(waits=False)
        return keys

    def _wait_for(self, keys: Sequence[str], *, ending: bool, of: Sequence[int] | None = None) -> None:
        """Wait until all of ``keys`` are there, which is for the `Watch` to end where it takes too long.

        Args:
            keys: Entries, one of each rank.
            ending: Whether the others may have ended their test already.
            of: The ranks whose entries they are; all by default, and none to wait for those that ended, too.

        Raises:
            RankLost: One of the ranks has ended its test, or its session, and will not come.
        """
        shortest, longest = _SECONDS_BETWEEN_LOOKS
        began = called = time.monotonic()
        while not self._board.has(keys):
            waited = time.monotonic() - began
            time.sleep(min(max(_SHARE_BETWEEN_LOOKS * waited, shortest), longest))
            if time.monotonic() - called > _SECONDS_BETWEEN_ROLL_CALLS:
                called = time.monotonic()
                self._call_the_roll(keys, range(self.rank.world) if of is None else of, ending=ending)

    def _call_the_roll(self, keys: Sequence[str], ranks: Sequence[int], *, ending: bool) -> None:
        for number in ranks:
            key = keys[number if len(keys) > 1 else 0]
            for gone, what in ((f"{self._scope}/end", "has ended the test"), ("ended", "runs no more tests")):
                if ending and gone != "ended":
                    continue
                # Looked for in this order, as it may have given its value and then ended.
                if self._board.has([f"{gone}/{number}"]) and not self._board.has([key]):
                    raise RankLost(f"{Rank(number, self.rank.world)} {what}")
