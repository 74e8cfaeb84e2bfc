"""The plugin for a rank's session. It makes all ranks run the same test at the same time.

For example, if ``test_step`` raises an error on rank 1, rank 0 receives this error and fails ``test_step`` as well. So a
rank never waits for another rank which is already in the next test.
"""

from __future__ import annotations

from contextlib import suppress
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

import pytest

from pytest_gpumem.base.errors import BoardError, RankLost
from pytest_gpumem.facts.values.rank import Rank
from pytest_gpumem.judging.gate.rank_verdicts import RankEnd
from pytest_gpumem.plugin.runtest.recorded_verdict import failure_of, record_verdict, unittest_errors

if TYPE_CHECKING:
    from collections.abc import Callable, Generator, Mapping
    from typing import NoReturn

    from pytest_gpumem.plugin.config.selection import MeasuredTest
    from pytest_gpumem.plugin.session.rank_session import RankSession

_MOST_TEXT = 20_000
"""The maximum number of characters in the text of an exception for other ranks. Only the end of a longer text is sent."""
_LEAVES = (KeyboardInterrupt, SystemExit, pytest.exit.Exception)
"""Exceptions which end the whole session and not only a test."""


@dataclass(eq=False, repr=False)
class RankHooks:
    """Hooks that run around the hooks in `Measuring`. They see a test's failure after `Measuring` has recorded it."""

    ranks: RankSession
    """The connection to the other ranks."""
    measured: Mapping[pytest.Item, MeasuredTest]
    add_error: Callable[[str], object]
    """A function to call on rank 0 with each error from another rank's session."""
    current: MeasuredTest | None = None
    """The running measured test; ``None`` if no measured test is running."""
    _failed: list[str] = field(default_factory=list)
    """Failures on this rank which are not in a verdict, for example in a teardown. Each is a text."""

    @pytest.hookimpl(wrapper=True, trylast=True)
    def pytest_runtest_setup(self, item: pytest.Item) -> Generator[None, object, object]:
        self._comes_to(item, "set-up")
        measured = self.measured.get(item)
        if measured is None:
            return (yield)
        watch = self.ranks.watch
        self.current, watch.measures = measured, True
        try:
            self.ranks.begin(item.nodeid)
        except RankLost as lost:
            _stop(item, lost)
        return (yield from self._until_it_ends(item, measured, "set-up"))

    @pytest.hookimpl(wrapper=True, trylast=True)
    def pytest_runtest_call(self, item: pytest.Item) -> Generator[None, object, object]:
        self._comes_to(item, "call")
        measured = self.measured.get(item)
        if measured is None or self.ranks.has_ended:
            return (yield)
        return (yield from self._until_it_ends(item, measured, "call"))

    @pytest.hookimpl(wrapper=True, tryfirst=True)
    def pytest_runtest_teardown(self, item: pytest.Item) -> Generator[None, object, object]:
        self._comes_to(item, "tear-down")
        try:
            return (yield)
        finally:
            self.current, self.ranks.watch.measures = None, False
            self.ranks.watch.where = f"what follows {item.nodeid}"

    def _comes_to(self, item: pytest.Item, phase: str) -> None:
        self.ranks.watch.where = where = f"{item.nodeid} ({phase})"
        with suppress(BoardError):  # if the connection is lost, `Watch` reports it
            self.ranks.consensus.comes_to(where)

    def _until_it_ends(self, item: pytest.Item, measured: MeasuredTest, phase: str) -> Generator[None, object, object]:
        """Run a phase (set-up or call) of a measured test. If the test fails in this phase, end it on all ranks."""
        try:
            result = yield
            errors = unittest_errors(item)
            if errors and not self.ranks.has_ended:
                self._end(item, measured, errors[0], phase)
            return result
        except _LEAVES:
            raise
        except BaseException as error:
            if not self.ranks.has_ended:
                self._end(item, measured, error, phase)
            elif isinstance(error, RankLost):
                _stop(item, error)
            raise

    def _end(self, item: pytest.Item, measured: MeasuredTest, error: BaseException, phase: str) -> None:
        """Tell the other ranks that ``error`` ended the test.

        Unless the test raised ``error`` itself, raise a failure with the combined verdict of all ranks.
        """
        end = _end_of(item, error, phase)
        try:
            verdict = self.ranks.ended_by_itself(end, measured.not_measured(end.why, failed_by_itself=True))
        except RankLost as lost:
            _stop(item, lost)
        if verdict is None or verdict.failure is None:
            return
        record_verdict(item, verdict)
        if end.how == "raised":
            # The caller raises the error again, with its own traceback.
            item.add_report_section("call", "gpumem ranks", verdict.failure.partition("\n\n")[0])
            return
        raise pytest.fail.Exception(verdict.failure, pytrace=False) from None

    def pytest_runtest_logreport(self, report: pytest.TestReport) -> None:
        if report.outcome != "failed" or hasattr(report, "wasxfail"):
            return
        is_in_no_verdict = report.when == "teardown" or hasattr(report, "context")  # a subtest's report has a context
        if is_in_no_verdict or not any(item.nodeid == report.nodeid for item in self.measured):
            phase = {"setup": "set-up", "teardown": "tear-down"}.get(report.when or "", "call")
            text = str(report.longrepr).strip()[-_MOST_TEXT:]
            self._failed.append(f"{report.nodeid} failed in its {phase}: {_last_line(report)}\n{text}")

    @pytest.hookimpl(wrapper=True)
    def pytest_runtestloop(self, session: pytest.Session) -> Generator[None, object, object]:
        ended_early: str | None = None
        try:
            result = yield
        except BaseException as error:
            ended_early = str(error) or type(error).__name__
            self.ranks.end_tests(self._failed, ended_early)
            self.ranks.write_now()
            raise
        watch = self.ranks.watch
        watch.where, watch.measures = "the end of its tests", False
        self.ranks.end_tests(self._failed, ended_early)
        if self.ranks.rank.is_first:
            self._report_other_ranks(self.ranks.consensus.ends_of_sessions())
        self.ranks.write_now()
        return result

    def _report_other_ranks(self, ends: list[Any]) -> None:
        for number, (failed, ended_early) in enumerate(ends):
            if number == 0:
                continue
            rank = Rank(number, len(ends))
            for failure in failed:
                self.add_error(f"{rank}: {failure}")
            if ended_early is not None:
                self.add_error(f"{rank} ended early: {ended_early}")


def _stop(item: pytest.Item, lost: RankLost) -> NoReturn:
    """Fail a test because another rank is lost, and stop the session before the next test."""
    item.session.shouldstop = str(lost)
    raise pytest.fail.Exception(f"gpumem: {lost}", pytrace=False) from None


def _end_of(item: pytest.Item, error: BaseException, phase: str) -> RankEnd:
    if isinstance(error, RankLost):
        return RankEnd("followed", why=str(error))
    if isinstance(error, pytest.skip.Exception):
        return RankEnd("skipped", why=str(error))
    text = str(item.repr_failure(pytest.ExceptionInfo.from_exception(error)))
    prefix = "" if isinstance(error, pytest.fail.Exception) else f"{type(error).__name__}: "
    message = str(error).strip().partition("\n")[0]
    assert failure_of(item) is not error, "all ranks already know the gate's own failure"
    return RankEnd("raised", why=f"{prefix}{message}".removesuffix(": "), when=phase, text=text[-_MOST_TEXT:])


def _last_line(report: pytest.TestReport) -> str:
    crash = getattr(report.longrepr, "reprcrash", None)
    return str(report.longrepr if crash is None else crash.message).strip().partition("\n")[0]
