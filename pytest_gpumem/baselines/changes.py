"""The changes that an update makes in the store, from the verdicts on tests that may be written. It reads the store only."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

from pytest_gpumem.baselines.update import entries_to_write, times_left_out
from pytest_gpumem.gate.baseline import Baseline, Key, baseline_of
from pytest_gpumem.values.rank import rank_in

if TYPE_CHECKING:
    from collections.abc import Iterable, Mapping

    from pytest_gpumem.baselines.store import Store
    from pytest_gpumem.gate.baseline import NoBaseline
    from pytest_gpumem.gate.verdict import TestVerdict, Verdict
    from pytest_gpumem.values.option_words import UpdateMode


@dataclass(frozen=True, slots=True)
class Source:
    """Origin of entries: the date of their run (``2026-11-02``), an abbreviated hash, and why it is accepted."""

    recorded: str
    commit: str | None
    reason: str | None = None


@dataclass(frozen=True, slots=True)
class Changes:
    """The changes that an update makes, and what they follow from."""

    measured: Mapping[Key, tuple[Verdict, Baseline]]
    """Each measurement's verdict, and the entry that it would be by itself."""
    stored: Mapping[Key, Baseline | NoBaseline]
    """Entries of the store, by the same keys."""
    entries: Mapping[Key, Baseline]
    """The entries to write."""
    gone: tuple[tuple[str, Key], ...]
    """The entries to remove, as (slug, key): of measurements that their tests no longer take."""
    times_left_out: tuple[str, ...]
    """Reasons for which times are not stored though the update accepts them: a clause for each measurement."""

    @property
    def any(self) -> bool:
        """True if the store changes."""
        return bool(self.entries or self.gone)


def changes_of(store: Store, mode: UpdateMode, tests: Iterable[TestVerdict], source: Source) -> Changes:
    """Return what an update changes in the store.

    Args:
        store: The store.
        mode: The words of the update.
        tests: The verdicts on the tests that may be written, each on one device.
        source: What the entries say of where they come from.

    Raises:
        StoreError: A file of the store cannot be understood, or a name has no place in it.
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
    """Return the baselines of tests that were measured, for measurements that these tests no longer take."""
    tests = {(entry.environment.slug, key.file, key.test) for key, (_, entry) in measured.items()}
    worlds = {_world(key.name) for key in measured}
    return [
        (slug, key)
        for slug in sorted({slug for slug, _, _ in tests})
        for _, key in store.keys(slug)
        # Those of jobs of another size stay: this one could not measure them.
        if (slug, key.file, key.test) in tests and key not in measured and _world(key.name) in worlds
    ]


def _world(name: str) -> int:
    """Return how many ranks the job had that took a measurement of this name."""
    rank = rank_in(name)
    return 1 if rank is None else rank.world
