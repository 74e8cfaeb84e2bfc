"""The session of one rank among several: the ranks exchange their tests and verdicts, so all of them make the same decisions.

For example, with ``torchrun --nproc-per-node=2`` the same test runs on two ranks. Each rank sends its verdict to rank 0, which
combines the verdicts, decides whether the test fails, and sends the decision back.
"""

from __future__ import annotations

from contextlib import suppress
from dataclasses import replace
from typing import TYPE_CHECKING, Any

from pytest_gpumem.facts.values.plain import from_plain, to_plain
from pytest_gpumem.facts.values.rank import Rank
from pytest_gpumem.judging.gate.rank_verdicts import RankEnd, verdict_of_all
from pytest_gpumem.measuring.ranks.errors import RankLost
from pytest_gpumem.measuring.ranks.launch import launch_of
from pytest_gpumem.plugin.runtest.one_process import OneProcess

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping, Sequence
    from pathlib import Path

    from pytest_gpumem.judging.gate.verdict import TestVerdict
    from pytest_gpumem.measuring.ranks.consensus import Consensus
    from pytest_gpumem.measuring.ranks.launch import Launch
    from pytest_gpumem.measuring.ranks.watch import Watch

_MOST_SHOWN = 5
"""The most tests in a message on different selections."""


class RankSession(OneProcess):
    """A rank's session. Between `join` and `leave`, a `Watch` ends it if another rank is lost."""

    consensus: Consensus

    def __init__(self, launch: Launch, seconds: float) -> None:
        """Make a launched rank's session.

        Args:
            launch: The rank's number, its launcher and its addresses.
            seconds: The value of ``--gpumem-rank-timeout``.
        """
        self.rank: Rank = launch.rank
        self.command = launch.command
        self.has_ended = True
        """True if the other ranks know how the current test ended on this rank."""
        self._launch = launch
        self._seconds = seconds
        self._watch: Watch | None = None
        self._writes = False
        self._has_sent_end = False

    @property
    def watch(self) -> Watch:
        assert self._watch is not None, "the session has joined the other ranks"
        return self._watch

    def join(self, root: Path, lost: Callable[[str], object]) -> None:
        """Connect to the other ranks. Raises `BoardError`.

        Args:
            root: The project's folder.
            lost: Called on rank 0 in another thread if a rank is lost, before the process ends. The argument is the reason.
        """
        from pytest_gpumem.measuring.ranks.board import Board
        from pytest_gpumem.measuring.ranks.consensus import Consensus
        from pytest_gpumem.measuring.ranks.watch import Watch

        self.consensus = Consensus(Board(self._launch, self._seconds), self.rank)
        self._watch = Watch(self._launch, self.consensus, self._seconds, root, lost)
        self._watch.start()

    def differing(self, tests: Sequence[str], measured: Sequence[str], not_collected: Sequence[str]) -> str | None:
        """Return a sentence if the ranks are about to run or measure different tests; ``None`` if all agree.

        Args:
            tests: This rank's tests by id, in their order.
            measured: The measured tests among them, by id.
            not_collected: This rank's files with errors in their collection.
        """
        selections = self.consensus.exchange([list(tests), list(measured), list(not_collected)])
        tests_of_first, measured_on_first, not_collected_on_first = selections[0]
        for number, (tests_of_rank, measured_on_rank, not_collected_on_rank) in enumerate(selections):
            rank = Rank(number, self.rank.world)
            if tests_of_rank != tests_of_first:
                return differing_text(
                    rank, tests_of_first, tests_of_rank, not_collected_on_rank, not_collected_on_first
                )
            measured_on_one = sorted(set(measured_on_first) ^ set(measured_on_rank))
            if measured_on_one:
                measuring_rank = "rank 0" if measured_on_one[0] in measured_on_first else str(rank)
                return (
                    f"only {measuring_rank} measures {measured_on_one[0]}, of rank 0 and {rank}, so the test cannot be gated. "
                    "Give it the marker, or the fixture, on every rank"
                )
        return None

    def begin(self, nodeid: str) -> None:
        """Begin a measured test together with all ranks. Raises `RankLost` if a rank begins another test."""
        self.consensus.begin_test()
        self.has_ended = False
        nodeids = self.consensus.exchange(nodeid)
        for number, nodeid_of_rank in enumerate(nodeids):
            if nodeid_of_rank != nodeids[0]:
                raise RankLost(f"{Rank(number, self.rank.world)} runs {nodeid_of_rank}, and rank 0 {nodeids[0]}")

    def agreed(self, verdict: TestVerdict, decide: Callable[[TestVerdict], TestVerdict]) -> TestVerdict:
        return self._decided(RankEnd("judged", verdict), verdict, decide) or verdict

    def ended_by_itself(self, end: RankEnd, nothing: TestVerdict) -> TestVerdict | None:
        """Tell the other ranks that this rank's test ended by an error or a skip, and return the common verdict.

        Args:
            end: How the test ended.
            nothing: The verdict on the test without a measurement.

        Returns:
            The verdict of all ranks; ``None`` if all ranks skipped the test.
        """
        return self._decided(end, nothing, lambda verdict: verdict)

    def _decided(
        self, end: RankEnd, own_verdict: TestVerdict, decide: Callable[[TestVerdict], TestVerdict]
    ) -> TestVerdict | None:
        """Send the end of a test to rank 0, which combines all ends and decides. Return the decided verdict."""
        self.has_ended = True
        if not self.rank.is_first:
            self.consensus.end_test(to_plain(end), end.failure)
            decision = self.consensus.decision()
            return None if decision is None else replace(own_verdict, failure=decision["failure"])
        decision = {"failure": f"{self.rank} ended the test without a verdict"}
        try:
            # Rank 0 need not send its own verdict.
            plain_ends: list[Any] = self.consensus.end_test({}, end.failure) or []
            ends = [end, *(from_plain(RankEnd, plain_end) for plain_end in plain_ends[1:])]
            without_results = replace(own_verdict, verdicts=(), missing=(), missing_on=(), relations=0)
            combined = verdict_of_all(ends, without_results)
            if combined is not None and combined.failure is None:
                combined = decide(combined)
            decision = None if combined is None else {"failure": combined.failure}
            return combined
        except RankLost as error:
            decision = {"failure": str(error)}
            raise
        finally:
            self.consensus.decide(decision)

    def end_tests(self, failed: Sequence[str], ended_early: str | None) -> None:
        """Tell the other ranks about the end of this rank's tests.

        Args:
            failed: The failures on this rank outside of any verdict, each as a clause.
            ended_early: The reason why this rank did not run all of its tests; ``None`` if it ran all.
        """
        self._has_sent_end = True
        self.consensus.end_session([list(failed), ended_early])

    def write_now(self) -> None:
        """Announce that this rank writes reports and baselines. Until `leave`, the watch does not end the process."""
        # If the watch is reporting a lost rank, this waits until the process ends.
        if not self._writes:
            self._writes = self.watch.writing.acquire()

    def leave(self) -> None:
        """Wait until every rank is about to exit, and end the watch."""
        if self._watch is None:
            return
        from pytest_gpumem.measuring.ranks.errors import BoardError

        self._watch.where, self._watch.measures, self._watch.leaves = "the end of its session", False, True
        if self._writes:
            self._watch.writing.release()
        try:
            if not self._has_sent_end:
                with suppress(BoardError):
                    self.end_tests([], "its session ended before its first test")
            # Rank 0 may serve the key-value store, so it ends last. It does not wait for ranks that have read its entry.
            with suppress(BoardError):
                self.consensus.leave()
        finally:
            self._watch.end()
            self._watch = None


