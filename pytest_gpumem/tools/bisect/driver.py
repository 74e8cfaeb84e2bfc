"""Run candidates (commits, releases) until the first bad candidate is known.

Each candidate runs once, because bytes and counts repeat exactly. But if the step time is judged, a candidate and the first
candidate, which is good, run alternately several times.
"""

from __future__ import annotations

import re
import time
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

from pytest_gpumem.base.errors import GitError, InstallationError, NothingToSearch, RunFailed
from pytest_gpumem.base.units import counted
from pytest_gpumem.facts.metrics import METRICS
from pytest_gpumem.judging.gate.verdict import Outcome
from pytest_gpumem.plugin.config.settings import DEFAULT_TOLERANCES, Settings
from pytest_gpumem.reporting.reports.values import shown
from pytest_gpumem.tools.ab.compare_variants import changed_code, reports_in_turns, settings_in
from pytest_gpumem.tools.ab.variants import why_no_difference
from pytest_gpumem.tools.ab.verdicts import compare_runs, with_marked_lines
from pytest_gpumem.tools.bisect.candidates import graph_of
from pytest_gpumem.tools.bisect.search import bounds, next_positions
from pytest_gpumem.tools.checkout import BASE, HEAD

if TYPE_CHECKING:
    from collections.abc import Sequence

    from pytest_gpumem.reporting.reports.comparison import ComparedChange, ComparisonReport
    from pytest_gpumem.tools.ab.runs import Run, Runner
    from pytest_gpumem.tools.ab.variants import Provisioner
    from pytest_gpumem.tools.bisect.candidates import Candidate
    from pytest_gpumem.tools.bisect.journal import Journal
    from pytest_gpumem.tools.bisect.search import Answer
    from pytest_gpumem.tools.checkout import Side

STEP_TIME = "step_time"
JUDGED_METRICS = (
    *(name for name, metric in METRICS.items() if metric.tolerance is not None and not metric.is_timed),
    STEP_TIME,
)
"""The metrics by which a candidate can be judged."""
_MOST_PAIRS = 8
"""The maximum number of pairs of runs for judging a step time."""


_ERROR = re.compile(r"(?:E\s+|ERROR: )(.+)")
"""Pattern for an output line with an exception, or with pytest's own error: ``"ERROR: not found: test_it.py::test_gone"``."""


@dataclass(frozen=True, slots=True)
class Trial:
    """The result of running a candidate.

    ``answer`` is good, bad or skipped, and ``value`` is the metric's value. ``why`` is the reason if the candidate was skipped.
    """

    candidate: Candidate
    answer: Answer
    value: float | None = None
    why: str = ""


@dataclass(frozen=True, slots=True)
class SearchResult:
    """A search's result: the last good candidate, the first bad candidate, and the skipped candidates between these."""

    metric: str
    good: Candidate
    bad: Candidate
    skipped: tuple[Candidate, ...]
    ends: ComparisonReport
    """The comparison of the first candidate (base) and the last candidate (head)."""
    step: ComparisonReport
    """The comparison of the last good candidate (base) and the first bad candidate (head)."""
    trials: tuple[Trial, ...]
    settings: Settings


