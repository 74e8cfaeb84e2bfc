"""The changes that an update makes in the store. This module reads the store and writes nothing."""

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
    """The origin of new entries: the date (``2026-11-02``), the abbreviated commit, and the reason for accepting them."""

    recorded: str
    commit: str | None
    reason: str | None = None


@dataclass(frozen=True, slots=True)
class Changes:
    """The changes that an update makes, with the measurements and stored entries behind them."""

    measured: Mapping[Key, tuple[Verdict, Baseline]]
    """Each measurement's verdict, and the entry from this run alone, without stored values."""
    stored: Mapping[Key, Baseline | NoBaseline]
    """The stored entries, by the same keys."""
    entries: Mapping[Key, Baseline]
    """The entries to write."""
    removals: tuple[tuple[str, Key], ...]
    """The entries to remove, as (slug, key), because their tests no longer take these measurements."""
    times_left_out: tuple[str, ...]
    """A clause for each measurement whose times are accepted but cannot be stored."""

    @property
    def any(self) -> bool:
        """True if the store changes."""
        return bool(self.entries or self.removals)


def changes_of(store: Store, mode: UpdateMode, tests: Iterable[TestVerdict], source: Source) -> Changes:
    """Return the changes that an update makes in the store.

    Args:
        store: The store.
        mode: The value for ``--gpumem-update``.
        tests: The verdicts on the tests whose entries may change, each for a single device.
        source: The origin to write into the entries.

    Raises:
        StoreError: A file in the store is not valid, or a name is not allowed in it.
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
    """Return stored baselines, as (slug, key), for measurements that the measured tests no longer take."""
    tests = {(entry.environment.slug, key.file, key.test) for key, (_, entry) in measured.items()}
    worlds = {_world(key.name) for key in measured}
    return [
        (slug, key)
        for slug in sorted({slug for slug, _, _ in tests})
        for _, key in store.keys(slug)
        # Baselines from jobs with more or fewer ranks stay, because this job could not measure them.
        if (slug, key.file, key.test) in tests and key not in measured and _world(key.name) in worlds
    ]


def _world(name: str) -> int:
    """Return how many ranks a job had, from a measurement's name."""
    rank = rank_in(name)
    return 1 if rank is None else rank.world
