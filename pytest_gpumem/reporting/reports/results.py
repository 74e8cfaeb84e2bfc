"""Collect the results of measured tests from pytest's reports, and count them in the accounting line. Pure."""

from __future__ import annotations

import json
from collections import Counter
from dataclasses import dataclass, field, replace
from typing import TYPE_CHECKING

from pytest_gpumem.base.units import counted
from pytest_gpumem.facts.values.annotations import ADDED
from pytest_gpumem.facts.values.plain import from_plain, to_plain
from pytest_gpumem.judging.baselines.update import ACCEPTS
from pytest_gpumem.judging.gate.speed import NO_TIME
from pytest_gpumem.judging.gate.verdict import SKIPPED, WHY_FAILED, FailedIn, MetricVerdict, Outcome, TestVerdict

if TYPE_CHECKING:
    from collections.abc import Collection, Iterable

    import pytest

    from pytest_gpumem.facts.values.option_words import UpdateMode

PROPERTY = "gpumem"
"""The ``user_properties`` entry that stores a test's verdict as JSON."""


_COUNTED = (
    *(Outcome.OVER_BUDGET, Outcome.REGRESSED, Outcome.MISSING, Outcome.IMPROVED, Outcome.UNCERTAIN),
    *(Outcome.NEW, Outcome.STALE, Outcome.FOREIGN, Outcome.UNMEASURED, Outcome.RECORDED),
)
"""The outcomes in the accounting line, in its order."""
_FIRST = frozenset({Outcome.NEW, Outcome.FOREIGN})
"""The outcomes of tests without a baseline for this device."""
_WITHOUT_BASELINE = _FIRST | {Outcome.STALE}
"""The outcomes of tests without a comparable baseline. A budget or a relation may still gate such a test."""
ACCEPTED = "accepted"
"""The word for a test whose change became the baseline."""


@dataclass(frozen=True, slots=True)
class Renaming:
    """A new test's likely former name. The unused baseline of this name has the same step, batch and device."""

    file: str
    """The former test's file, relative to the root directory."""
    test: str
    """The former test's id without its file."""
    grown: MetricVerdict | None = None
    """The first metric that grew beyond its tolerance; ``None`` if no metric did."""
    accept: str = field(default="", metadata=ADDED)
    """The command to accept the new test's figures."""
    prune: str = ""
    """The command to remove the baseline if it belongs to a different test."""

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
    """True if all phases of the test passed. A test that was skipped, or failed as expected, is neither passed nor failed."""
    failed: bool = False
    """True if any phase of the test failed: its set-up, its call or its tear-down."""
    failed_in: FailedIn | None = field(default=None, metadata=ADDED)
    """The phase in which the test failed first: ``setup``, ``call``, ``subtest``, ``teardown``, or ``worker`` if the process
    that ran the test crashed. ``None`` if the test did not fail.
    """
    failed_by_gate: bool = field(default=False, metadata=ADDED)
    """True if only the gate failed the test."""
    unwritten: bool = field(default=False, metadata=ADDED)
    """True if the test's accepted figures could not be written to the store, for example on a full disk."""

    renamed: Renaming | None = field(default=None, metadata=ADDED)
    """The test's likely former name; ``None`` if the test has a baseline, or if no unused baseline is similar enough."""

    @property
    def has_grown_renamed(self) -> bool:
        """True if the test is worse than the baseline under its former name."""
        return self.renamed is not None and self.renamed.grown is not None

    def is_held_back_by(self, update: UpdateMode | None) -> bool:
        """Return whether this update writes no baseline for the test, because the test has grown since it was renamed."""
        return update == "new" and self.has_grown_renamed

    def is_recorded_by(self, update: UpdateMode | None) -> bool:
        """Return whether a session with this update stores the test's figures as first baselines for the device."""
        is_written = self.passed and not self.unwritten and not self.is_held_back_by(update)
        return is_written and self.verdict.outcome in ACCEPTS[update] & _FIRST

    def is_accepted_by(self, update: UpdateMode | None) -> bool:
        """Return whether a session with this update replaces the test's baseline."""
        # A test without measurements neither writes nor removes a baseline.
        is_measured = bool(self.verdict.verdicts)
        return self.passed and not self.unwritten and is_measured and self.verdict.outcome in ACCEPTS[update] - _FIRST


