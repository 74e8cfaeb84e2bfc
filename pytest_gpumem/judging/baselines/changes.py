"""Find the changes that ``--gpumem-update`` makes in the store. This module reads the store and writes nothing."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

from pytest_gpumem.facts.values.rank import rank_in
from pytest_gpumem.judging.baselines.update import entries_to_write, times_left_out
from pytest_gpumem.judging.gate.baseline import Baseline, Key, baseline_of

if TYPE_CHECKING:
    from collections.abc import Iterable, Mapping

    from pytest_gpumem.facts.values.option_words import UpdateMode
    from pytest_gpumem.judging.baselines.store import Store
    from pytest_gpumem.judging.gate.baseline import NoBaseline
    from pytest_gpumem.judging.gate.verdict import TestVerdict, Verdict


@dataclass(frozen=True, slots=True)
class Source:
    """The origin of new entries: the date (``2026-11-02``), the abbreviated commit hash, and the reason for accepting them."""

    recorded: str
    commit: str | None
    reason: str | None = None


@dataclass(frozen=True, slots=True)
class Changes:
    """The changes that an update makes in the store, and the measurements and stored entries from which they follow."""

    measured: Mapping[Key, tuple[Verdict, Baseline]]
    """For each measurement, the verdict and a new entry. This entry has only measured values, and none from the store."""
    stored: Mapping[Key, Baseline | NoBaseline]
    """The stored entry for each key in ``measured``."""
    entries: Mapping[Key, Baseline]
    """The entries to write."""
    removals: tuple[tuple[str, Key], ...]
    """The entries to remove, as (slug, key), because the tests no longer take the measurements of these entries."""
    times_left_out: tuple[str, ...]
    """A clause for each measurement whose times cannot be stored, although the update accepts its times."""

    @property
    def any(self) -> bool:
        """True if the update changes the store."""
        return bool(self.entries or self.removals)


def changes_of(store: Store, mode: UpdateMode, tests: Iterable[TestVerdict], source: Source) -> Changes:
    """Return the changes that an update makes in the store.

    Args:
        store: The store.
        mode: The value for ``--gpumem-update``.
        tests: The verdicts on the tests whose entries may change. Each verdict is for a single device.
        source: The origin that is written into the new entries.

    Raises:
        StoreError: A file in the store is not valid, or the name of a device or a test file is not allowed in the store.
        BackendError: The store cannot be read.
    """
    measured: dict[Key, tuple[Verdict, Baseline]] = {}
    for test in tests:
        for verdict in test.verdicts:
            entry = baseline_of(verdict.measurement, source.recorded, source.commit, source.reason, test.named_device)
            measured[Key(test.file, test.test, verdict.measurement.name)] = verdict, entry
    stored = {key: store.find(key, entry.environment.slug) for key, (_, entry) in measured.items()}
    return Changes(
        measured,
        stored,
        entries_to_write(mode, measured, stored),
        tuple(_no_longer_taken(store, measured)) if mode == "all" else (),
        tuple(times_left_out(mode, measured, stored)),
    )


def _no_longer_taken(store: Store, measured: Mapping[Key, tuple[Verdict, Baseline]]) -> Iterable[tuple[str, Key]]:
    """Return stored baselines of the measured tests, as (slug, key), if the tests no longer take these measurements."""
    tests = {(entry.environment.slug, key.file, key.test) for key, (_, entry) in measured.items()}
    worlds = {_world(key.name) for key in measured}
    return [
        (slug, key)
        for slug in sorted({slug for slug, _, _ in tests})
        for _, key in store.keys(slug)
        # Baselines from jobs with another number of ranks stay in the store, because this job cannot take these measurements.
        if (slug, key.file, key.test) in tests and key not in measured and _world(key.name) in worlds
    ]


def _world(name: str) -> int:
    """Return the number of ranks in the job that took a measurement. The measurement's name contains this number."""
    rank = rank_in(name)
    return 1 if rank is None else rank.world
