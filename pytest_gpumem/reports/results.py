"""Results of a session's measured tests: collected from pytest's reports, counted in one line. Pure."""

from __future__ import annotations

import json
from collections import Counter
from dataclasses import dataclass, field, replace
from typing import TYPE_CHECKING

from pytest_gpumem.baselines.update import ACCEPTS
from pytest_gpumem.gate.speed import NO_TIME
from pytest_gpumem.gate.verdict import SKIPPED, WHY_FAILED, FailedIn, MetricVerdict, Outcome, TestVerdict
from pytest_gpumem.units import counted
from pytest_gpumem.values.plain import from_plain, to_plain

if TYPE_CHECKING:
    from collections.abc import Collection, Iterable

    import pytest

    from pytest_gpumem.values.option_words import UpdateMode

PROPERTY = "gpumem"
"""The ``user_properties`` entry in which a test's verdict travels, as JSON."""


_COUNTED = (
    *(Outcome.OVER_BUDGET, Outcome.REGRESSED, Outcome.MISSING, Outcome.IMPROVED, Outcome.UNCERTAIN),
    *(Outcome.NEW, Outcome.STALE, Outcome.FOREIGN, Outcome.UNMEASURED, Outcome.RECORDED),
)
"""The outcomes that the line which accounts for every test counts, in its order."""
_FIRST = frozenset({Outcome.NEW, Outcome.FOREIGN})
"""Outcomes of what has no baseline here."""
_WITHOUT_BASELINE = _FIRST | {Outcome.STALE}
"""Outcomes of what has no comparable baseline, and may be held to a budget or a relation."""
ACCEPTED = "accepted"
"""The end of a test whose change became the baseline."""


@dataclass(frozen=True, slots=True)
class Renaming:
    """The likely former name of a new test. Its unused baseline has the same step, batch and device."""

    file: str
    """The file of the former test, from the root directory."""
    test: str
    """The id of the former test without its file."""
    grown: MetricVerdict | None = None
    """The metric that is worse than its baseline by more than the tolerance; ``None`` if none is."""
    accept: str = ""
    """The command that accepts the figures of the new test."""
    prune: str = ""
    """The command that removes the baseline, if it belongs to a different test."""

    @property
    def nodeid(self) -> str:
        return f"{self.file}::{self.test}"


@dataclass(frozen=True, slots=True)
class TestResult:
    """A measured test after it has run."""

    __test__ = False

    verdict: TestVerdict
    """The verdict on the test."""
    passed: bool
    """True if all its phases passed. A test that was skipped, or failed as expected, has neither ``passed`` nor ``failed``."""
    failed: bool = False
    """True if any of its phases failed."""
    failed_in: FailedIn | None = None
    """The part of its run in which it failed first: ``setup``, ``call``, ``subtest``, ``teardown``, or ``worker`` if the
    process that ran it crashed. ``None`` if it did not fail.
    """
    failed_by_gate: bool = False
    """True if the gate failed it, and nothing else did."""
    unwritten: bool = False
    """True if the store could not be written, for example on a full disk, and lacks the accepted figures of this test."""

    renamed: Renaming | None = None
    """Its likely former name; ``None`` if it has a baseline, or no unused baseline is like it."""

    @property
    def has_grown_renamed(self) -> bool:
        """True if it is worse than the baseline of its former name."""
        return self.renamed is not None and self.renamed.grown is not None

    def is_held_back_by(self, update: UpdateMode | None) -> bool:
        """Return whether a session with this update leaves it unwritten, because it has grown since it was renamed."""
        return update == "new" and self.has_grown_renamed

    def is_recorded_by(self, update: UpdateMode | None) -> bool:
        """Return whether a session with this update writes what was measured as its first baselines."""
        is_written = self.passed and not self.unwritten and not self.is_held_back_by(update)
        return is_written and self.verdict.outcome in ACCEPTS[update] & _FIRST

    def is_accepted_by(self, update: UpdateMode | None) -> bool:
        """Return whether a session with this update replaces the baseline by what it was compared with."""
        # Nothing is written for a test that measured nothing, and nothing removed.
        is_measured = bool(self.verdict.verdicts)
        return self.passed and not self.unwritten and is_measured and self.verdict.outcome in ACCEPTS[update] - _FIRST


