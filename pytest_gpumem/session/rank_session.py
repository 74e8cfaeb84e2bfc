"""A session's part among those of the other ranks: what it tells them, and what they decide together."""

from __future__ import annotations

from contextlib import suppress
from dataclasses import replace
from typing import TYPE_CHECKING, Any

from pytest_gpumem.gate.rank_verdicts import RankEnd, verdict_of_all
from pytest_gpumem.ranks.errors import RankLost
from pytest_gpumem.ranks.launch import launch_of
from pytest_gpumem.runtest.one_process import OneProcess
from pytest_gpumem.values.plain import from_plain, to_plain
from pytest_gpumem.values.rank import Rank

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping, Sequence
    from pathlib import Path

    from pytest_gpumem.gate.verdict import TestVerdict
    from pytest_gpumem.ranks.consensus import Consensus
    from pytest_gpumem.ranks.launch import Launch
    from pytest_gpumem.ranks.watch import Watch

_MOST_SHOWN = 5
"""Tests that are named where ranks collected others."""


class RankSession(OneProcess):
    """A session of one rank. Between `join` and `leave` it is watched over."""

    consensus: Consensus

    def __init__(self, launch: Launch, seconds: float) -> None:
        """Make the session of a launched rank; ``seconds`` are those of ``--gpumem-rank-timeout``."""
        self.rank: Rank = launch.rank
        self.command = launch.command
        self.has_ended = True
        """True if the others know how the current test ended on this rank."""
        self._launch = launch
        self._seconds = seconds
        self._watch: Watch | None = None
        self._writes = False
        self._told_its_end = False

    @property
    def watch(self) -> Watch:
        assert self._watch is not None, "only used when the session has joined the others"
        return self._watch

    def join(self, root: Path, lost: Callable[[str], object]) -> None:
        """Connect to the other ranks. Raises `BoardError`.

        Args:
            root: The project's folder.
            lost: Called on rank 0, in another thread, when a rank is lost, before the process ends.
        """
        from pytest_gpumem.ranks.board import Board
        from pytest_gpumem.ranks.consensus import Consensus
        from pytest_gpumem.ranks.watch import Watch

        self.consensus = Consensus(Board(self._launch, self._seconds), self.rank)
        self._watch = Watch(self._launch, self.consensus, self._seconds, root, lost)
        self._watch.start()

    def differing(self, tests: Sequence[str], measured: Sequence[str], not_collected: Sequence[str]) -> str | None:
        """Return in what the tests that ranks are about to run differ, as a sentence; ``None`` where they do not.

        Args:
            tests: The ids of this rank's tests, in their order.
            measured: Those of them that are measured.
            not_collected: The files that it could not collect.
        """
        everything = self.consensus.exchange([list(tests), list(measured), list(not_collected)])
        first, first_measured, not_there = everything[0]
        for number, (theirs, measured_there, files) in enumerate(everything):
            rank = Rank(number, self.rank.world)
            if theirs != first:
                return differing_text(rank, first, theirs, files, not_there)
            only = sorted(set(first_measured) ^ set(measured_there))
            if only:
                who = "rank 0" if only[0] in first_measured else str(rank)
                return (
                    f"only {who} measures {only[0]}, of rank 0 and {rank}: they measure it together, or it is not gated. Give "
                    "it the marker, or the fixture, on every rank"
                )
        return None

    def begin(self, nodeid: str) -> None:
        """Begin a measured test, together with all ranks. Raises `RankLost` where they do not begin the same."""
        self.consensus.begin_test()
        self.has_ended = False
        others = self.consensus.exchange(nodeid)
        for number, theirs in enumerate(others):
            if theirs != others[0]:
                raise RankLost(f"{Rank(number, self.rank.world)} runs {theirs}, and rank 0 {others[0]}")

    def agreed(self, verdict: TestVerdict, decide: Callable[[TestVerdict], TestVerdict]) -> TestVerdict:
        return self._decided(RankEnd("judged", verdict), verdict, decide) or verdict

    def ended_by_itself(self, end: RankEnd, nothing: TestVerdict) -> TestVerdict | None:
        """Tell the others that this rank's test ended by itself, and return what becomes of it; ``None`` where all skipped it.

        Args:
            end: How it ended.
            nothing: The verdict on the test without a measurement.
        """
        return self._decided(end, nothing, lambda verdict: verdict)

    def _decided(
        self, end: RankEnd, mine: TestVerdict, decide: Callable[[TestVerdict], TestVerdict]
    ) -> TestVerdict | None:
        self.has_ended = True
        if not self.rank.is_first:
            self.consensus.end_test(to_plain(end), end.failure)
            decision = self.consensus.decision()
            return None if decision is None else replace(mine, failure=decision["failure"])
        decision = {"failure": f"{self.rank} ended the test without a verdict"}
        try:
            # Its own verdict need not travel.
            plain: list[Any] = self.consensus.end_test({}, end.failure) or []
            ends = [end, *(from_plain(RankEnd, one) for one in plain[1:])]
            whole = verdict_of_all(ends, replace(mine, verdicts=(), missing=(), missing_on=(), relations=0))
            if whole is not None and whole.failure is None:
                whole = decide(whole)
            decision = None if whole is None else {"failure": whole.failure}
            return whole
        except RankLost as error:
            decision = {"failure": str(error)}
            raise
        finally:
            self.consensus.decide(decision)

    def end_tests(self, failed: Sequence[str], ended_early: str | None) -> None:
        """Tell the others that this rank runs no more tests.

        Args:
            failed: What failed on it and is in no verdict, each as a clause.
            ended_early: Why it did not run all of its tests; ``None`` where it did.
        """
        self._told_its_end = True
        self.consensus.end_session([list(failed), ended_early])

    def write_now(self) -> None:
        """Begin to write what is not to be cut off until `leave`, also where the job is ended."""
        # Where the watch reports a lost rank, this waits for the end of the process.
        if not self._writes:
            self._writes = self.watch.writing.acquire()

    def leave(self) -> None:
        """Wait until every rank is about to exit, and watch no longer."""
        if self._watch is None:
            return
        from pytest_gpumem.ranks.errors import BoardError

        self._watch.where, self._watch.measures, self._watch.leaves = "the end of its session", False, True
        if self._writes:
            self._watch.writing.release()
        try:
            if not self._told_its_end:
                with suppress(BoardError):
                    self.end_tests([], "its session ended before its first test")
            # Rank 0, which may serve the store, need not wait for those that have looked whether it is about to exit.
            with suppress(BoardError):
                self.consensus.leave()
        finally:
            self._watch.end()
            self._watch = None


