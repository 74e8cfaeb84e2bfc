"""Make the rows for all report formats: how each test ended, why it failed, and which command accepts it. Pure."""

from __future__ import annotations

from collections import Counter
from dataclasses import dataclass
from typing import TYPE_CHECKING, Literal

from pytest_gpumem.base.units import counted
from pytest_gpumem.judging.baselines.update import ACCEPTS
from pytest_gpumem.judging.gate.verdict import COMPARED, FAILING, WHY_FAILED, Outcome
from pytest_gpumem.reporting.reports.results import ACCEPTED

if TYPE_CHECKING:
    from collections.abc import Iterable, Sequence

    from pytest_gpumem.facts.values.option_words import UpdateMode
    from pytest_gpumem.judging.gate.verdict import Origin, TestVerdict, Verdict
    from pytest_gpumem.reporting.reports.results import TestResult
    from pytest_gpumem.reporting.reports.session_report import SessionReport


BY_ITSELF, NOT_RUN = "failed by itself", "not run"
_MARKS = {
    Outcome.RECORDED.words: "·",
    Outcome.OK.words: "✓",
    Outcome.IMPROVED.words: "↓",
    ACCEPTED: "»",
    Outcome.NEW.words: "+",
    Outcome.FOREIGN.words: "⇄",
    Outcome.STALE.words: "≠",
    Outcome.UNMEASURED.words: "○",
    Outcome.UNCERTAIN.words: "?",
    Outcome.MISSING.words: "∅",
    Outcome.REGRESSED.words: "↑",
    Outcome.OVER_BUDGET.words: "✕",
    BY_ITSELF: "!",
    NOT_RUN: "…",
}
_SEVERITY = list(_MARKS)
_ALWAYS_FAIL = frozenset({*(outcome.words for outcome in FAILING), BY_ITSELF, NOT_RUN})


@dataclass(frozen=True, slots=True)
class Status:
    """The end of a test: in ``words``, as a short ``mark``, and whether the test ``fails`` the gate."""

    words: str
    fails: bool

    @property
    def mark(self) -> str:
        return _MARKS[self.words]

    @property
    def note(self) -> str:
        """``failed`` or ``not failed``, if the status alone suggests the opposite; otherwise empty."""
        if self.fails == (self.words in _ALWAYS_FAIL):
            return ""
        return "failed" if self.fails else "not failed"

    @property
    def severity(self) -> int:
        """A number that is higher for a more serious status."""
        return _SEVERITY.index(self.words)

    @property
    def slug(self) -> str:
        return self.words.replace(" ", "-")


_COMPARED = COMPARED | {Outcome.STALE}
_NOT_JUDGED = "it failed for a reason other than its measurements"


@dataclass(frozen=True, slots=True)
class ShownMeasurement:
    """A measurement with its test."""

    test: TestVerdict
    verdict: Verdict
    device: str | None = None
    """The device, if shards measured the test on several devices."""
    accepted: frozenset[Outcome] = frozenset()
    """The outcomes whose figures became the baseline."""

    @property
    def outcome(self) -> Outcome:
        return self.test.outcome_of(self.verdict)

    def words_of(self, outcome: Outcome) -> str:
        """Return a measurement's or metric's outcome as text."""
        return ACCEPTED if outcome in self.accepted else outcome.words

    @property
    def title(self) -> str:
        """The test's id, with the measurement's name if the test has several, and the device if it used several."""
        name = f" ({self.verdict.measurement.name})" if len(self.test.verdicts) > 1 else ""
        return f"{self.test.nodeid}{name}{f' on {self.device}' if self.device else ''}"


@dataclass(frozen=True, slots=True)
class ReportRow:
    """A test in a session: its end and its measurements."""

    file: str
    test: str
    status: Status
    why: str = ""
    """The reason why it failed: the gate's complete text, or a sentence. Empty if it did not fail."""
    accept: str = ""
    """The command to accept the failed figures."""
    bisect: str = ""
    """The command to find the responsible package."""
    notes: tuple[str, ...] = ()
    """Notes on the test as clauses, for example why it was not measured, or why it did not fail."""
    measured: tuple[ShownMeasurement, ...] = ()
    result: TestResult | None = None
    """The test's result; ``None`` if it did not finish."""

    @property
    def title(self) -> str:
        return f"{self.file}::{self.test}"

    @property
    def headline(self) -> str:
        """The reason why it failed, on a single line."""
        return headline(self.why)


