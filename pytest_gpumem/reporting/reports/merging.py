"""Merge the reports of a session's shards, in any order. Merged reports can be merged again. Pure."""

from __future__ import annotations

from collections import Counter
from dataclasses import asdict
from typing import TYPE_CHECKING

from pytest_gpumem.base.errors import MergeError
from pytest_gpumem.facts.values.selection import Selection
from pytest_gpumem.judging.baselines.selecting import is_of_script
from pytest_gpumem.reporting.reports.renamed import with_renamings
from pytest_gpumem.reporting.reports.results import badness
from pytest_gpumem.reporting.reports.session_report import SessionReport, StoreState

if TYPE_CHECKING:
    from collections.abc import Iterable, Sequence

    from pytest_gpumem.judging.gate.baseline import Key
    from pytest_gpumem.reporting.reports.results import TestResult

_AND = "; "


def merge_reports(reports: Sequence[SessionReport], names: Sequence[str] | None = None) -> SessionReport:
    """Merge the shards' reports into a report for the complete run. The shards may themselves be merged.

    A test does not count as missing if at least one shard ran it. If several shards ran a test on the same device, the worst
    result counts (`badness`): a failure is worse than a pass, and a serious outcome is worse than a harmless outcome. A test
    that ran on several devices keeps a result for each device.

    Args:
        reports: The shards.
        names: The shards' names in messages; by default ``shard 1``, ``shard 2`` and so on.

    Raises:
        MergeError: The shards have different commits, versions or options.
    """
    if not reports:
        raise MergeError("there is nothing to merge: name the JSON reports of the shards")
    labels = [f"shard {number}" for number in range(1, len(reports) + 1)] if names is None else names
    _check(reports, labels)
    selection = _selection([report.selection for report in reports])
    results = with_renamings(_results(result for report in reports for result in report.results), selection.collected)
    ran = {(result.verdict.file, result.verdict.test) for result in results}
    return SessionReport(
        ended=max(report.ended for report in reports),
        version=reports[0].version,
        # All reports name the same commit, but clones with more commits abbreviate its hash less. Use the longest hash.
        commit=max((report.commit for report in reports if report.commit), key=len, default=None),
        terms=reports[0].terms,
        results=results,
        not_run=tuple(sorted({test for report in reports for test in report.not_run} - ran)),
        selection=selection,
        stored=_stored([report.stored for report in reports]),
        closing_lines=tuple(sorted(line for report in reports for line in report.closing_lines)),
        errors=tuple(sorted({error for report in reports for error in report.errors})),
        ended_early=_clauses(report.ended_early for report in reports),
        not_collected=tuple(sorted({file for report in reports for file in report.not_collected})),
        shards=sum(report.shards for report in reports),
        unmeasured_failures=sum(report.unmeasured_failures for report in reports),
        merged=True,
        unmeasured_shards=tuple(sorted({tests for report in reports for tests in _unmeasured_shards(report)})),
    )


def _unmeasured_shards(report: SessionReport) -> tuple[tuple[tuple[str, str], ...], ...]:
    if report.merged:
        return report.unmeasured_shards
    if not report.results or any(_devices(result) for result in report.results):
        return ()
    return (tuple(sorted({(result.verdict.file, result.verdict.test) for result in report.results})),)


def repeated_tests(reports: Iterable[SessionReport]) -> list[tuple[str, str]]:
    """Return the tests, as (file, test), with a result in more than one of ``reports``, sorted."""
    ran = Counter(
        test for report in reports for test in {(result.verdict.file, result.verdict.test) for result in report.results}
    )
    return sorted(test for test, times in ran.items() if times > 1)


def unselected_tests(merged_report: SessionReport) -> list[tuple[str, str]]:
    """Return the sorted measured tests, as (file, test), that no shard selected."""
    return sorted(merged_report.selection.collected - merged_report.selection.measured)


def unaccounted_baselines(reports: Sequence[SessionReport]) -> list[tuple[str, Key]]:
    """Return the baselines, as (slug, key), that no report accounts for. If there are any, a shard's report may be missing.

    A report accounts for a baseline on its devices if its session collected the baseline's test, or if the test no longer
    exists. A report without measurements accounts for baselines on all devices, because its tests may have skipped themselves.
    The result is sorted.
    Baselines of scripts (``train.py::run``) are ignored, because scripts do not run in shards.
    """
    unaccounted = {
        entry
        for report in reports
        for entry in report.stored.baselines
        if not is_of_script(entry[1], report.stored.functions)
    }
    for report in reports:
        slugs = {slug for slug, _ in report.stored.baselines}
        ran = {(result.verdict.file, result.verdict.test) for result in report.results}
        tests = report.selection.collected | ran | {*report.not_run}
        files = report.selection.collected_files | report.stored.gone | {*report.not_collected}
        unaccounted = {
            (slug, key)
            for slug, key in unaccounted
            if (slugs and slug not in slugs) or ((key.file, key.test) not in tests and key.file not in files)
        }
    return sorted(unaccounted)


