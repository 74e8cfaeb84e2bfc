"""The changes of the store that a report's tests would make, and what must not be written of them."""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import TYPE_CHECKING

from pytest_gpumem.accept.selection import Refusal, refusal
from pytest_gpumem.baselines.changes import Changes, changes_of
from pytest_gpumem.baselines.errors import FormatError, StoreError
from pytest_gpumem.baselines.format import parse, render
from pytest_gpumem.baselines.store import path_of
from pytest_gpumem.gate.baseline import Baseline, Key, NoBaseline
from pytest_gpumem.gate.judge import origin_of
from pytest_gpumem.gate.verdict import Outcome
from pytest_gpumem.measurement import check_name

if TYPE_CHECKING:
    from collections.abc import Iterable, Mapping, Sequence

    from pytest_gpumem.baselines.changes import Source
    from pytest_gpumem.baselines.store import Store
    from pytest_gpumem.gate.verdict import Verdict
    from pytest_gpumem.reports.results import TestResult
    from pytest_gpumem.reports.session_report import Terms


@dataclass(frozen=True, slots=True)
class Candidate:
    """A test of a report: what accepting it changes in the store, or why it is refused."""

    result: TestResult
    changes: Changes | None = None
    refused: Refusal | None = None

    @property
    def title(self) -> str:
        return self.result.verdict.nodeid

    @property
    def device(self) -> str:
        """The slug of the device that it ran on: shards may have run a test on several."""
        return ", ".join(dict.fromkeys(one.measurement.environment.slug for one in self.result.verdict.verdicts))

    @property
    def changes_store(self) -> bool:
        return self.changes is not None and self.changes.any

    @property
    def is_noticed(self) -> bool:
        """True if its gate said more of it than that it is as its baseline: a person is asked about it."""
        verdict = self.result.verdict
        return self.result.failed or verdict.lacks_time or verdict.outcome not in (Outcome.OK, Outcome.RECORDED)


def candidates_of(
    results: Iterable[TestResult], terms: Terms, store: Store, source: Source, *, forced: bool = False
) -> list[Candidate]:
    """Return what each test of a report would change. Nothing is written.

    Args:
        results: The tests.
        terms: The options of their session.
        store: The store, which can be read.
        source: What the entries say of where they come from.
        forced: Whether to write over baselines that are not those that the report was compared with.

    Raises:
        BackendError: The store cannot be read.
    """
    return [_candidate(result, terms, store, source, forced=forced) for result in results]


def _candidate(result: TestResult, terms: Terms, store: Store, source: Source, *, forced: bool) -> Candidate:
    refused = refusal(result, terms)
    if refused is not None:
        return Candidate(result, refused=refused)
    try:
        for one in result.verdict.verdicts:
            _check_names(result, one)
        changes = changes_of(store, "all", [result.verdict], source)
        changes = _without_what_is_there(changes)
        _check_readable(changes, store)
    except (ArithmeticError, LookupError, StoreError, TypeError, ValueError) as error:
        # A report is anybody's file: its schema cannot say what of it makes an entry.
        return Candidate(result, refused=Refusal("not for the store", f"it cannot be kept in the store: {error}"))
    moved = None if forced else _moved(changes)
    if moved is not None:
        return Candidate(result, refused=Refusal("another baseline now", moved))
    return Candidate(result, changes)


def _check_names(result: TestResult, verdict: Verdict) -> None:
    """Raise ``TypeError``, ``ValueError`` or `StoreError` for names that no session has, and no file could hold."""
    check_name(verdict.measurement.name)
    path_of(verdict.measurement.environment.slug, result.verdict.file).encode()
    result.verdict.test.encode()


def _check_readable(changes: Changes, store: Store) -> None:
    """Raise `FormatError` or ``ValueError`` where a test's entries could not be read again: the store would be of no use."""
    if not changes.entries:
        return
    key, entry = next(iter(changes.entries.items()))
    slug = entry.environment.slug
    there = {
        one: store.find(one, slug)
        for one in (replace(key, name=name) for name in store.names(slug, key.file, key.test))
    }
    entries = {one: found for one, found in there.items() if isinstance(found, Baseline)} | dict(changes.entries)
    text = render(entries)
    text.encode()
    read = parse(text, key.file, slug)
    if {one: set(found.by_device) for one, found in read.items()} != {
        one: set(found.by_device) for one, found in entries.items()
    }:
        raise FormatError("an entry is called as a part of another one is")


def _without_what_is_there(changes: Changes) -> Changes:
    """Return the changes without a run of times that was accepted from the same report before."""
    entries = {
        key: entry
        for key, entry in changes.entries.items()
        if not _is_there(changes.measured[key][1], changes.stored[key])
    }
    return Changes(changes.measured, changes.stored, entries, changes.gone, changes.times_left_out)


def _is_there(measured: Baseline, stored: Baseline | NoBaseline) -> bool:
    if isinstance(stored, NoBaseline) or measured.runs is None or stored.runs is None:
        return False
    return stored.takes_the_same(measured) and stored.runs.seconds[-1] == measured.runs.seconds[-1]


def _moved(changes: Changes) -> str | None:
    """Return, as a clause, which baseline is not the one that the report was compared with; ``None`` where all are."""
    for key in changes.entries:
        verdict, entry = changes.measured[key]
        stored = changes.stored[key]
        if isinstance(stored, Baseline) and stored.takes_the_same(entry):
            continue
        now = origin_of(stored) if isinstance(stored, Baseline) else None
        if now == verdict.origin:
            continue
        if verdict.origin is None:
            return f"{key.name} has a baseline now, and had none for the report"
        was = f"recorded {verdict.origin.recorded}" + (
            f", commit {verdict.origin.commit}" if verdict.origin.commit else ""
        )
        return f"the baseline of {key.name} that the report was compared with ({was}) is not in the store any more"
    return None


def by_device(accepted: Sequence[Candidate]) -> Mapping[str, tuple[dict[Key, Baseline], list[tuple[str, Key]]]]:
    """Return the entries to write and to remove, by the slug of their device: one report may have several."""
    found: dict[str, tuple[dict[Key, Baseline], list[tuple[str, Key]]]] = {}
    for candidate in accepted:
        changes = candidate.changes
        for key, entry in changes.entries.items() if changes is not None else ():
            found.setdefault(entry.environment.slug, ({}, []))[0][key] = entry
        for slug, key in changes.gone if changes is not None else ():
            found.setdefault(slug, ({}, []))[1].append((slug, key))
    return found
