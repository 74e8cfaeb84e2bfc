"""Several shards of a session merged into one report, in any order, also of merged ones. Pure."""

from __future__ import annotations

from collections import Counter
from dataclasses import asdict
from typing import TYPE_CHECKING

from pytest_gpumem.baselines.selecting import is_of_script
from pytest_gpumem.reports.errors import MergeError
from pytest_gpumem.reports.renamed import with_renamings
from pytest_gpumem.reports.results import badness
from pytest_gpumem.reports.session_report import SessionReport, Stored
from pytest_gpumem.values.selection import Selection

if TYPE_CHECKING:
    from collections.abc import Iterable, Sequence

    from pytest_gpumem.gate.baseline import Key
    from pytest_gpumem.reports.results import TestResult

_AND = "; "


def merged(reports: Sequence[SessionReport], names: Sequence[str] | None = None) -> SessionReport:
    """Return the report of the whole run of which ``reports`` are shards, or merged shards.

    A test that ran in one shard is not missing because it did not in another. Of a test that ran in several on the same
    device, the worst result is kept: one that failed, or else one that was measured, or else the more serious outcome. On
    several devices it keeps a result for each.

    Args:
        reports: The shards.
        names: What messages call them.

    Raises:
        MergeError: They are of different commits or versions, or were run with different options.
    """
    if not reports:
        raise MergeError("there is nothing to merge: name the JSON reports of the shards")
    called = [f"shard {number}" for number in range(1, len(reports) + 1)] if names is None else names
    _check(reports, called)
    selection = _selection([report.selection for report in reports])
    results = with_renamings(_results(result for report in reports for result in report.results), selection.collected)
    ran = {(result.verdict.file, result.verdict.test) for result in results}
    return SessionReport(
        ended=max(report.ended for report in reports),
        version=reports[0].version,
        # Abbreviated hashes: a clone that knows more commits may need one more digit.
        commit=max((report.commit for report in reports if report.commit), key=len, default=None),
        terms=reports[0].terms,
        results=results,
        not_run=tuple(sorted({test for report in reports for test in report.not_run} - ran)),
        selection=selection,
        stored=_stored([report.stored for report in reports]),
        said=tuple(sorted(line for report in reports for line in report.said)),
        errors=tuple(sorted({error for report in reports for error in report.errors})),
        ended_early=_clauses(report.ended_early for report in reports),
        not_collected=tuple(sorted({file for report in reports for file in report.not_collected})),
        shards=sum(report.shards for report in reports),
        others_failed=sum(report.others_failed for report in reports),
        merged=True,
        unmeasured_shards=tuple(sorted({tests for report in reports for tests in _unmeasured_shards(report)})),
    )


def _unmeasured_shards(report: SessionReport) -> tuple[tuple[tuple[str, str], ...], ...]:
    if report.merged:
        return report.unmeasured_shards
    if not report.results or any(_devices(result) for result in report.results):
        return ()
    return (tuple(sorted({(result.verdict.file, result.verdict.test) for result in report.results})),)


def several(reports: Iterable[SessionReport]) -> list[tuple[str, str]]:
    """Return the tests, as (file, test), that have a result in more than one of ``reports``, sorted."""
    ran = Counter(
        test for report in reports for test in {(result.verdict.file, result.verdict.test) for result in report.results}
    )
    return sorted(test for test, times in ran.items() if times > 1)


def in_no_shard(whole: SessionReport) -> list[tuple[str, str]]:
    """Return the measured tests, as (file, test), that were collected and that no shard selected, sorted."""
    return sorted(whole.selection.collected - whole.selection.measured)