@dataclass
class _Run:
    """A single run of a test, collected from pytest's reports on the test's phases."""

    verdict: TestVerdict | None = None
    """The verdict; ``None`` until a report contains one. A test that is not measured never has a verdict."""
    outcomes: dict[str, str] = field(default_factory=dict)
    """The outcome of each phase, if pytest's report on the phase contains a verdict."""
    failed_in: FailedIn | None = None
    failed_beside_the_gate: bool = False
    """True if a phase other than the call failed. The gate did not cause this failure, because it fails only a test's call."""

    @property
    def is_repeated(self) -> bool:
        """True if a plugin for reruns repeats the test, so pytest does not count this run's failure."""
        return self.failed_in is None and not {"passed", "failed", "skipped", "xfail"}.issuperset(
            self.outcomes.values()
        )

    @property
    def is_rewritten(self) -> bool:
        """True if the test failed, but a plugin rewrote pytest's reports so they hide the failure."""
        return (
            self.verdict is not None
            and self.failed_in is None
            and _is_rewritten(self.verdict, set(self.outcomes.values()))
        )

    def result(self) -> TestResult | None:
        """Return the test's result in this run; ``None`` if no report had a verdict."""
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
    """The results of all tests that have run so far, collected from pytest's reports.

    If a plugin for reruns repeats a test, the test's last run counts. If a test runs several times for another reason
    (``--keep-duplicates``, ``--dist each``), its worst run counts, because pytest fails if any run fails.
    """

    _runs: dict[str, dict[str, list[_Run]]] = field(default_factory=dict)
    """Each test's runs, by node id and by pytest-xdist's worker. The last run may not be finished."""

    def add(self, report: pytest.TestReport) -> bool:
        """Add pytest's report on a test phase.

        If the test is not measured, only a failure is stored.

        Returns:
            True if the report has a verdict, so the test is measured.
        """
        runs = self._runs.setdefault(report.nodeid, {}).setdefault(getattr(report, "worker_id", ""), [])
        if report.when == "setup" or not runs:
            if runs and (runs[-1].is_repeated or (runs[-1].verdict is None and runs[-1].failed_in is None)):
                runs.pop()
            runs.append(_Run())
        run = runs[-1]
        if report.outcome == "failed" and not hasattr(report, "wasxfail"):
            failed_in = _failed_phase(report)
            run.failed_in = run.failed_in or failed_in
            run.failed_beside_the_gate |= failed_in != "call"
        payload = next((value for name, value in report.user_properties if name == PROPERTY), None)
        if payload is None:
            return False
        if report.when != "teardown":
            # A report on the call replaces the outcome from the set-up.
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
        """Return the results of failed tests whose failure a plugin hid by rewriting pytest's reports."""
        runs = (run for _, test_runs in self._runs_by_test() for run in test_runs if run.is_rewritten)
        return [result for run in runs if (result := run.result()) is not None]

    def all(self) -> list[TestResult]:
        """Return the results, sorted by file and test."""
        results = (_worst_run(runs) for _, runs in self._runs_by_test())
        return sorted(
            (result for result in results if result is not None),
            key=lambda result: (result.verdict.file, result.verdict.test),
        )

    def tests_without_result(self) -> set[tuple[str, str]]:
        """Return the tests without a verdict, as (file, test). Skipped tests may be among them."""
        nodeids = [nodeid for nodeid, runs in self._runs_by_test() if all(run.verdict is None for run in runs)]
        # `--dist loadgroup` appends the name of a group to test ids.
        ids = {name for nodeid in nodeids for name in (nodeid, nodeid.rpartition("@")[0])}
        return {(file, test) for file, _, test in (nodeid.partition("::") for nodeid in ids)}

    def unmeasured_failures(self, measured: Collection[tuple[str, str]]) -> int:
        """Count the failed tests without a verdict. Tests in ``measured``, as (file, test), are not counted."""
        failed = [
            nodeid
            for nodeid, runs in self._runs_by_test()
            if all(run.verdict is None for run in runs) and any(run.failed_in is not None for run in runs)
        ]
        measured_ids = {f"{file}::{test}" for file, test in measured}
        # `--dist loadgroup` appends the name of a group to test ids.
        return sum(measured_ids.isdisjoint((nodeid, nodeid.rpartition("@")[0])) for nodeid in failed)


