"""Run candidates until the first bad one is found: each once, or in turns with the good end where its time is judged."""

from __future__ import annotations

import time
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field
from functools import partial
from itertools import count
from typing import TYPE_CHECKING

from pytest_gpumem.ab.changed_code import ChangedCode, Code, with_changed_code
from pytest_gpumem.ab.checkout import BASE, HEAD
from pytest_gpumem.ab.compare_variants import reports_in_turns, settings_in
from pytest_gpumem.ab.errors import RunFailed
from pytest_gpumem.ab.variants import why_unused
from pytest_gpumem.ab.verdicts import compare_runs
from pytest_gpumem.bisect.search import bounds, next_ones
from pytest_gpumem.config.settings import DEFAULT_TOLERANCES, Settings
from pytest_gpumem.gate.verdict import Outcome
from pytest_gpumem.git import GitError
from pytest_gpumem.metrics import METRICS, WHOLE
from pytest_gpumem.reports.values import shown
from pytest_gpumem.requirements.errors import NotInstalled
from pytest_gpumem.units import counted

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator, Sequence

    from pytest_gpumem.ab.checkout import Side
    from pytest_gpumem.ab.runs import Run, Runner
    from pytest_gpumem.ab.variants import Workshop
    from pytest_gpumem.bisect.candidates import Candidate
    from pytest_gpumem.bisect.journal import Journal
    from pytest_gpumem.bisect.search import Answer
    from pytest_gpumem.reports.comparison import Compared, ComparedChange

TIMED = "step_time"
JUDGED = (*(name for name, metric in METRICS.items() if metric.tolerance is not None and metric.unit in WHOLE), TIMED)
"""The metrics by which candidates can be told apart."""


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
    workshop: Workshop
    journal: Journal
    say: Callable[[str], None]
    metric: str | None = None
    jobs: int = 1
    max_slowdown: float = 0.015
    most_pairs: int = 8
    numbers: Iterator[int] = field(default_factory=partial(count, 1))
    """Numbers of runs, which name their folders: shared by searches that have one runner."""
    _known: dict[str, Run | str] = field(default_factory=dict)
    """Runs of candidates by name, or why there is none."""
    _settings: Settings = field(default_factory=Settings)

    def find(self) -> Found:
        """Return the first bad candidate.

        Raises `NothingFound`, `RunFailed` where an end cannot be run, `NotInstalled`, `GitError` and `Stopped`.
        """
        self._known = dict(self.journal.runs())
        if self._known:
            self.say(f"going on with {counted(len(self._known), 'run')} of an earlier start")
        first, last = self.candidates[0], self.candidates[-1]
        good, bad = self._end(first), self._end(last)
        with self.workshop.ready({HEAD: last.variant}) as ready:
            self._settings = settings_in(ready[HEAD].top / bad.root)
        ends = self._compared(first, last)
        metric = self.metric or _most_important(ends)
        self._check_ends(ends, metric, first, last, good, bad)
        assert metric is not None, "it has been checked"
        answers: dict[int, Answer] = {0: "good", len(self.candidates) - 1: "bad"}
        tried = [Tried(first, "good", _value(ends, metric, "old"))]
        jobs = 1 if metric == TIMED else self.jobs
        while wanted := next_ones(len(self.candidates), answers, jobs):
            with ThreadPoolExecutor(max_workers=len(wanted)) as threads:
                done = list(threads.map(lambda at: self._judge(self.candidates[at], first, metric), wanted))
            for at, one in zip(wanted, done, strict=True):
                answers[at] = one.answer
                tried.append(one)
        tried.append(Tried(last, "bad", _value(ends, metric, "new")))
        left = bounds(len(self.candidates), answers)
        between = tuple(self.candidates[left.good + 1 : left.bad])
        step = self._step(self.candidates[left.good], self.candidates[left.bad])
        names = [candidate.name for candidate in self.candidates]
        return Found(
            metric,
            self.candidates[left.good],
            self.candidates[left.bad],
            between,
            ends,
            step,
            tuple(sorted(tried, key=lambda one: names.index(one.candidate.name))),
            self._settings,
        )

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
        number, began = next(self.numbers), time.monotonic()
        try:
            with self.workshop.ready({candidate.name: candidate.variant}) as ready:
                taken, run = self.runner.take(ready[candidate.name], number, lambda: None, explained=True)
        except (RunFailed, NotInstalled, GitError) as failure:
            # Not kept: what was missing may be there when the search goes on.
            why = in_a_line(failure)
            self.say(f"{candidate.name}: {why}")
            return why
        self.journal.add(candidate.name, taken)
        self.say(f"{candidate.name}: {run.measured} measured in {time.monotonic() - began:.1f} s")
        return run

    def _compared(self, base: Candidate, head: Candidate) -> Compared:
        """Return the comparison of two candidates that have been run."""
        if self.metric == TIMED:
            return self._in_turns(base, head)
        before, after = self._end(base), self._end(head)
        return self._report([(before, after)], base, head)

    def _step(self, good: Candidate, bad: Candidate) -> Compared:
        """Return the comparison of the last good one and the first bad one, which says what lines have changed."""
        report = self._compared(good, bad)
        with self.workshop.ready({BASE: good.variant, HEAD: bad.variant}) as ready:
            before, after = (Code.of(ready[side], self._end(one)) for side, one in ((BASE, good), (HEAD, bad)))
            return with_changed_code(report, ChangedCode(before, after))

    def _report(self, pairs: Sequence[tuple[Run, Run]], base: Candidate, head: Candidate) -> Compared:
        tolerances = {**DEFAULT_TOLERANCES, **self._settings.tolerances}
        return compare_runs(pairs, base.variant.title, head.variant.title, self.max_slowdown, tolerances)

    def _in_turns(self, base: Candidate, head: Candidate) -> Compared:
        """Return the comparison of two candidates that run in turns until their times are decided."""
        sides = {BASE: base, HEAD: head}
        with self.workshop.ready({side: one.variant for side, one in sides.items()}) as ready:

            def take(side: Side, _number: int) -> Run:
                return self.runner.take(ready[side], next(self.numbers), lambda: None)[1]

            *_, report = reports_in_turns(take, lambda pairs: self._report(pairs, base, head), self.most_pairs)
        self.say(f"{head.name}: {counted(report.pairs or 0, 'pair')} of runs")
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
        with self.workshop.ready({BASE: first.variant, HEAD: last.variant}) as ready:
            unused = why_unused(ready[BASE], ready[HEAD], good.imported | bad.imported)
        if unused is not None:
            raise NothingFound(unused)
        names = [metric] if metric is not None else ["peak_allocated"]
        changes = _changes(ends, names[0])
        if not changes:
            raise NothingFound(f"{first.name} and {last.name} cannot be compared: {_why_nothing(ends, names[0])}")
        then, now = (_value(ends, names[0], side) for side in ("old", "new"))
        told = f"{METRICS[names[0]].title} {shown(names[0], then, 'si')} and {shown(names[0], now, 'si')}"
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
    return reasons[0] if reasons else f"there is no {METRICS[metric].title}"


def in_a_line(failure: Exception) -> str:
    """Return why a run failed: the last error that pytest shows, or else what it ended with."""
    first, *more = str(failure).splitlines()
    errors = [line.strip()[1:].strip() for line in more if line.strip().startswith("E ")]
    return errors[-1] if errors else first
