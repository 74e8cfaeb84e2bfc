"""Find baselines whose tests pytest no longer collects."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import TYPE_CHECKING

from pytest_gpumem.judging.baselines.selecting import unused_baselines
from pytest_gpumem.judging.gate.baseline import Baseline

if TYPE_CHECKING:
    from collections.abc import Callable, Collection

    from pytest_gpumem.judging.baselines.store import Store
    from pytest_gpumem.judging.gate.baseline import Key


@dataclass(eq=False, repr=False)
class UnusedBaselines:
    """The baselines in a store whose tests no longer exist.

    A device's files are read by the first call to `on` for this device.
    """

    store: Store
    tests: Collection[tuple[str, str]]
    """All collected tests, measured or not, as (file, test)."""
    whole_files: Collection[str]
    """The test files in which all tests were collected."""
    exists: Callable[[str], bool]
    """Returns whether a test file exists."""
    _by_slug: dict[str, list[tuple[Key, Baseline]]] = field(default_factory=dict, init=False)

    def on(self, slug: str) -> list[tuple[Key, Baseline]]:
        """Return the unused baselines on a device. Raises `StoreError` and `BackendError`."""
        if slug not in self._by_slug:
            files = {file for file in self.store.files() if file in self.whole_files or not self.exists(file)}
            unused_keys = unused_baselines(
                self.store.keys(slug, files), measured=self.tests, whole_files=self.whole_files, exists=self.exists
            )
            entries = ((key, self.store.find(key, slug)) for _, key in unused_keys)
            self._by_slug[slug] = [(key, entry) for key, entry in entries if isinstance(entry, Baseline)]
        return self._by_slug[slug]