def _worst_run(runs: Iterable[_Run]) -> TestResult | None:
    """Return the result of a test from its runs, or ``None`` if no run measured the test."""
    runs = list(runs)
    results = [result for run in runs if (result := run.result()) is not None]
    if not results:
        return None
    worst = max(results, key=badness)
    # If a worker crashes during a tear-down, the report on the crash has no verdict. So look for a failure in all runs.
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

    A failure is worse than a pass, a measurement is worse than no measurement, and a serious outcome is worse than a harmless
    outcome. `ok` counts as worse than `improved`, because a run with `ok` did not repeat the improvement. The larger peak is
    worse, because it would fail against a baseline with the smaller peak. If two results are equal in all of this, their JSON
    decides, so the order between reports never matters.
    """
    verdict = result.verdict
    outcome = verdict.outcome
    importance = Outcome.RECORDED.importance if outcome is Outcome.IMPROVED else outcome.importance
    peaks = [part.measurement.peak_allocated for part in verdict.verdicts]
    text = json.dumps(to_plain(result), sort_keys=True)
    return result.failed, not verdict.unmeasured, importance, not result.passed, peaks, text


def _is_rewritten(verdict: TestVerdict, outcomes: Collection[str]) -> bool:
    """Return whether the verdict failed a test although no phase failed in pytest's reports (``outcomes``)."""
    if not outcomes or "xfail" in outcomes:
        return False
    # Some suites turn an out-of-memory failure into a skip. This does not count, because the skip hides no measurement.
    return verdict.failure is not None or (verdict.failed_by_itself and set(outcomes) == {"passed"})


def _failed_phase(report: pytest.TestReport) -> FailedIn:
    if hasattr(report, "context"):
        return "subtest"
    # pytest-xdist does not know in which phase a worker crashed, so its report on a crash has another ``when``.
    return report.when if report.when in ("setup", "call", "teardown") else "worker"


def accounting(results: Iterable[TestResult], not_run: int = 0, update: UpdateMode | None = None) -> str:
    """Return the line that accounts for every measured test: ``"gpumem: 12 gated, 1 regressed, 1 foreign (A100)"``.

    - ``gated`` tests were compared with a budget or a baseline. They include ``over budget``, ``regressed``, ``improved`` and
      ``uncertain`` tests, and also tests ``with no baseline of time yet``, whose memory and counts were compared.
    - Tests ``with processes that were not measured`` are counted once more. A note names each process.
    - Other tests were not compared with a baseline, and a word such as ``new`` says why. For example, ``"2 gated, 3 new (2 also
      gated)"`` counts three new tests, two of which were compared with a budget.
    - With ``update``, ``recorded, new`` tests get their first baseline, ``not recorded, new`` tests did not pass, and the
      baselines of ``accepted`` tests are replaced.

    If a part contains a comma, semicolons separate the parts.

    Args:
        results: The results of the session's measured tests.
        not_run: The number of selected tests without a report (Ctrl-C, a crash, ``--maxfail``).
        update: The session's ``--gpumem-update``.
    """
    measured = list(results)
    recorded = sum(result.is_recorded_by(update) for result in measured)
    not_recorded = [result for result in measured if not result.is_recorded_by(update)]
    gated = sum(result.verdict.gated for result in not_recorded)
    counts = Counter(
        "failed"
        if result.verdict.failed_by_itself
        else ACCEPTED
        if result.is_accepted_by(update)
        else result.verdict.outcome.words
        for result in not_recorded
    )
    parts = [f"{gated} gated"] if gated or not recorded else []
    if counts[ACCEPTED]:
        parts.append(f"{counts[ACCEPTED]} {ACCEPTED}")
    if recorded:
        parts.append(f"{recorded} recorded, new")
    for outcome in _COUNTED:
        if counts[outcome.words]:
            left_out = "not recorded, " if outcome in ACCEPTS[update] & _FIRST else ""
            parts.append(f"{counts[outcome.words]} {left_out}{outcome.words}{_why(outcome, not_recorded)}")
    if counts["failed"]:
        parts.append(counted(counts["failed"], "failed by itself", "failed by themselves"))
    if not_run:
        parts.append(f"{not_run} did not finish")
    with_processes = sum(bool(result.verdict.unmeasured_processes) for result in measured)
    if with_processes:
        parts.append(f"{with_processes} with processes that were not measured (see the notes)")
    without_time = sum(result.verdict.lacks_time for result in not_recorded if not result.verdict.failed_by_itself)
    if without_time and Outcome.NEW not in ACCEPTS[update]:
        parts.append(f"{without_time} with {NO_TIME}")
    return "gpumem: " + ("; " if any("recorded, " in part for part in parts) else ", ").join(parts)


