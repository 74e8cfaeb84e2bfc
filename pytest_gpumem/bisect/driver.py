"""Run candidates until the first bad one is found: each once, or in turns with the good end where its time is judged."""

from __future__ import annotations

import re
import time
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

from pytest_gpumem.ab.checkout import BASE, HEAD
from pytest_gpumem.ab.compare_variants import changed_code, reports_in_turns, settings_in
from pytest_gpumem.ab.errors import RunFailed
from pytest_gpumem.ab.variants import why_unused
from pytest_gpumem.ab.verdicts import compare_runs, with_marked_lines
from pytest_gpumem.bisect.candidates import graph_of
from pytest_gpumem.bisect.search import bounds, next_ones
from pytest_gpumem.config.settings import DEFAULT_TOLERANCES, Settings
from pytest_gpumem.gate.verdict import Outcome
from pytest_gpumem.git import GitError
from pytest_gpumem.metrics import METRICS, WHOLE
from pytest_gpumem.reports.values import shown
from pytest_gpumem.requirements.errors import NotInstalled
from pytest_gpumem.units import counted

if TYPE_CHECKING:
    from collections.abc import Sequence

    from pytest_gpumem.ab.checkout import Side
    from pytest_gpumem.ab.runs import Run, Runner
    from pytest_gpumem.ab.variants import Provisioner
    from pytest_gpumem.bisect.candidates import Candidate
    from pytest_gpumem.bisect.journal import Journal
    from pytest_gpumem.bisect.search import Answer
    from pytest_gpumem.reports.comparison import Compared, ComparedChange

TIMED = "step_time"
JUDGED = (*(name for name, metric in METRICS.items() if metric.tolerance is not None and metric.unit in WHOLE), TIMED)
"""The metrics by which candidates can be told apart."""
_MOST_PAIRS = 8
"""Pairs of runs that a time is judged by at most."""


_ERROR = re.compile(r"(?:E\s+|ERROR: )(.+)")
"""An exception, or pytest's own error: ``"ERROR: not found: test_it.py::test_gone"``."""


class NothingFound(Exception):
    """There is nothing to search for; the message says why, and what to do."""


@dataclass(frozen=True, slots=True)
class Tried:
    """A candidate that was run: what came of it, its value of the metric, and why it was skipped."""

    candidate: Candidate
    answer: Answer
    value: float | None = None
    why: str = ""


@dataclass(frozen=True, slots=True)
class Found:
    """The result: the first bad candidate, the last good one before it, and those between that could not be judged."""

    metric: str
    good: Candidate
    bad: Candidate
    skipped: tuple[Candidate, ...]
    ends: Compared
    """The whole row: its first and its last one."""
    step: Compared
    """The last good one and the first bad one."""
    tried: tuple[Tried, ...]
    settings: Settings


