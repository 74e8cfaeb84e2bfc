"""Find renamed tests: pair each new test with the unused baseline from its probable former name. Pure.

For example, ``test_step[fp32]`` is new, ``test_train[fp32]`` no longer exists, and the peak in ``test_train[fp32]``'s baseline
is the peak of ``test_step[fp32]``.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from typing import TYPE_CHECKING

from pytest_gpumem.facts.values.selection import Test
from pytest_gpumem.judging.gate.renaming import likeness
from pytest_gpumem.judging.gate.verdict import FormerTest, Outcome
from pytest_gpumem.reporting.reports.results import Renaming, TestResult

if TYPE_CHECKING:
    from collections.abc import Collection, Iterable

_Candidates = Mapping[int, Mapping[Test, FormerTest]]
"""The possible former tests of each new test, by the new test's number in the results."""


def with_renamings(results: Iterable[TestResult], collected: Collection[Test]) -> tuple[TestResult, ...]:
    """Return ``results`` with the likely former name of each new test.

    New tests and former tests with matching figures are paired first, so an unchanged test never looks worse under its new
    name. The remaining tests were both renamed and changed, so they are paired by similar names. A file is ignored if some of
    its tests did not run, because a test that did not run may be the renamed test.

    Args:
        results: The results, on any devices.
        collected: All collected measured tests, as (file, test).
    """
    everything = [replace(result, renamed=None) for result in results]
    ran = {(result.verdict.file, result.verdict.test) for result in everything}
    partial = {file for file, _ in {*collected} - ran}
    by_device: dict[str, dict[int, TestResult]] = {}
    for number, result in enumerate(everything):
        slug = _slug(result)
        if slug is not None and result.verdict.file not in partial:
            by_device.setdefault(slug, {})[number] = result
    renamed: dict[int, Renaming] = {}
    for alike in by_device.values():
        candidates = {number: _candidates(result) for number, result in alike.items()}
        names = {number: result.verdict.test for number, result in alike.items()}
        for number, old in _paired(names, candidates).items():
            candidate = candidates[number][old]
            grown = [metric for metric in candidate.metrics if metric.outcome is Outcome.REGRESSED]
            renamed[number] = Renaming(*old, grown[0] if grown else None, candidate.accept, candidate.prune)
    return tuple(replace(result, renamed=renamed.get(number)) for number, result in enumerate(everything))


def _slug(result: TestResult) -> str | None:
    """Return the slug of a new test's device; ``None`` if the test was not measured or has no possible former name."""
    verdicts = () if result.verdict.unmeasured else result.verdict.verdicts
    return verdicts[0].measurement.environment.slug if any(verdict.candidates for verdict in verdicts) else None


def _candidates(result: TestResult) -> dict[Test, FormerTest]:
    """Return a test's possible former tests, each with its differing metrics, the most serious first."""
    candidates: dict[Test, FormerTest] = {}
    for candidate in (former for verdict in result.verdict.verdicts for former in verdict.candidates):
        key = (candidate.file, candidate.test)
        metrics = (*candidates[key].metrics, *candidate.metrics) if key in candidates else candidate.metrics
        by_importance = sorted(metrics, key=lambda metric: -metric.outcome.importance)
        candidates[key] = replace(candidate, metrics=tuple(by_importance))
    return candidates


def _paired(names: Mapping[int, str], candidates: _Candidates) -> dict[int, Test]:
    """Pair new tests with old tests.

    First, as many new tests as possible are paired with an old test whose figures match. Then the other new tests are paired by
    similar names.
    """
    pairs: dict[int, Test] = {}
    for new in candidates:
        _pair(new, pairs, candidates)
    taken = {*pairs.values()}
    ranked_pairs = [
        (-likeness(old[1], names[new]), old, new)
        for new in candidates.keys() - pairs.keys()
        for old in candidates[new].keys() - taken
    ]
    for _, old, new in sorted(ranked_pairs):
        if old not in taken and new not in pairs:
            pairs[new] = old
            taken.add(old)
    return pairs


def _pair(new: int, pairs: dict[int, Test], candidates: _Candidates) -> None:
    """Pair ``new`` with an old test whose figures match.

    If another new test already has this old test, the other new test may move to a different old test (an augmenting path in a
    bipartite matching).
    """
    owners = {old: owner for owner, old in pairs.items()}
    reached: dict[Test, int] = {}
    waiting = [new]
    for current in waiting:
        for old, candidate in candidates[current].items():
            if not candidate.fits or old in reached:
                continue
            reached[old] = current
            if old in owners:
                waiting.append(owners[old])
                continue
            mover, free = current, old
            while mover != new:
                pairs[mover], free = free, pairs[mover]
                mover = reached[free]
            pairs[new] = free
            return
