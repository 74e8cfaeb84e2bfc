"""The store's changes for accepting tests from a report, and the reasons for refusals."""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import TYPE_CHECKING

from pytest_gpumem.facts.measurement import check_name
from pytest_gpumem.judging.baselines.changes import Changes, changes_of
from pytest_gpumem.judging.baselines.errors import FormatError, StoreError
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
    """A test in a report, with the store's changes for accepting it or the reason for refusing it."""

    result: TestResult
    changes: Changes | None = None
    refused: Refusal | None = None

    @property
    def title(self) -> str:
        return self.result.verdict.nodeid

    @property
    def device(self) -> str:
        """The device's slug, or several slugs if shards ran the test on several devices."""
        return ", ".join(
            dict.fromkeys(verdict.measurement.environment.slug for verdict in self.result.verdict.verdicts)
        )

    @property
    def changes_store(self) -> bool:
        return self.changes is not None and self.changes.any

    @property
    def is_noticed(self) -> bool:
        """True if the gate found a difference from the baseline or from a budget. The command then asks about the test."""
        verdict = self.result.verdict
        return self.result.failed or verdict.lacks_time or verdict.outcome not in (Outcome.OK, Outcome.RECORDED)


def candidates_of(
    results: Iterable[TestResult], terms: Terms, store: Store, source: Source, *, forced: bool = False
) -> list[Candidate]:
    """Return each test's changes in the store. Nothing is written.

    Args:
        results: The tests.
        terms: The options of the report's session.
        store: The readable store.
        source: The origin for the entries.
        forced: Whether to replace baselines even if they have changed since the report's session compared them.

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
        # Anybody can write a report, and its schema does not ensure that each value fits into an entry.
        return Candidate(result, refused=Refusal("not for the store", f"it cannot be kept in the store: {error}"))
    changed_baseline = None if forced else _changed_baseline(changes)
    if changed_baseline is not None:
        return Candidate(result, refused=Refusal("another baseline now", changed_baseline))
    return Candidate(result, changes)


def _check_names(result: TestResult, verdict: Verdict) -> None:
    """Check a measurement's names.

    Raises:
        TypeError, ValueError, StoreError: No session writes such a name, or no file can store it.
    """
    check_name(verdict.measurement.name)
    path_of(verdict.measurement.environment.slug, result.verdict.file).encode()
    result.verdict.test.encode()


def _check_readable(changes: Changes, store: Store) -> None:
    """Check that a test's entries are readable after writing, because an unreadable file makes the store useless.

    Raises:
        FormatError, ValueError: The entries could not be read again.
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
    """Return the changes without times that an earlier call accepted from the same report."""
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
    """Return a clause on the first baseline that differs from the report's baseline; ``None`` if all are equal."""
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
    """Return the entries to write and to remove, by the slug of their device. A report may contain several devices."""
    changes_by_device: dict[str, tuple[dict[Key, Baseline], list[tuple[str, Key]]]] = {}
    for candidate in accepted:
        changes = candidate.changes
        for key, entry in changes.entries.items() if changes is not None else ():
            changes_by_device.setdefault(entry.environment.slug, ({}, []))[0][key] = entry
        for slug, key in changes.removals if changes is not None else ():
            changes_by_device.setdefault(slug, ({}, []))[1].append((slug, key))
    return changes_by_device