@dataclass
class Search:
    """A search in one row of candidates, whose first is said to be good and whose last bad."""

    candidates: Sequence[Candidate]
    runner: Runner
    provisioner: Provisioner
    journal: Journal
    metric: str | None = None
    """The metric to judge by; ``None`` for the most important one that is worse in the last candidate."""
    jobs: int = 1
    """The number of runs at a time."""
    max_slowdown: float = 0.015
    """The tolerated slowdown, as a ratio."""
    _known: dict[str, Run | str] = field(default_factory=dict)
    """Runs of candidates by name, or why there is none."""
    _timed: dict[tuple[str, str], Compared] = field(default_factory=dict)
    """Comparisons of runs in turns, by the names of both candidates."""
    _settings: Settings = field(default_factory=Settings)

    def find(self) -> Found:
        """Return the first bad candidate.

        Raises `NothingFound`, `RunFailed` where an end cannot be run, `NotInstalled`, `GitError` and `Stopped`.
        """
        self._known = dict(self.journal.runs())
        if self._known:
            self.provisioner.say(f"going on with {counted(len(self._known), 'run')} of an earlier start")
        first, last = self.candidates[0], self.candidates[-1]
        good, bad = self._end(first), self._end(last)
        with self.provisioner.provide({HEAD: last.variant}) as provided:
            self._settings = settings_in(provided[HEAD].top / bad.root)
        ends = self._compared(first, last)
        metric = self.metric or _most_important(ends)
        self._check_ends(ends, metric, first, last, good, bad)
        assert metric is not None, "it has been checked"
        tried = self._tried_between(ends, metric)
        left = bounds(graph_of(self.candidates), {at: one.answer for at, one in tried.items()})
        between = tuple(self.candidates[at] for at in left.between)
        step = self._step(self.candidates[left.good], self.candidates[left.bad])
        return Found(
            metric,
            self.candidates[left.good],
            self.candidates[left.bad],
            between,
            ends,
            step,
            tuple(tried[at] for at in sorted(tried)),
            self._settings,
        )

    def _tried_between(self, ends: Compared, metric: str) -> dict[int, Tried]:
        """Return what came of the ends and of those between that decide, by their places in the row."""
        first, last = self.candidates[0], self.candidates[-1]
        tried = {
            0: Tried(first, "good", _value(ends, metric, "old")),
            len(self.candidates) - 1: Tried(last, "bad", _value(ends, metric, "new")),
        }
        jobs = 1 if metric == TIMED else self.jobs
        graph = graph_of(self.candidates)
        while wanted := next_ones(graph, {at: one.answer for at, one in tried.items()}, jobs):
            with ThreadPoolExecutor(max_workers=len(wanted)) as threads:
                done = threads.map(lambda at: self._judge(self.candidates[at], first, metric), wanted)
                tried.update(zip(wanted, done, strict=True))
        return tried

    def _end(self, candidate: Candidate) -> Run:
        """Return the run of an end of the row."""
        run = self._run_of(candidate)
        if isinstance(run, str):
            raise RunFailed(f"{candidate.name} cannot be measured: {run}")
        return run

    def _run_of(self, candidate: Candidate) -> Run | str:
        """Return the run of a candidate, from the journal or now, or why there is none."""
        if candidate.name not in self._known:
            self._known[candidate.name] = self._take(candidate)
        return self._known[candidate.name]

    def _take(self, candidate: Candidate) -> Run | str:
        began = time.monotonic()
        try:
            with self.provisioner.provide({candidate.name: candidate.variant}) as provided:
                taken, run = self.runner.take(provided[candidate.name], explained=True)
        except (RunFailed, NotInstalled, GitError) as failure:
            # Not kept: what was missing may be there when the search goes on.
            why = in_a_line(failure)
            self.provisioner.say(f"{candidate.name}: {why}")
            return why
        try:
            self.journal.add(candidate.name, taken)
        except OSError as error:
            self.provisioner.say(
                f"{self.journal.folder} cannot be written ({error.strerror}): a next start begins anew"
            )
        self.provisioner.say(f"{candidate.name}: {run.measured} measured in {time.monotonic() - began:.1f} s")
        return run

    def _compared(self, base: Candidate, head: Candidate) -> Compared:
        """Return the comparison of two candidates that have been run."""
        if self.metric == TIMED:
            sides = base.name, head.name
            if sides not in self._timed:
                self._timed[sides] = self._in_turns(base, head)
            return self._timed[sides]
        before, after = self._end(base), self._end(head)
        return self._report([(before, after)], base, head)

    def _step(self, good: Candidate, bad: Candidate) -> Compared:
        """Return the comparison of the last good one and the first bad one, which says what lines have changed."""
        report = self._compared(good, bad)
        with self.provisioner.provide({BASE: good.variant, HEAD: bad.variant}) as provided:
            changed = changed_code(provided[BASE], self._end(good), provided[HEAD], self._end(bad))
            return with_marked_lines(report, changed)

    def _report(self, pairs: Sequence[tuple[Run, Run]], base: Candidate, head: Candidate) -> Compared:
        tolerances = {**DEFAULT_TOLERANCES, **self._settings.tolerances}
        return compare_runs(pairs, base.variant.title, head.variant.title, self.max_slowdown, tolerances)

    def _in_turns(self, base: Candidate, head: Candidate) -> Compared:
        """Return the comparison of two candidates that run in turns until their times are decided."""
        sides = {BASE: base, HEAD: head}
        with self.provisioner.provide({side: one.variant for side, one in sides.items()}) as provided:

            def take(side: Side, _number: int) -> Run:
                return self.runner.take(provided[side])[1]

            *_, report = reports_in_turns(take, lambda pairs: self._report(pairs, base, head), _MOST_PAIRS)
        self.provisioner.say(f"{head.name}: {counted(report.pairs or 0, 'pair')} of runs")
        return report

    def _judge(self, candidate: Candidate, first: Candidate, metric: str) -> Tried:
        """Return what comes of a candidate beside the first one."""
        run = self._run_of(candidate)
        if isinstance(run, str):
            return Tried(candidate, "skipped", why=run)
        try:
            report = self._compared(first, candidate)
        except RunFailed as failure:
            return Tried(candidate, "skipped", why=in_a_line(failure))
        changes = [change for change in _changes(report, metric) if change.outcome is not Outcome.UNCERTAIN]
        if not changes:
            return Tried(candidate, "skipped", why=_why_nothing(report, metric))
        answer: Answer = "bad" if any(change.outcome is Outcome.REGRESSED for change in changes) else "good"
        return Tried(candidate, answer, _value(report, metric, "new"))

    def _check_ends(
        self, ends: Compared, metric: str | None, first: Candidate, last: Candidate, good: Run, bad: Run
    ) -> None:
        """Raise `NothingFound` where the last one is not worse than the first."""
        if metric is not None and any(change.outcome is Outcome.REGRESSED for change in _changes(ends, metric)):
            return
        with self.provisioner.provide({BASE: first.variant, HEAD: last.variant}) as provided:
            unused = why_unused(provided[BASE], provided[HEAD], good.imported | bad.imported)
        if unused is not None:
            raise NothingFound(unused)
        judged = metric or "peak_allocated"
        changes = _changes(ends, judged)
        if not changes:
            why = _why_nothing(ends, judged)
            raise NothingFound(f"{first.name} (base) and {last.name} (head) cannot be compared: {why}")
        units = self._settings.units
        then, now = (shown(judged, _value(ends, judged, side), units) for side in ("old", "new"))
        told = f"{METRICS[judged].title} {then} and {now}"
        if any(change.outcome is Outcome.IMPROVED for change in changes):
            raise NothingFound(
                f"{last.name} is better than {first.name} ({told}); to find what mended it, exchange --good and --bad"
            )
        raise NothingFound(f"{last.name} is no worse than {first.name} ({told}): both ends are good, or both are bad")