@dataclass
class Search:
    """A search among candidates. The first candidate should be good, and the last candidate should be bad."""

    candidates: Sequence[Candidate]
    runner: Runner
    provisioner: Provisioner
    journal: Journal
    metric: str | None = None
    """The metric to judge by. If ``None``, the most important of the metrics that are worse in the last candidate is used."""
    jobs: int = 1
    """The number of candidates to run at the same time."""
    max_slowdown: float = 0.015
    """The tolerated slowdown as a ratio: 0.015 means 1.5 %."""
    _runs: dict[str, Run | str] = field(default_factory=dict)
    """For each candidate's name, the run, or the reason why the run failed."""
    _timed: dict[tuple[str, str], ComparisonReport] = field(default_factory=dict)
    """Comparisons of step times, by the names of the two candidates."""
    _settings: Settings = field(default_factory=Settings)

    def find(self) -> SearchResult:
        """Run candidates until the first bad candidate is known, and return the result.

        Raises:
            NothingToSearch: The last candidate is not worse than the first, or the two cannot be compared.
            RunFailed: The first or last candidate cannot be run.
            InstallationError: A candidate's packages cannot be installed.
            GitError: A commit cannot be checked out.
            StopSignal: A signal such as Ctrl-C has come.
        """
        self._runs = dict(self.journal.runs())
        if self._runs:
            self.provisioner.say(
                f"reusing {counted(len(self._runs), 'run')} from an earlier search, which was interrupted"
            )
        first, last = self.candidates[0], self.candidates[-1]
        good, bad = self._successful_run(first), self._successful_run(last)
        with self.provisioner.provide({HEAD: last.variant}) as provided:
            self._settings = settings_in(provided[HEAD].top / bad.root)
        ends = self._compared(first, last)
        metric = self.metric or _most_important(ends)
        self._check_ends(ends, metric, first, last, good, bad)
        assert metric is not None, "_check_ends raises if there is no metric"
        trials = self._trials(ends, metric)
        limits = bounds(graph_of(self.candidates), {position: trial.answer for position, trial in trials.items()})
        between = tuple(self.candidates[position] for position in limits.between)
        step = self._step(self.candidates[limits.good], self.candidates[limits.bad])
        return SearchResult(
            metric,
            self.candidates[limits.good],
            self.candidates[limits.bad],
            between,
            ends,
            step,
            tuple(trials[position] for position in sorted(trials)),
            self._settings,
        )

    def _trials(self, ends: ComparisonReport, metric: str) -> dict[int, Trial]:
        """Judge candidates until the search is done. Return the trials by position, including the first and last candidate."""
        first, last = self.candidates[0], self.candidates[-1]
        trials = {
            0: Trial(first, "good", _value(ends, metric, "old")),
            len(self.candidates) - 1: Trial(last, "bad", _value(ends, metric, "new")),
        }
        jobs = 1 if metric == STEP_TIME else self.jobs
        graph = graph_of(self.candidates)
        while positions := next_positions(graph, {position: trial.answer for position, trial in trials.items()}, jobs):
            with ThreadPoolExecutor(max_workers=len(positions)) as threads:
                judged = threads.map(lambda position: self._judge(self.candidates[position], first, metric), positions)
                trials.update(zip(positions, judged, strict=True))
        return trials

    def _successful_run(self, candidate: Candidate) -> Run:
        """Return a candidate's run. Raises `RunFailed` if the run failed."""
        run = self._run_of(candidate)
        if isinstance(run, str):
            raise RunFailed(f"{candidate.name} cannot be measured: {run}")
        return run

    def _run_of(self, candidate: Candidate) -> Run | str:
        """Return a candidate's earlier run or run the candidate now. If the run fails, return the reason."""
        if candidate.name not in self._runs:
            self._runs[candidate.name] = self._run(candidate)
        return self._runs[candidate.name]

    def _run(self, candidate: Candidate) -> Run | str:
        began = time.monotonic()
        try:
            with self.provisioner.provide({candidate.name: candidate.variant}) as provided:
                record, run = self.runner.take(provided[candidate.name], explained=True)
        except (RunFailed, InstallationError, GitError) as failure:
            # The journal does not store a failure, because its cause may no longer exist when the search continues.
            why = _reason_in_a_line(failure)
            self.provisioner.say(f"{candidate.name}: {why}")
            return why
        try:
            self.journal.add(candidate.name, record)
        except OSError as error:
            self.provisioner.say(
                f"{self.journal.folder} cannot be written ({error.strerror}): the next start repeats this run"
            )
        self.provisioner.say(f"{candidate.name}: {run.measured} measured in {time.monotonic() - began:.1f} s")
        return run

    def _compared(self, base: Candidate, head: Candidate) -> ComparisonReport:
        """Compare two candidates: by alternating runs if the metric is the step time, otherwise by a single run of each."""
        if self.metric == STEP_TIME:
            sides = base.name, head.name
            if sides not in self._timed:
                self._timed[sides] = self._in_turns(base, head)
            return self._timed[sides]
        before, after = self._successful_run(base), self._successful_run(head)
        return self._report([(before, after)], base, head)

    def _step(self, good: Candidate, bad: Candidate) -> ComparisonReport:
        """Compare the last good and the first bad candidate, and mark the lines that differ between these two."""
        report = self._compared(good, bad)
        with self.provisioner.provide({BASE: good.variant, HEAD: bad.variant}) as provided:
            changed = changed_code(
                provided[BASE], self._successful_run(good), provided[HEAD], self._successful_run(bad)
            )
            return with_marked_lines(report, changed)

    def _report(self, pairs: Sequence[tuple[Run, Run]], base: Candidate, head: Candidate) -> ComparisonReport:
        tolerances = {**DEFAULT_TOLERANCES, **self._settings.tolerances}
        return compare_runs(pairs, base.variant.title, head.variant.title, self.max_slowdown, tolerances)

    def _in_turns(self, base: Candidate, head: Candidate) -> ComparisonReport:
        """Run two candidates alternately until their times are decided, but at most 8 times each. Return the comparison."""
        sides = {BASE: base, HEAD: head}
        with self.provisioner.provide({side: candidate.variant for side, candidate in sides.items()}) as provided:

            def take(side: Side, _number: int) -> Run:
                return self.runner.take(provided[side])[1]

            *_, report = reports_in_turns(take, lambda pairs: self._report(pairs, base, head), _MOST_PAIRS)
        self.provisioner.say(f"{head.name}: {counted(report.pairs or 0, 'pair')} of runs")
        return report

    def _judge(self, candidate: Candidate, first: Candidate, metric: str) -> Trial:
        """Run a candidate unless an earlier run is stored, and compare its run with the first candidate's run."""
        run = self._run_of(candidate)
        if isinstance(run, str):
            return Trial(candidate, "skipped", why=run)
        try:
            report = self._compared(first, candidate)
        except RunFailed as failure:
            return Trial(candidate, "skipped", why=_reason_in_a_line(failure))
        changes = [change for change in _changes(report, metric) if change.outcome is not Outcome.UNCERTAIN]
        if not changes:
            return Trial(candidate, "skipped", why=_why_nothing(report, metric))
        answer: Answer = "bad" if any(change.outcome is Outcome.REGRESSED for change in changes) else "good"
        return Trial(candidate, answer, _value(report, metric, "new"))

    def _check_ends(
        self, ends: ComparisonReport, metric: str | None, first: Candidate, last: Candidate, good: Run, bad: Run
    ) -> None:
        """Raise `NothingToSearch` if the last candidate is not worse than the first."""
        if metric is not None and any(change.outcome is Outcome.REGRESSED for change in _changes(ends, metric)):
            return
        with self.provisioner.provide({BASE: first.variant, HEAD: last.variant}) as provided:
            unused = why_no_difference(provided[BASE], provided[HEAD], good.imported | bad.imported)
        if unused is not None:
            raise NothingToSearch(unused)
        judged = metric or "peak_allocated"
        changes = _changes(ends, judged)
        if not changes:
            why = _why_nothing(ends, judged)
            raise NothingToSearch(f"{first.name} (base) and {last.name} (head) cannot be compared: {why}")
        units = self._settings.units
        good_value, bad_value = (shown(judged, _value(ends, judged, side), units) for side in ("old", "new"))
        values = f"{METRICS[judged].title} {good_value} and {bad_value}"
        if any(change.outcome is Outcome.IMPROVED for change in changes):
            raise NothingToSearch(
                f"{last.name} is better than {first.name} ({values}); to find what fixed it, exchange --good and --bad"
            )
        raise NothingToSearch(
            f"{last.name} is no worse than {first.name} ({values}): either both are good, or both are bad"
        )