@dataclass
class _Run:
    """One run of a test, as its reports tell."""

    verdict: TestVerdict | None = None
    """``None`` as long as no report has one: a test that is not measured has none."""
    outcomes: dict[str, str] = field(default_factory=dict)
    """The outcome of each phase whose report has a verdict."""
    failed_in: FailedIn | None = None
    failed_beside_the_gate: bool = False
    """True if it failed in another part than the call, which the gate fails."""

    @property
    def is_repeated(self) -> bool:
        """True if a plugin for reruns repeats the test, so pytest does not count this run's failure."""
        return self.failed_in is None and not {"passed", "failed", "skipped", "xfail"}.issuperset(
            self.outcomes.values()
        )

    @property
    def is_rewritten(self) -> bool:
        """True if it failed, and pytest's reports do not show that."""
        return (
            self.verdict is not None
            and self.failed_in is None
            and _is_rewritten(self.verdict, set(self.outcomes.values()))
        )

    def result(self) -> TestResult | None:
        """Return the test's result in this run, or ``None`` without a verdict."""
        verdict, outcomes = self.verdict, self.outcomes
        if verdict is None or not outcomes:
            return None
        failed_in = "call" if self.is_rewritten else self.failed_in
        if failed_in == "subtest" and verdict.failed_by_itself and verdict.unmeasured != WHY_FAILED["subtest"]:
            failed_in = "call"
        ended = outcomes.keys() >= {"call", "teardown"}
        return TestResult(
            verdict,
            passed=failed_in is None and ended and set(outcomes.values()) == {"passed"},
            failed=failed_in is not None,
            failed_in=failed_in,
            failed_by_gate=failed_in is not None
            and not self.failed_beside_the_gate
            and verdict.failure is not None
            and not verdict.failed_by_itself
            and ended
            and set(outcomes.values()) <= {"passed", "failed"},
        )


@dataclass
class Results:
    """The results so far, by test.

    If a plugin for reruns repeats a test, its last run counts. If a test runs several times otherwise
    (``--keep-duplicates``, ``--dist each``), its worst run counts, because pytest fails for any of them.
    """

    _runs: dict[str, dict[str, list[_Run]]] = field(default_factory=dict)
    """The runs of each test, by node id and by pytest-xdist's worker. The last one may be under way."""

    def add(self, report: pytest.TestReport) -> bool:
        """Take what a report says of a measured test; of others only whether they failed. Whether it was a measured one."""
        runs = self._runs.setdefault(report.nodeid, {}).setdefault(getattr(report, "worker_id", ""), [])
        if report.when == "setup" or not runs:
            if runs and (runs[-1].is_repeated or (runs[-1].verdict is None and runs[-1].failed_in is None)):
                runs.pop()
            runs.append(_Run())
        run = runs[-1]
        if report.outcome == "failed" and not hasattr(report, "wasxfail"):
            where = _where(report)
            run.failed_in = run.failed_in or where
            run.failed_beside_the_gate |= where != "call"
        payload = next((value for name, value in report.user_properties if name == PROPERTY), None)
        if payload is None:
            return False
        if report.when != "teardown":
            # A test that ran through its set-up has nothing to tell until its call.
            run.outcomes.clear()
            verdict = from_plain(TestVerdict, json.loads(str(payload)))
            if verdict.failed_by_itself and (hasattr(report, "wasxfail") or report.outcome == "skipped"):
                why = "it failed as expected" if hasattr(report, "wasxfail") else SKIPPED
                verdict = replace(verdict, failed_by_itself=False, unmeasured=why)
            run.verdict = verdict
        run.outcomes[report.when or "call"] = "xfail" if hasattr(report, "wasxfail") else report.outcome
        return True

    def _runs_by_test(self) -> Iterable[tuple[str, list[_Run]]]:
        for nodeid, workers in self._runs.items():
            yield nodeid, [run for runs in workers.values() for run in runs]

    def rewritten(self) -> list[TestResult]:
        """Return the results of tests that failed and that pytest's reports do not show as failed: a plugin changed these."""
        runs = (run for _, several in self._runs_by_test() for run in several if run.is_rewritten)
        return [result for run in runs if (result := run.result()) is not None]

    def all(self) -> list[TestResult]:
        """Return the results, sorted by file and test."""
        results = (_worst_run(runs) for _, runs in self._runs_by_test())
        return sorted(
            (result for result in results if result is not None),
            key=lambda result: (result.verdict.file, result.verdict.test),
        )

    def others(self) -> set[tuple[str, str]]:
        """Return the tests that ran or were skipped and have no result, as (file, test)."""
        nodeids = [nodeid for nodeid, runs in self._runs_by_test() if all(run.verdict is None for run in runs)]
        # `--dist loadgroup` appends a group to ids.
        ids = {name for nodeid in nodeids for name in (nodeid, nodeid.rpartition("@")[0])}
        return {(file, test) for file, _, test in (nodeid.partition("::") for nodeid in ids)}

    def others_failed(self, measured: Collection[tuple[str, str]]) -> int:
        """Return the number of tests that failed, are not among ``measured``, the selected (file, test), and have no result."""
        failed = [
            nodeid
            for nodeid, runs in self._runs_by_test()
            if all(run.verdict is None for run in runs) and any(run.failed_in is not None for run in runs)
        ]
        known = {f"{file}::{test}" for file, test in measured}
        # `--dist loadgroup` appends a group to ids.
        return sum(known.isdisjoint((nodeid, nodeid.rpartition("@")[0])) for nodeid in failed)


