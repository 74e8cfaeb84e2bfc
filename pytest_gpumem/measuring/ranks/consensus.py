"""Decisions that ranks make together while they measure, for example how often a step runs.

A step may exchange data with the same step on other ranks. If one rank ran a step more often than the others, it would wait
forever.

For example, two ranks decide whether their peaks have settled. Rank 0 calls ``consensus.all(True)`` and rank 1 calls
``consensus.all(False)``. Both calls return ``False``, so both ranks run another step.
"""

from __future__ import annotations

import sys
import threading
import time
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple

from pytest_gpumem.base.errors import RankLost
from pytest_gpumem.facts.values.rank import Rank
from pytest_gpumem.torch_support.private_api.dispatch import beneath_modes

if TYPE_CHECKING:
    from collections.abc import Iterator, Sequence

    import torch

    from pytest_gpumem.measuring.ranks.board import Board

_SHARE_BETWEEN_LOOKS = 0.1
"""The time between two looks at the key/value store, relative to the duration of the wait so far.

For example, after a wait of 10 ms, a rank looks again after 1 ms. So all ranks begin a timed step at almost the same time.
"""
_SECONDS_BETWEEN_LOOKS = (0.00005, 0.02)
"""The minimum and maximum seconds between two looks at the key/value store. A longer time would delay a step.

A shorter time would load a core.
"""
_SECONDS_BETWEEN_ROLL_CALLS = 0.1
_SECONDS_OF_REST, _MOST_SECONDS_OF_REST, _LOOKS_AT_REST = 0.003, 1.0, 3
"""Threads count as idle if they sleep at three looks in a row, 3 ms apart. The wait ends after 1 s in any case."""
_SECONDS_OF_TWO_LOOKS_OF_NCCL = 0.25
"""Seconds in which ProcessGroupNCCL's thread checks at least twice for completed collectives. It checks every 0.1 s."""


class Alone:
    """The decisions in a process without other ranks. `Consensus` is the subclass for a distributed job."""

    several = False
    """True if the job has other ranks."""

    def exchange(self, value: Any) -> list[Any]:
        """Send this rank's value to all ranks, and return all ranks' values, ordered by rank.

        Raises:
            RankLost: A rank has ended and will not send its value.
        """
        return [value]

    def all(self, value: bool) -> bool:
        """Return whether all ranks called this method with a true value."""
        return all(self.exchange(value))

    def any(self, value: bool) -> bool:
        """Return whether at least one rank called this method with a true value."""
        return any(self.exchange(value))

    def first(self, clause: str | None) -> str | None:
        """Return the clause from the first rank whose clause is not ``None``; ``None`` if there is none.

        In a distributed job, the rank's name is added: ``"on rank 1 of 4: ..."``.
        """
        return clause

    @contextmanager
    def in_turn(self) -> Iterator[None]:
        """Return a context, which ranks enter one after another, so two jobs' ranks cannot wait for each other's locks.

        A rank does not wait for later ranks. It continues when its own context has ended.
        """
        yield

    def rest(self) -> None:
        """Wait until threads that run collectives have released their tensors. Called before a step."""

    def release(self) -> None:
        """Let process groups release the tensors from earlier collectives. Called before and after a measurement.

        ProcessGroupNCCL keeps a collective's tensors alive until the next collective. Without this call, the tensors of a
        deleted model might be freed only during the next test's step.
        """


ALONE = Alone()


def failure_key(test: int, rank: int) -> str:
    """Return the key/value store's key for a test's failure text, if the test failed by itself on ``rank``."""
    return f"test/{test}/failed/{rank}"


def _others_sleep() -> bool:
    """Return whether all other threads in this process sleep. The result is also true if the system has no ``/proc``."""
    own_thread = str(threading.get_native_id())
    for thread in Path("/proc/self/task").glob("[0-9]*"):
        # The file is missing if the thread has ended in the meantime.
        with suppress(OSError):
            state = (thread / "stat").read_bytes().rpartition(b") ")[2][:1]
            if thread.name != own_thread and state not in (b"S", b"I", b"Z"):
                return False
    return True


def _has_nccl() -> bool:
    """Return whether this process has a process group with NCCL, whose collectives run on GPUs."""
    dist: Any = sys.modules.get("torch.distributed")
    return (
        dist is not None and dist.is_available() and dist.is_initialized() and "nccl" in str(dist.get_backend_config())
    )


def let_threads_rest(looks: int = 1, seconds: float = 0.0005) -> None:
    """Wait until all other threads sleep, but not longer than `_MOST_SECONDS_OF_REST`.

    After a collective has returned, gloo's threads may still free tensors. If the main thread continued at once, such a free
    would count in the next step.

    Args:
        looks: The number of consecutive looks at which all threads must sleep.
        seconds: The time between two looks at the threads.
    """
    deadline, sleeping_looks = time.monotonic() + _MOST_SECONDS_OF_REST, 0
    while sleeping_looks < looks and time.monotonic() < deadline:
        time.sleep(seconds)  # sleeping releases the interpreter's lock, so other threads can finish their work
        sleeping_looks = sleeping_looks + 1 if _others_sleep() else 0