def rows_of(report: SessionReport) -> tuple[ReportRow, ...]:
    """Return the tests in a session. Tests without a result come last."""
    several = _on_several_devices(report.results)
    return (
        *(_row(result, several, report.terms.update) for result in report.results),
        *(
            ReportRow(file, test, Status(NOT_RUN, fails=True), "It was selected, and did not finish")
            for file, test in report.not_run
        ),
    )


def shown_measurements(results: Sequence[TestResult], update: UpdateMode | None = None) -> list[ShownMeasurement]:
    """Return the measurements from all tests in a session with this update."""
    several = _on_several_devices(results)
    return [measured for result in results for measured in _measured(result, several, update)]


def why_failed(result: TestResult) -> str:
    """Return why a test failed: the gate's complete text, or else a sentence with the phase."""
    verdict = result.verdict
    if verdict.failure:
        return verdict.failure
    clause = WHY_FAILED[result.failed_in or ("call" if verdict.failed_by_itself else None)]
    return clause[0].upper() + clause[1:]


def headline(why: str) -> str:
    """Return a failure's first line."""
    return next((line for line in why.split("\n") if line.strip()), "The gate failed it" if why else "")


def state_of(report: SessionReport) -> Literal["passed", "failed", "idle"]:
    """Return how a session ended; ``idle`` if nothing failed because nothing was compared."""
    if not report.passed:
        return "failed"
    return "passed" if any(result.verdict.gated for result in report.results) else "idle"


def origin_line(origin: Origin, *, reason: bool = False) -> str:
    """Return when, where and with which torch a baseline was recorded, and with ``reason`` why it was accepted."""
    parts = [origin.recorded, origin.device, f"torch {origin.torch}"]
    parts += [f"commit {origin.commit}"] if origin.commit else []
    parts += [f"reason: {origin.reason}"] if reason and origin.reason else []
    return ", ".join(parts)


def _row(result: TestResult, several: frozenset[str], update: UpdateMode | None) -> ReportRow:
    verdict = result.verdict
    return ReportRow(
        verdict.file,
        verdict.test,
        Status(
            BY_ITSELF
            if verdict.failed_by_itself
            else ACCEPTED
            if result.is_accepted_by(update)
            else verdict.outcome.words,
            fails=result.failed,
        ),
        why_failed(result) if result.failed else "",
        verdict.accept or "",
        verdict.bisect or "",
        tuple(_notes(result, update)),
        tuple(_measured(result, several, update)),
        result,
    )


def _notes(result: TestResult, update: UpdateMode | None) -> Iterable[str]:
    verdict = result.verdict
    if verdict.unmeasured and not verdict.failed_by_itself:
        yield f"not measured: {verdict.unmeasured}"
    if verdict.missing_text is not None:
        yield verdict.missing_text
    if result.failed and verdict.failure is None and not verdict.unmeasured:
        yield _NOT_JUDGED
    elif not result.failed and verdict.outcome in FAILING and not result.is_accepted_by(update):
        if verdict.failure is None and update is not None:
            yield f"it did not fail for this: --gpumem-update={update} compares only to know what to write"
        else:
            yield "it did not fail for this: it is expected to fail (xfail), or passed when it ran again"
    if verdict.relations:
        yield f"it asserted {counted(verdict.relations, 'relation')}, which held"


def _measured(result: TestResult, several: frozenset[str], update: UpdateMode | None) -> Iterable[ShownMeasurement]:
    test, accepts = result.verdict, result.is_accepted_by(update)
    for verdict in () if test.unmeasured else test.verdicts:
        device = verdict.measurement.environment.device if test.nodeid in several else None
        yield ShownMeasurement(test, verdict, device, ACCEPTS[update] & _COMPARED if accepts else frozenset())


def _on_several_devices(results: Iterable[TestResult]) -> frozenset[str]:
    """Return the ids of tests with several devices."""
    tests = [result.verdict for result in results if not result.verdict.unmeasured]
    pairs = {(test.nodeid, verdict.measurement.environment.device) for test in tests for verdict in test.verdicts}
    devices = Counter(nodeid for nodeid, _ in pairs)
    return frozenset(nodeid for nodeid, count in devices.items() if count > 1)