def _worst_run(runs: Iterable[_Run]) -> TestResult | None:
    """Return the result of a test that had these runs, or ``None`` if none of them measured it."""
    runs = list(runs)
    results = [result for run in runs if (result := run.result()) is not None]
    if not results:
        return None
    worst = max(results, key=badness)
    # A worker that crashed in a tear-down has a report without a verdict.
    failed_in = worst.failed_in or next((run.failed_in for run in runs if run.failed_in is not None), None)
    return replace(
        worst,
        passed=failed_in is None and all(result.passed for result in results),
        failed=failed_in is not None,
        failed_in=failed_in,
        failed_by_gate=worst.failed_by_gate
        and all(result.failed_by_gate or not result.failed for result in results)
        and all(run.verdict is not None for run in runs if run.failed_in is not None),
    )


def badness(result: TestResult) -> tuple[object, ...]:
    """Return a key that sorts several results of a test from the best to the worst.

    A failure is worse than a pass, a measurement worse than none, and a serious outcome worse than a harmless one. `improved`
    is better than `ok`, because the other run did not improve. The larger peak is worse, because a baseline with the
    smaller peak would fail it. The text decides between equal results, so their order never does.
    """
    verdict = result.verdict
    outcome = verdict.outcome
    importance = Outcome.RECORDED.importance if outcome is Outcome.IMPROVED else outcome.importance
    peaks = [one.measurement.peak_allocated for one in verdict.verdicts]
    text = json.dumps(to_plain(result), sort_keys=True)
    return result.failed, not verdict.unmeasured, importance, not result.passed, peaks, text


def _is_rewritten(verdict: TestVerdict, outcomes: Collection[str]) -> bool:
    """Return whether a test whose reports have these ``outcomes``, none of them failed, failed by its verdict."""
    if not outcomes or "xfail" in outcomes:
        return False
    # Suites skip what they have no memory for after it has failed, which hides nothing that was measured.
    return verdict.failure is not None or (verdict.failed_by_itself and set(outcomes) == {"passed"})


def _where(report: pytest.TestReport) -> FailedIn:
    if hasattr(report, "context"):
        return "subtest"
    # Of a worker that crashed pytest-xdist does not know in which phase it did.
    return report.when if report.when in ("setup", "call", "teardown") else "worker"


def accounting(results: Iterable[TestResult], not_run: int = 0, update: UpdateMode | None = None) -> str:
    """Return the line that accounts for every measured test: ``"gpumem: 12 gated, 1 regressed, 1 foreign (A100)"``.

    ``gated`` are those that were held against a budget or a baseline; ``over budget``, ``regressed``, ``improved`` and
    ``uncertain`` are among them, and so are those ``with no baseline of time yet``, of which memory and counts were compared.
    The others were not compared with a baseline, and say why in one word: ``"2 gated, 3 new (2 also gated)"`` are three tests,
    of which two were held to a budget. ``not_run`` are those that were selected and gave no report (Ctrl-C, a
    crash, ``--maxfail``). Those that a session with ``update`` writes for the first time are ``recorded, new``, those that it
    would have and that did not pass ``not recorded, new``, and what it replaces is ``accepted``. Where a part has a comma of
    its own, semicolons part them.
    """
    everything = list(results)
    recorded = sum(result.is_recorded_by(update) for result in everything)
    everything = [result for result in everything if not result.is_recorded_by(update)]
    gated = sum(result.verdict.gated for result in everything)
    counts = Counter(
        "failed"
        if result.verdict.failed_by_itself
        else ACCEPTED
        if result.is_accepted_by(update)
        else result.verdict.outcome.words
        for result in everything
    )
    parts = [f"{gated} gated"] if gated or not recorded else []
    if counts[ACCEPTED]:
        parts.append(f"{counts[ACCEPTED]} {ACCEPTED}")
    if recorded:
        parts.append(f"{recorded} recorded, new")
    for outcome in _COUNTED:
        if counts[outcome.words]:
            left_out = "not recorded, " if outcome in ACCEPTS[update] & _FIRST else ""
            parts.append(f"{counts[outcome.words]} {left_out}{outcome.words}{_why(outcome, everything)}")
    if counts["failed"]:
        parts.append(counted(counts["failed"], "failed by itself", "failed by themselves"))
    if not_run:
        parts.append(f"{not_run} did not finish")
    without_time = sum(result.verdict.lacks_time for result in everything if not result.verdict.failed_by_itself)
    if without_time and Outcome.NEW not in ACCEPTS[update]:
        parts.append(f"{without_time} with {NO_TIME}")
    return "gpumem: " + ("; " if any("recorded, " in part for part in parts) else ", ").join(parts)


