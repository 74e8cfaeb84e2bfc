"""Find the changes to the store for accepting a report's tests, or the reasons why tests are refused."""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import TYPE_CHECKING

from pytest_gpumem.base.errors import FormatError, StoreError
from pytest_gpumem.facts.measurement import check_name
from pytest_gpumem.judging.baselines.changes import Changes, changes_of
from pytest_gpumem.judging.baselines.format import parse, render
from pytest_gpumem.judging.baselines.store import path_of
from pytest_gpumem.judging.gate.baseline import Baseline, Key, NoBaseline
from pytest_gpumem.judging.gate.judge import origin_of
from pytest_gpumem.judging.gate.verdict import Outcome
from pytest_gpumem.tools.accept.selection import Refusal, refusal

if TYPE_CHECKING:
    from collections.abc import Iterable, Mapping, Sequence

    from pytest_gpumem.judging.baselines.changes import Source
    from pytest_gpumem.judging.baselines.store import Store
    from pytest_gpumem.judging.gate.verdict import Verdict
    from pytest_gpumem.reporting.reports.results import TestResult
    from pytest_gpumem.reporting.reports.session_report import Terms


@dataclass(frozen=True, slots=True)
class Candidate:
    """A test in a report, with the changes to the store for accepting the test, or with the reason for refusing the test."""

    result: TestResult
    changes: Changes | None = None
    refused: Refusal | None = None

    @property
    def title(self) -> str:
        return self.result.verdict.nodeid

    @property
    def device(self) -> str:
        """The device's slug, or several slugs if the test ran on several devices."""
        return ", ".join(
            dict.fromkeys(verdict.measurement.environment.slug for verdict in self.result.verdict.verdicts)
        )

    @property
    def changes_store(self) -> bool:
        return self.changes is not None and self.changes.any

    @property
    def is_noticed(self) -> bool:
        """True if a figure failed, changed or has no baseline, so the command asks whether to accept the test."""
        verdict = self.result.verdict
        return self.result.failed or verdict.lacks_time or verdict.outcome not in (Outcome.OK, Outcome.RECORDED)


def candidates_of(
    results: Iterable[TestResult], terms: Terms, store: Store, source: Source, *, forced: bool = False
) -> list[Candidate]:
    """Return a candidate for each test, and write nothing.

    Args:
        results: The tests' results in the report.
        terms: The options of the report's session.
        store: The store, which is only read.
        source: The date, commit and reason for the new entries.
        forced: True to replace baselines even if they have changed since the report's session.

    Raises:
        BackendError: The store cannot be read.
    """
    return [_candidate(result, terms, store, source, forced=forced) for result in results]


def _candidate(result: TestResult, terms: Terms, store: Store, source: Source, *, forced: bool) -> Candidate:
    refused = refusal(result, terms)
    if refused is not None:
        return Candidate(result, refused=refused)
    try:
        for verdict in result.verdict.verdicts:
            _check_names(result, verdict)
        changes = changes_of(store, "all", [result.verdict], source)
        changes = _without_accepted_runs(changes)
        _check_readable(changes, store)
    except (ArithmeticError, LookupError, StoreError, TypeError, ValueError) as error:
        # Anybody can write a report, and the report's schema does not check whether each value fits into the store.
        return Candidate(result, refused=Refusal("not for the store", f"the test's figures cannot be stored: {error}"))
    changed_baseline = None if forced else _changed_baseline(changes)
    if changed_baseline is not None:
        return Candidate(result, refused=Refusal("another baseline now", changed_baseline))
    return Candidate(result, changes)


def _check_names(result: TestResult, verdict: Verdict) -> None:
    """Check whether the store can contain the names of a measurement, its device and its test.

    Raises:
        TypeError, ValueError, StoreError: A name is invalid, or no file can contain the name.
    """
    check_name(verdict.measurement.name)
    path_of(verdict.measurement.environment.slug, result.verdict.file).encode()
    result.verdict.test.encode()


def _check_readable(changes: Changes, store: Store) -> None:
    """Check that a test's new entries can be read again, because an unreadable file makes the store useless.

    Raises:
        FormatError, ValueError: The entries cannot be read again.
    """
    if not changes.entries:
        return
    key, entry = next(iter(changes.entries.items()))
    slug = entry.environment.slug
    stored = {
        entry_key: store.find(entry_key, slug)
        for entry_key in (replace(key, name=name) for name in store.names(slug, key.file, key.test))
    }
    entries = {
        entry_key: other_entry for entry_key, other_entry in stored.items() if isinstance(other_entry, Baseline)
    } | dict(changes.entries)
    text = render(entries)
    text.encode()
    parsed = parse(text, key.file, slug)
    if {entry_key: set(other_entry.by_device) for entry_key, other_entry in parsed.items()} != {
        entry_key: set(other_entry.by_device) for entry_key, other_entry in entries.items()
    }:
        raise FormatError("an entry has the same name as a part of another entry")


def _without_accepted_runs(changes: Changes) -> Changes:
    """Return the changes without entries whose times were already accepted from the same report."""
    entries = {
        key: entry
        for key, entry in changes.entries.items()
        if not _is_accepted(changes.measured[key][1], changes.stored[key])
    }
    return Changes(changes.measured, changes.stored, entries, changes.removals, changes.times_left_out)


def _is_accepted(measured: Baseline, stored: Baseline | NoBaseline) -> bool:
    if isinstance(stored, NoBaseline) or measured.runs is None or stored.runs is None:
        return False
    return stored.has_same_figures(measured) and stored.runs.seconds[-1] == measured.runs.seconds[-1]


def _changed_baseline(changes: Changes) -> str | None:
    """Return a clause on the first baseline that changed after the report's session; ``None`` if no baseline changed."""
    for key in changes.entries:
        verdict, entry = changes.measured[key]
        stored = changes.stored[key]
        if isinstance(stored, Baseline) and stored.has_same_figures(entry):
            continue
        origin = origin_of(stored) if isinstance(stored, Baseline) else None
        if origin == verdict.origin:
            continue
        if verdict.origin is None:
            return f"{key.name} now has a baseline, which did not exist when the report was written"
        recorded = f"recorded {verdict.origin.recorded}" + (
            f", commit {verdict.origin.commit}" if verdict.origin.commit else ""
        )
        return f"the store no longer has the baseline of {key.name} that the report was compared with ({recorded})"
    return None


def by_device(accepted: Sequence[Candidate]) -> Mapping[str, tuple[dict[Key, Baseline], list[tuple[str, Key]]]]:
    """Return the entries to write and the entries to remove, by device slug. A report may contain several devices."""
    changes_by_device: dict[str, tuple[dict[Key, Baseline], list[tuple[str, Key]]]] = {}
    for candidate in accepted:
        changes = candidate.changes
        for key, entry in changes.entries.items() if changes is not None else ():
            changes_by_device.setdefault(entry.environment.slug, ({}, []))[0][key] = entry
        for slug, key in changes.removals if changes is not None else ():
            changes_by_device.setdefault(slug, ({}, []))[1].append((slug, key))
    return changes_by_device