def ranks_of(seconds: float, environ: Mapping[str, str]) -> OneProcess | RankSession:
    """Return the session of this rank, or `OneProcess` if the process is not a rank.

    Args:
        seconds: The value of ``--gpumem-rank-timeout``.
        environ: The environment, with the launcher's variables such as ``WORLD_SIZE``.

    Raises:
        LaunchError: A launcher's variable is missing or wrong.
    """
    launch = launch_of(environ)
    return OneProcess() if launch is None else RankSession(launch, seconds)


def differing_text(
    rank: Rank,
    tests_of_first: Sequence[str],
    tests_of_rank: Sequence[str],
    files: Sequence[str],
    files_of_first: Sequence[str],
) -> str:
    """Return a sentence on a rank whose tests differ from rank 0's.

    Args:
        rank: The rank.
        tests_of_first: Rank 0's tests.
        tests_of_rank: The rank's tests.
        files: The rank's files with errors in their collection.
        files_of_first: Rank 0's files with errors in their collection.

    Returns:
        For example, ``rank 1 of 2 selected other tests than rank 0: it lacks test_it.py::test_b. Every rank has to select the
        same tests: ...``.
    """
    lacking = [test for test in tests_of_first if test not in set(tests_of_rank)]
    more = [test for test in tests_of_rank if test not in set(tests_of_first)]
    if not lacking and not more:
        return (
            f"{rank} runs the same tests as rank 0 in another order; use the same order on every rank (with pytest-randomly: "
            "-p no:randomly)"
        )
    parts = []
    if lacking:
        parts.append(f"lacks {_listed(lacking)}")
    if more:
        parts.append(f"has {_listed(more)} as well")
    broken = f"; it could not collect {_listed(files)}" if files else ""
    broken += f"; rank 0 could not collect {_listed(files_of_first)}" if files_of_first else ""
    return (
        f"{rank} selected other tests than rank 0: it {' and '.join(parts)}{broken}. Every rank has to select the same tests; "
        "move code that differs between ranks into the tests"
    )


def _listed(names: Sequence[str]) -> str:
    more = len(names) - _MOST_SHOWN
    return ", ".join(names[:_MOST_SHOWN]) + (f" and {more} more" if more > 0 else "")