def nothing_gated(results: Iterable[TestResult], accepts: frozenset[Outcome] = frozenset()) -> str | None:
    """Return the sentence for a session that was asked to compare with baselines and compared nothing; ``None`` otherwise.

    Budgets do not make up for it: a store that got lost must not stay green because of them. Tests with an outcome in
    ``accepts`` are being recorded by this session, and so are seen to.
    """
    everything = [result for result in results if not (result.passed and result.verdict.outcome in accepts)]
    if not everything or any(result.verdict.compared for result in everything):
        return None
    fresh = any(result.verdict.outcome in (Outcome.NEW, Outcome.FOREIGN) for result in everything)
    hint = " (record one with --gpumem-update=new)" if fresh else ""
    what = "no baseline was compared" if any(result.verdict.gated for result in everything) else "nothing was gated"
    return f"{what}: {_reasons_of(everything)}{hint}"


def nothing_recorded(results: Iterable[TestResult]) -> str | None:
    """Return the sentence for a session that was asked to record and measured nothing; ``None`` otherwise.

    Tests that skipped themselves are no reason: they would have done so on every machine.
    """
    everything = [result for result in results if not result.verdict.failed_by_itself]
    if any(not result.verdict.unmeasured for result in everything):
        return None
    lost = [result for result in everything if result.verdict.unmeasured != SKIPPED]
    return f"nothing was recorded: {_reasons_of(lost)}" if lost else None


def _reasons_of(results: Iterable[TestResult]) -> str:
    """Return why tests were not compared: ``"2 tests unmeasured, no CUDA device; 1 test new, there is no baseline"``."""
    counts: Counter[str] = Counter()
    for result in results:
        if result.verdict.unmeasured:
            counts[f"unmeasured, {result.verdict.unmeasured}"] += 1
        else:
            nothing = "nothing to compare with" if result.verdict.verdicts else "held by relations only"
            reason = next((one.reason for one in result.verdict.verdicts if one.reason), nothing)
            counts[f"{result.verdict.outcome.words}, {reason}"] += 1
    return "; ".join(f"{counted(count, 'test')} {what}" for what, count in counts.most_common())


_MOST_NOTES = 3


def recording_notes(results: Iterable[TestResult]) -> list[str]:
    """Return the notes on recordings, without repetition, each with the first test that has it.

    A note in the failure of its test is left out.
    """
    first: dict[str, str] = {}
    for result in results:
        for one in result.verdict.verdicts:
            explanation = one.measurement.explanation
            for note in explanation.peak.notes if explanation is not None else ():
                if result.verdict.failure is not None and note in result.verdict.failure:
                    continue
                first.setdefault(note, f"{result.verdict.file}::{result.verdict.test}: {note}")
    found = list(first.values())
    more = len(found) - _MOST_NOTES
    return [*found[:_MOST_NOTES], *([f"... and {counted(more, 'more note')} on recordings"] if more > 0 else [])]


def _why(outcome: Outcome, results: list[TestResult]) -> str:
    mine = [
        result.verdict
        for result in results
        if result.verdict.outcome is outcome and not result.verdict.failed_by_itself
    ]
    if outcome is Outcome.UNMEASURED:
        reasons = sorted({verdict.unmeasured for verdict in mine if verdict.unmeasured})
        return f" ({'; '.join(reasons[:2])}{'; ...' if len(reasons) > 2 else ''})"
    if outcome is Outcome.RECORDED:
        return " (no budget, and no --gpumem-baseline)"
    reasons = []
    if outcome is Outcome.FOREIGN:
        # A baseline of this device whose times are another machine's has its reason beneath the table.
        devices = sorted({device for verdict in mine for one in verdict.verdicts for device in one.elsewhere})
        reasons += [", ".join(devices)] if devices else []
    if outcome is Outcome.STALE:
        reasons.append("the baseline is of another workload: --gpumem-update=all replaces it")
    gated = sum(verdict.gated for verdict in mine) if outcome in _WITHOUT_BASELINE else 0
    reasons += ["also gated" if gated == len(mine) else f"{gated} also gated"] if gated else []
    return f" ({'; '.join(reasons)})" if reasons else ""
