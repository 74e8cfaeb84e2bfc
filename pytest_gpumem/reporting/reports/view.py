"""Make the rows for all report formats: how each test ended, why it failed, and how to accept its figures. Pure."""

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
    """A test's status at its end, in ``words`` and as a one-character ``mark``. ``fails`` is true if the test failed."""

    words: str
    fails: bool

    @property
    def mark(self) -> str:
        return _MARKS[self.words]

    @property
    def note(self) -> str:
        """``failed`` or ``not failed`` if the words suggest the opposite; otherwise empty."""
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
_NOT_JUDGED = "the test failed for a reason other than its measurements"


@dataclass(frozen=True, slots=True)
class ShownMeasurement:
    """A measurement and its test, as reports show them."""

    test: TestVerdict
    verdict: Verdict
    device: str | None = None
    """The device's name if shards measured the test on several devices; otherwise ``None``."""
    accepted: frozenset[Outcome] = frozenset()
    """The outcomes whose figures became the baseline."""

    @property
    def outcome(self) -> Outcome:
        return self.test.outcome_of(self.verdict)

    def words_of(self, outcome: Outcome) -> str:
        """Return the words for the outcome of the measurement or a metric."""
        return ACCEPTED if outcome in self.accepted else outcome.words

    @property
    def title(self) -> str:
        """The test's id. The measurement's name and the device follow if the test has several of them."""
        name = f" ({self.verdict.measurement.name})" if len(self.test.verdicts) > 1 else ""
        return f"{self.test.nodeid}{name}{f' on {self.device}' if self.device else ''}"


@dataclass(frozen=True, slots=True)
class ReportRow:
    """A test's row in a report: how the test ended, and its measurements."""

    file: str
    test: str
    status: Status
    why: str = ""
    """The reason why the test failed: the gate's complete failure text, or a sentence. Empty if the test did not fail."""
    accept: str = ""
    """The command to accept the test's new figures as baselines; empty if a baseline would not fix the failure."""
    bisect: str = ""
    """The command to find the package that caused a regression; empty if no package changed."""
    notes: tuple[str, ...] = ()
    """Notes on the test as clauses, for example why it was not measured, or why it did not fail."""
    measured: tuple[ShownMeasurement, ...] = ()
    result: TestResult | None = None
    """The test's result; ``None`` if the test did not finish."""

    @property
    def title(self) -> str:
        return f"{self.file}::{self.test}"

    @property
    def headline(self) -> str:
        """The reason why the test failed, on a single line."""
        return headline(self.why)


def rows_of(report: SessionReport) -> tuple[ReportRow, ...]:
    """Return a row for each test in a session. Tests that did not finish come last."""
    several = _on_several_devices(report.results)
    return (
        *(_row(result, several, report.terms.update) for result in report.results),
        *(
            ReportRow(file, test, Status(NOT_RUN, fails=True), "The test was selected, but did not finish")
            for file, test in report.not_run
        ),
    )


def shown_measurements(results: Sequence[TestResult], update: UpdateMode | None = None) -> list[ShownMeasurement]:
    """Return the measurements from all tests. ``update`` is the session's ``--gpumem-update``."""
    several = _on_several_devices(results)
    return [measured for result in results for measured in _measured(result, several, update)]


def why_failed(result: TestResult) -> str:
    """Return the reason why a test failed: the gate's complete failure text, or else a sentence with the phase."""
    verdict = result.verdict
    if verdict.failure:
        return verdict.failure
    clause = WHY_FAILED[result.failed_in or ("call" if verdict.failed_by_itself else None)]
    if verdict.failed_by_itself and result.failed_in == "call":
        clause = verdict.unmeasured or clause  # the figures may be invalid
    return clause[0].upper() + clause[1:]


def headline(why: str) -> str:
    """Return the first line of a failure text."""
    return next((line for line in why.split("\n") if line.strip()), "The gate failed it" if why else "")


def state_of(report: SessionReport) -> Literal["passed", "failed", "idle"]:
    """Return how a session ended: ``passed``, ``failed``, or ``idle`` if nothing was compared and nothing failed."""
    if not report.passed:
        return "failed"
    return "passed" if any(result.verdict.gated for result in report.results) else "idle"


def origin_line(origin: Origin, *, reason: bool = False) -> str:
    """Return a baseline's date, device, torch release and commit. With ``reason``, add why it was accepted."""
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
    yield from (process for process in verdict.unmeasured_processes if process not in (verdict.unmeasured or ""))
    if verdict.missing_text is not None:
        yield verdict.missing_text
    if result.failed and verdict.failure is None and not verdict.unmeasured:
        yield _NOT_JUDGED
    elif not result.failed and verdict.outcome in FAILING and not result.is_accepted_by(update):
        if verdict.failure is None and update is not None:
            yield f"the verdict did not fail the test: --gpumem-update={update} compares only to choose baselines to write"
        else:
            yield "the verdict did not fail the test: the test is expected to fail (xfail), or passed when it ran again"
    if verdict.relations:
        yield f"the test asserted {counted(verdict.relations, 'relation')}, which held"


def _measured(result: TestResult, several: frozenset[str], update: UpdateMode | None) -> Iterable[ShownMeasurement]:
    test, accepts = result.verdict, result.is_accepted_by(update)
    for verdict in () if test.unmeasured else test.verdicts:
        device = verdict.measurement.environment.device if test.nodeid in several else None
        yield ShownMeasurement(test, verdict, device, ACCEPTS[update] & _COMPARED if accepts else frozenset())


def _on_several_devices(results: Iterable[TestResult]) -> frozenset[str]:
    """Return the ids of tests with measurements on several devices."""
    tests = [result.verdict for result in results if not result.verdict.unmeasured]
    pairs = {(test.nodeid, verdict.measurement.environment.device) for test in tests for verdict in test.verdicts}
    devices = Counter(nodeid for nodeid, _ in pairs)
    return frozenset(nodeid for nodeid, count in devices.items() if count > 1)