class Point(NamedTuple):
    """The progress of a rank.

    ``test`` counts the measured tests so far. ``step`` counts exchanges with other ranks in the current test (not training
    steps). ``waits`` is true while the rank waits for other ranks. For example, a rank with ``Point(2, 5, True)`` waits in the
    fifth exchange in its second measured test.
    """

    test: int = 0
    step: int = 0
    waits: bool = False


class Consensus(Alone):
    """A rank's decisions together with the other ranks. All ranks must call the same methods in the same order."""

    several = True

    def __init__(self, board: Board, rank: Rank) -> None:
        self.rank = rank
        self.point = Point()
        self._board = board
        self._scope = "session"
        self._all_reduced: torch.Tensor | None = None
        """The tensor for the collective in `release`. The process group keeps it alive, so each call uses this same tensor."""

    def comes_to(self, where: str) -> None:
        """Write this rank's current work, such as ``"tests/test_gpt.py::test_step (call)"``, to the key/value store at once.

        If the rank crashes before its next sign of life, rank 0 can still report this work.
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
        # Exchange values first. If a rank is missing, the exchange raises an error, but the collective would wait forever.
        if self.all(_has_nccl()):
            import torch
            import torch.distributed as dist

            time.sleep(_SECONDS_OF_TWO_LOOKS_OF_NCCL)
            with beneath_modes():  # with a test's `FakeTensorMode`, the collective would get a fake tensor
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
        """Begin the next measured test, and count its exchanges from 1."""
        self.point = Point(self.point.test + 1)
        self._scope = f"test/{self.point.test}"

    def end_test(self, outcome: Any, failure: str = "") -> list[Any] | None:
        """End the test and send this rank's outcome. Rank 0 waits for all outcomes.

        Args:
            outcome: This rank's outcome, a value for JSON.
            failure: The failure text if the test failed on this rank by itself, not because of another rank. Other ranks
                may still wait for this rank in a collective.

        Returns:
            On rank 0, the outcomes from all ranks; on other ranks, ``None``.
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
        """Send the test's verdict to the other ranks. Called on rank 0."""
        self._board.put(f"{self._scope}/decision", decision)
        self.point = self.point._replace(waits=False)

    def decision(self) -> Any:
        """Wait for the test's verdict from rank 0, and return it. Called on the other ranks."""
        keys = [f"{self._scope}/decision"]
        self._wait_for(keys, ending=True, ranks=[0])
        self.point = self.point._replace(waits=False)
        return self._board.get(keys[0])

    def end_session(self, report: Any) -> None:
        """Tell the other ranks that this rank runs no more tests, and send its report."""
        self._board.put(f"ended/{self.rank.number}", report)

    def ends_of_sessions(self) -> list[Any]:
        """Wait until all ranks have called `end_session`, and return their reports, ordered by rank."""
        return self._board.get_all(self._wait_for_all_ranks("ended"))

    def leave(self) -> None:
        """Wait until all ranks have called this method and are about to exit.

        If one rank exited earlier with an error, the launcher would kill the others.
        """
        self._board.put(f"left/{self.rank.number}", True)
        self._wait_for_all_ranks("left")

    def _wait_for_all_ranks(self, name: str) -> list[str]:
        """Wait until each rank has written its entry ``name`` to the store. Return the keys of all these entries."""
        self.point = self.point._replace(waits=True)
        keys = [f"{name}/{number}" for number in range(self.rank.world)]
        self._wait_for(keys, ending=True, ranks=())
        self.point = self.point._replace(waits=False)
        return keys

    def _wait_for(self, keys: Sequence[str], *, ending: bool, ranks: Sequence[int] | None = None) -> None:
        """Wait until entries with these keys are in the key/value store. If this takes too long, `Watch` ends the process.

        Args:
            keys: A key for each rank's entry, or the key of a single entry.
            ending: True if the entries are written at or after the end of a test. Then a rank that has ended its test may
                still write its entry.
            ranks: The ranks that write the entries; by default all ranks. If the list is empty, `RankLost` is never raised.

        Raises:
            RankLost: A rank has ended its test or its session without writing its entry.
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
        """Raise `RankLost` if any of ``ranks`` has ended its test or its session without writing its entry."""
        for number in ranks:
            key = keys[number if len(keys) > 1 else 0]
            for end_key, event in ((f"{self._scope}/end", "has ended the test"), ("ended", "runs no more tests")):
                if ending and end_key != "ended":
                    continue
                # Check the end first. Otherwise the rank could write its entry and end between the two checks, and would
                # wrongly count as lost.
                if self._board.has([f"{end_key}/{number}"]) and not self._board.has([key]):
                    raise RankLost(f"{Rank(number, self.rank.world)} {event}")