def in_no_report(reports: Sequence[SessionReport]) -> list[tuple[str, Key]]:
    """Return the stored baselines, as (slug, key), that none of ``reports`` accounts for, sorted.

    A report accounts for a baseline on one of its devices if it collected the test, or shows that the test is gone. A report
    that measured nothing does so on all devices: its tests may have skipped themselves. Baselines of scripts
    (``train.py::run``) are not a matter of shards.
    """
    left = {
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
        left = {
            (slug, key)
            for slug, key in left
            if (slugs and slug not in slugs) or ((key.file, key.test) not in tests and key.file not in files)
        }
    return sorted(left)


def run_twice(reports: Sequence[SessionReport]) -> tuple[int, int] | None:
    """Return the numbers of two ``reports`` with the same tests in the same environments; ``None`` where there are none."""
    seen: dict[tuple[object, ...], int] = {}
    for number, report in enumerate(reports):
        if not report.selection.measured:
            continue
        environments = frozenset(
            (where.slug, where.device, tuple(where.details.items()))
            for result in report.results
            for where in (one.measurement.environment for one in result.verdict.verdicts)
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
        here, there = asdict(first.terms), asdict(report.terms)
        for term, value in here.items():
            if there[term] != value:
                old, new = ("none" if one is None else str(one).lower() for one in (value, there[term]))
                raise MergeError(
                    f"{names[0]} was run with {term} = {old}, {name} with {term} = {new}: "
                    "run all shards with the same options"
                )
    known = [(name, report.commit) for name, report in zip(names, reports, strict=True) if report.commit]
    longest = max(known, key=lambda entry: len(entry[1]), default=("", ""))
    for name, commit in known:
        if not longest[1].startswith(commit):
            raise MergeError(
                f"{name} comes from commit {commit}, {longest[0]} from {longest[1]}: merge only shards from one commit"
            )


def _results(results: Iterable[TestResult]) -> tuple[TestResult, ...]:
    kept: dict[tuple[str, str, tuple[str, ...]], TestResult] = {}
    for result in results:
        key = (result.verdict.file, result.verdict.test, _devices(result))
        kept[key] = max((kept[key], result), key=badness) if key in kept else result
    measured = {(file, test) for file, test, devices in kept if devices}
    return tuple(
        result
        for (file, test, devices), result in sorted(kept.items(), key=lambda entry: entry[0])
        # A test that one shard could not measure counts only where no other did.
        if devices or result.failed or (file, test) not in measured
    )


def _devices(result: TestResult) -> tuple[str, ...]:
    """Return the slugs of the devices on which a test was measured."""
    if result.verdict.unmeasured:
        return ()
    return tuple(sorted({one.measurement.environment.slug for one in result.verdict.verdicts}))


def _selection(selections: Sequence[Selection]) -> Selection:
    return Selection(
        measured=frozenset[tuple[str, str]]().union(*(one.measured for one in selections)),
        files=frozenset[str]().union(*(one.files for one in selections)),
        # A budget that has no effect in one shard may well hold a test of another.
        idle_budgets=tuple(sorted(set.intersection(*(set(one.idle_budgets) for one in selections)))),
        error=_clauses(one.error for one in selections),
        collected=frozenset[tuple[str, str]]().union(*(one.collected for one in selections)),
        collected_files=frozenset[str]().union(*(one.collected_files for one in selections)),
        skipped=frozenset[tuple[str, str]]().union(*(one.skipped for one in selections)),
        uncollected=frozenset[tuple[str, str]]().union(*(one.uncollected for one in selections)),
        omitted=tuple(sorted({sentence for one in selections for sentence in one.omitted})),
    )


def _stored(stores: Sequence[Stored]) -> Stored:
    there = {key.file for one in stores for _, key in one.baselines if key.file not in one.gone}
    gone = frozenset[str]().union(*(one.gone for one in stores))
    baselines = tuple(sorted({entry for one in stores for entry in one.baselines}))
    return Stored(baselines, gone - there, tuple(sorted({name for one in stores for name in one.functions})))


def _clauses(texts: Iterable[str | None]) -> str | None:
    """Return each of ``texts`` once, as one text. Those that were merged before are split."""
    clauses = {clause for text in texts if text is not None for clause in text.split(_AND)}
    return _AND.join(sorted(clauses)) if clauses else None