def nothing_gated(results: Iterable[TestResult], accepts: frozenset[Outcome] = frozenset()) -> str | None:
    """Return a sentence if a session should have compared baselines but compared none; ``None`` otherwise.

    Budgets do not count, because a session without its store must fail even if all budgets are met.

    Args:
        results: The results of the session's measured tests.
        accepts: The outcomes of tests whose figures the session stores as baselines. Passed tests with such an outcome are
            ignored.
    """
    remaining = [result for result in results if not (result.passed and result.verdict.outcome in accepts)]
    if not remaining or any(result.verdict.compared for result in remaining):
        return None
    is_new = any(result.verdict.outcome in (Outcome.NEW, Outcome.FOREIGN) for result in remaining)
    hint = " (record one with --gpumem-update=new)" if is_new else ""
    problem = "no baseline was compared" if any(result.verdict.gated for result in remaining) else "nothing was gated"
    return f"{problem}: {_reasons_of(remaining)}{hint}"


def nothing_recorded(results: Iterable[TestResult]) -> str | None:
    """Return a sentence if a session should have recorded baselines but measured nothing; ``None`` otherwise.

    Tests that skip themselves do not count, because they would skip on every machine.
    """
    remaining = [result for result in results if not result.verdict.failed_by_itself]
    if any(not result.verdict.unmeasured for result in remaining):
        return None
    unmeasured = [result for result in remaining if result.verdict.unmeasured != SKIPPED]
    return f"nothing was recorded: {_reasons_of(unmeasured)}" if unmeasured else None


def first_line(reason: str) -> str:
    """Return the first line of a reason. A failed command's reason has the end of its output in further lines."""
    return reason.strip().partition("\n")[0].removesuffix(":")


def why_unmeasured(verdict: TestVerdict) -> str:
    """Return the first line of the reason why a test is unmeasured, without processes that notes name."""
    reason = verdict.unmeasured or ""
    for process in verdict.unmeasured_processes:
        reason = reason.replace(f"; {process}", "")
    return first_line(reason)


def _reasons_of(results: Iterable[TestResult]) -> str:
    """Return why tests were not compared: ``"2 tests unmeasured, no CUDA device; 1 test new, there is no baseline"``."""
    counts: Counter[str] = Counter()
    for result in results:
        if result.verdict.unmeasured:
            counts[f"unmeasured, {why_unmeasured(result.verdict)}"] += 1
        else:
            default = "nothing to compare with" if result.verdict.verdicts else "checked by relations only"
            reason = next((part.reason for part in result.verdict.verdicts if part.reason), default)
            counts[f"{result.verdict.outcome.words}, {reason}"] += 1
    return "; ".join(f"{counted(count, 'test')} {reason}" for reason, count in counts.most_common())


def _why(outcome: Outcome, results: list[TestResult]) -> str:
    verdicts = [
        result.verdict
        for result in results
        if result.verdict.outcome is outcome and not result.verdict.failed_by_itself
    ]
    if outcome is Outcome.UNMEASURED:
        reasons = sorted({why_unmeasured(verdict) for verdict in verdicts if verdict.unmeasured})
        return f" ({'; '.join(reasons[:2])}{'; ...' if len(reasons) > 2 else ''})"
    if outcome is Outcome.RECORDED:
        return " (no budget, and no --gpumem-baseline)"
    reasons = []
    if outcome is Outcome.FOREIGN:
        # A time can be foreign although this device has a baseline. The reason then appears below the table.
        devices = sorted({device for verdict in verdicts for part in verdict.verdicts for device in part.elsewhere})
        reasons += [", ".join(devices)] if devices else []
    if outcome is Outcome.STALE:
        reasons.append("the baseline has another workload: --gpumem-update=all replaces it")
    gated = sum(verdict.gated for verdict in verdicts) if outcome in _WITHOUT_BASELINE else 0
    reasons += ["also gated" if gated == len(verdicts) else f"{gated} also gated"] if gated else []
    return f" ({'; '.join(reasons)})" if reasons else ""
