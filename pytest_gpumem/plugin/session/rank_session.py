"""The session of a rank. The ranks exchange their lists of tests and their verdicts, so they all make the same decisions.

For example, with ``torchrun --nproc-per-node=2`` each test runs on two ranks. Both ranks send their verdict to rank 0. Rank
0 combines the verdicts, decides whether the test fails, and sends the decision back.
"""

from __future__ import annotations

from contextlib import suppress
from dataclasses import replace
from typing import TYPE_CHECKING, Any

from pytest_gpumem.base.errors import RankLost
from pytest_gpumem.facts.values.plain import from_plain, to_plain
from pytest_gpumem.facts.values.rank import Rank
from pytest_gpumem.judging.gate.rank_verdicts import RankEnd, verdict_of_all
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
"""The maximum number of tests to name in a message about ranks with different tests."""


class RankSession(OneProcess):
    """The session of a rank.

    Between `join` and `leave`, a `Watch` ends the session if another rank is lost, because it has crashed or is stuck.
    """

    consensus: Consensus

    def __init__(self, launch: Launch, seconds: float) -> None:
        """Create the session.

        Args:
            launch: The rank's number and start, from the launcher's environment variables.
            seconds: The value of ``--gpumem-rank-timeout``.
        """
        self.rank: Rank = launch.rank
        self.command = launch.command
        self.has_ended = True
        """True if the end of the current test on this rank has been sent to the other ranks."""
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
            root: pytest's root directory.
            lost: A function that is called on rank 0 if a rank is lost, in another thread and before the process ends. Its
                argument is the reason.
        """
        from pytest_gpumem.measuring.ranks.board import Board
        from pytest_gpumem.measuring.ranks.consensus import Consensus
        from pytest_gpumem.measuring.ranks.watch import Watch

        self.consensus = Consensus(Board(self._launch, self._seconds), self.rank)
        self._watch = Watch(self._launch, self.consensus, self._seconds, root, lost)
        self._watch.start()

    def differing(self, tests: Sequence[str], measured: Sequence[str], not_collected: Sequence[str]) -> str | None:
        """Return a sentence if the ranks have selected or will measure different tests; ``None`` if all ranks have the same
        tests.

        Args:
            tests: The ids of this rank's tests, in the order in which they run.
            measured: The ids of the measured tests among ``tests``.
            not_collected: The files which this rank could not collect because of errors.
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
                ranks = ["rank 0", str(rank)]
                measuring_rank, other_rank = ranks if measured_on_one[0] in measured_on_first else reversed(ranks)
                return (
                    f"{measured_on_one[0]} is measured on {measuring_rank}, but not on {other_rank}, so it cannot be gated. "
                    "Give it the marker, or the fixture, on every rank"
                )
        return None

    def begin(self, nodeid: str) -> None:
        """Wait until all ranks begin a measured test. Raises `RankLost` if a rank begins another test."""
        self.consensus.begin_test()
        self.has_ended = False
        nodeids = self.consensus.exchange(nodeid)
        for number, nodeid_of_rank in enumerate(nodeids):
            if nodeid_of_rank != nodeids[0]:
                raise RankLost(f"{Rank(number, self.rank.world)} runs {nodeid_of_rank}, but rank 0 runs {nodeids[0]}")

    def agreed(self, verdict: TestVerdict, decide: Callable[[TestVerdict], TestVerdict]) -> TestVerdict:
        return self._decided(RankEnd("judged", verdict), verdict, decide) or verdict

    def ended_by_itself(self, end: RankEnd, nothing: TestVerdict) -> TestVerdict | None:
        """Tell the other ranks that an error or a skip ended the test on this rank, and return the combined verdict.

        Args:
            end: How the test ended on this rank.
            nothing: The verdict that this test was not measured.

        Returns:
            The combined verdict of all ranks; ``None`` if all ranks skipped the test.
        """
        return self._decided(end, nothing, lambda verdict: verdict)

    def _decided(
        self, end: RankEnd, own_verdict: TestVerdict, decide: Callable[[TestVerdict], TestVerdict]
    ) -> TestVerdict | None:
        """Tell rank 0 how the test ended on this rank, and return the verdict with rank 0's decision.

        Rank 0 combines the verdicts of all ranks before it decides.
        """
        self.has_ended = True
        if not self.rank.is_first:
            self.consensus.end_test(to_plain(end), end.failure)
            decision = self.consensus.decision()
            return None if decision is None else replace(own_verdict, failure=decision["failure"])
        decision = {"failure": f"{self.rank} ended the test without a verdict"}
        try:
            # Rank 0 does not have to send its own verdict, so pass an empty mapping.
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
        """Tell the other ranks that this rank has run its tests.

        Args:
            failed: The failures on this rank which are not in a verdict, each as a text.
            ended_early: The reason why this rank did not run all of its tests; ``None`` if it ran all of them.
        """
        self._has_sent_end = True
        self.consensus.end_session([list(failed), ended_early])

    def write_now(self) -> None:
        """Call this before the rank writes reports and baselines. Until `leave`, the `Watch` will not end the process."""
        # If the watch is just reporting a lost rank, this call blocks until the watch ends the process.
        if not self._writes:
            self._writes = self.watch.writing.acquire()

    def leave(self) -> None:
        """Wait until all ranks are about to exit, and end the watch."""
        if self._watch is None:
            return
        from pytest_gpumem.base.errors import BoardError

        self._watch.where, self._watch.measures, self._watch.leaves = "the end of its session", False, True
        if self._writes:
            self._watch.writing.release()
        try:
            if not self._has_sent_end:
                with suppress(BoardError):
                    self.end_tests([], "its session ended before its first test")
            # Ignore errors: the key-value store may be in rank 0's process, so the store is gone if rank 0 ends first.
            with suppress(BoardError):
                self.consensus.leave()
        finally:
            self._watch.end()
            self._watch = None


def ranks_of(seconds: float, environ: Mapping[str, str]) -> OneProcess | RankSession:
    """Return a `RankSession` if this process is a rank, otherwise a `OneProcess`.

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
    """Return a sentence about a rank with other tests than rank 0.

    Args:
        rank: The rank.
        tests_of_first: Rank 0's tests.
        tests_of_rank: The rank's tests.
        files: The files which the rank could not collect because of errors.
        files_of_first: The files which rank 0 could not collect because of errors.

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