def run_twice(reports: Sequence[SessionReport]) -> tuple[int, int] | None:
    """Return the numbers of two ``reports`` with the same tests in the same environments; ``None`` if all reports differ."""
    seen: dict[tuple[object, ...], int] = {}
    for number, report in enumerate(reports):
        if not report.selection.measured:
            continue
        environments = frozenset(
            (environment.slug, environment.device, tuple(environment.details.items()))
            for result in report.results
            for environment in (verdict.measurement.environment for verdict in result.verdict.verdicts)
        )
        earlier = seen.setdefault((report.selection.measured, environments), number)
        if earlier < number:
            return earlier, number
    return None


def _check(reports: Sequence[SessionReport], names: Sequence[str]) -> None:
    first = reports[0]
    for name, report in zip(names, reports, strict=True):
        if report.version != first.version:
            raise MergeError(
                f"{names[0]} comes from pytest-gpumem {first.version}, {name} from {report.version}: "
                "run all shards with one version"
            )
        first_terms, terms = asdict(first.terms), asdict(report.terms)
        for term, value in first_terms.items():
            if terms[term] != value:
                old, new = ("none" if setting is None else str(setting).lower() for setting in (value, terms[term]))
                raise MergeError(
                    f"{names[0]} was run with {term} = {old}, {name} with {term} = {new}: "
                    "run all shards with the same options"
                )
    commits = [(name, report.commit) for name, report in zip(names, reports, strict=True) if report.commit]
    longest = max(commits, key=lambda named_commit: len(named_commit[1]), default=("", ""))
    for name, commit in commits:
        if not longest[1].startswith(commit):
            raise MergeError(
                f"{name} comes from commit {commit}, {longest[0]} from {longest[1]}: merge only shards from one commit"
            )


def _results(results: Iterable[TestResult]) -> tuple[TestResult, ...]:
    worst: dict[tuple[str, str, tuple[str, ...]], TestResult] = {}
    for result in results:
        key = (result.verdict.file, result.verdict.test, _devices(result))
        worst[key] = max((worst[key], result), key=badness) if key in worst else result
    measured = {(file, test) for file, test, devices in worst if devices}
    return tuple(
        result
        for (file, test, devices), result in sorted(worst.items(), key=lambda entry: entry[0])
        # An unmeasured test counts only if no other shard measured it.
        if devices or result.failed or (file, test) not in measured
    )


def _devices(result: TestResult) -> tuple[str, ...]:
    """Return the device slugs on which a test was measured."""
    if result.verdict.unmeasured:
        return ()
    return tuple(sorted({verdict.measurement.environment.slug for verdict in result.verdict.verdicts}))


def _selection(selections: Sequence[Selection]) -> Selection:
    return Selection(
        measured=frozenset[tuple[str, str]]().union(*(selection.measured for selection in selections)),
        files=frozenset[str]().union(*(selection.files for selection in selections)),
        # A budget without an effect in one shard may limit a test in another shard. So keep only budgets without any effect.
        budgets_without_effect=tuple(
            sorted(set.intersection(*(set(selection.budgets_without_effect) for selection in selections)))
        ),
        error=_clauses(selection.error for selection in selections),
        collected=frozenset[tuple[str, str]]().union(*(selection.collected for selection in selections)),
        collected_files=frozenset[str]().union(*(selection.collected_files for selection in selections)),
        skipped=frozenset[tuple[str, str]]().union(*(selection.skipped for selection in selections)),
        uncollected=frozenset[tuple[str, str]]().union(*(selection.uncollected for selection in selections)),
        omitted=tuple(sorted({sentence for selection in selections for sentence in selection.omitted})),
    )


def _stored(stores: Sequence[StoreState]) -> StoreState:
    existing = {key.file for stored in stores for _, key in stored.baselines if key.file not in stored.gone}
    removed = frozenset[str]().union(*(stored.gone for stored in stores))
    baselines = tuple(sorted({baseline for stored in stores for baseline in stored.baselines}))
    functions = tuple(sorted({name for stored in stores for name in stored.functions}))
    return StoreState(baselines, removed - existing, functions)


def _clauses(texts: Iterable[str | None]) -> str | None:
    """Join the distinct clauses in ``texts``, or return ``None`` without texts.

    Texts are split first, because the text in a merged report may already contain several clauses.
    """
    clauses = {clause for text in texts if text is not None for clause in text.split(_AND)}
    return _AND.join(sorted(clauses)) if clauses else None