def _changes(report: ComparisonReport, metric: str) -> list[ComparedChange]:
    return [change for row in report.rows for change in row.changes if change.metric == metric]


def _value(report: ComparisonReport, metric: str, side: str) -> float | None:
    """Return a metric's largest value on ``side``, which is ``"old"`` or ``"new"``.

    Only tests that are worse count. If no test is worse, all tests count.
    """
    changes = _changes(report, metric)
    worse = [change for change in changes if change.outcome is Outcome.REGRESSED]
    return max((value for change in worse or changes if (value := getattr(change, side)) is not None), default=None)


def _most_important(report: ComparisonReport) -> str | None:
    """Return the metric that a failure message would name first, among those that became worse; ``None`` if none did."""
    worse = {change.metric for row in report.rows for change in row.changes if change.outcome is Outcome.REGRESSED}
    return min(worse, key=lambda name: METRICS[name].precedence, default=None)


def _why_nothing(report: ComparisonReport, metric: str) -> str:
    """Return the reason why a report has no value for a metric."""
    reasons = [test.reason for test in report.omitted_tests if test.reason is not None]
    if reasons:
        return reasons[0]
    return f"no test has {METRICS[metric].title} both in base and in head" if report.rows else "no test was measured"


def _reason_in_a_line(failure: Exception) -> str:
    """Return why a run failed: the last error in pytest's output. Without such an error, return the failure's first line."""
    first, *more = str(failure).splitlines()
    errors = [match.group(1) for line in more if (match := _ERROR.match(line.strip()))]
    return errors[-1] if errors else first