def _changes(report: Compared, metric: str) -> list[ComparedChange]:
    return [change for row in report.rows for change in row.changes if change.metric == metric]


def _value(report: Compared, metric: str, side: str) -> float | None:
    """Return the largest value of a metric on a side, of the tests that are worse where there are any."""
    changes = _changes(report, metric)
    worse = [change for change in changes if change.outcome is Outcome.REGRESSED]
    return max((value for one in worse or changes if (value := getattr(one, side)) is not None), default=None)


def _most_important(report: Compared) -> str | None:
    """Return the metric that decides: of those that are worse the one that a failure would begin with."""
    worse = {change.metric for row in report.rows for change in row.changes if change.outcome is Outcome.REGRESSED}
    return min(worse, key=lambda name: METRICS[name].precedence, default=None)


def _why_nothing(report: Compared, metric: str) -> str:
    reasons = [one.reason for one in report.left_out if one.reason is not None]
    if reasons:
        return reasons[0]
    return f"no test has {METRICS[metric].title} on both sides" if report.rows else "no test was measured"


def in_a_line(failure: Exception) -> str:
    """Return why a run failed: the last error that pytest shows, or else what it ended with."""
    first, *more = str(failure).splitlines()
    errors = [found.group(1) for line in more if (found := _ERROR.match(line.strip()))]
    return errors[-1] if errors else first