def ranks_of(seconds: float, environ: Mapping[str, str]) -> OneProcess | RankSession:
    """Return this process's part among the ranks of its job. Raises `LaunchError`.

    Args:
        seconds: Those of ``--gpumem-rank-timeout``.
        environ: The variables of the launcher.
    """
    launch = launch_of(environ)
    return OneProcess() if launch is None else RankSession(launch, seconds)


def differing_text(
    rank: Rank, first: Sequence[str], theirs: Sequence[str], files: Sequence[str], files_of_first: Sequence[str]
) -> str:
    """Return a sentence on a rank whose tests are others than rank 0's.

    Args:
        rank: The rank.
        first: Rank 0's tests.
        theirs: The rank's tests.
        files: The files that it could not collect.
        files_of_first: The files that rank 0 could not collect.
    """
    lacking = [test for test in first if test not in set(theirs)]
    more = [test for test in theirs if test not in set(first)]
    if not lacking and not more:
        what = (
            "runs the same tests as rank 0 in another order; give every rank the same (pytest-randomly: -p no:randomly)"
        )
        return f"{rank} {what}"
    parts = []
    if lacking:
        parts.append(f"lacks {_listed(lacking)}")
    if more:
        parts.append(f"has {_listed(more)} as well")
    broken = f"; it could not collect {_listed(files)}" if files else ""
    broken += f"; rank 0 could not collect {_listed(files_of_first)}" if files_of_first else ""
    return (
        f"{rank} selected other tests than rank 0: it {' and '.join(parts)}{broken}. Every rank has to select the same tests: "
        "what differs between ranks belongs into the tests"
    )


def _listed(names: Sequence[str]) -> str:
    more = len(names) - _MOST_SHOWN
    return ", ".join(names[:_MOST_SHOWN]) + (f" and {more} more" if more > 0 else "")
