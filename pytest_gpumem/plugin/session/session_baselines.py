"""Find the baselines with which a session compares: on the session's device, or on the device in a test's marker."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import TYPE_CHECKING

from pytest_gpumem.facts.values.rank import rank_in
from pytest_gpumem.judging.gate.baseline import NoBaseline

if TYPE_CHECKING:
    from collections.abc import Callable, Collection

    from pytest_gpumem.facts.values.rank import Rank
    from pytest_gpumem.judging.baselines.store import Store
    from pytest_gpumem.judging.gate.baseline import Key


@dataclass(eq=False, repr=False)
class SessionBaselines:
    """The baselines with which a session compares. The store may have baselines for many other devices.

    If a test's marker named a device when a baseline was recorded, the baseline counts on this device. Otherwise it counts
    on the session's device. For example, a session on the CPU reads ``cpu-x86_64``, but ``nvidia-h100`` for a test with
    ``device="cuda"``.
    """

    store: Store
    rank: Rank | None
    """This process's rank, or ``None``. Other ranks, and jobs with another number of ranks, have their own baselines."""
    slug_of: Callable[[str | None], str | None]
    """Returns the slug of a device by its name, or ``None`` if the device is not available. The name ``None`` means the
    session's device. This function may import torch, so it is called only if there are baselines."""
    _slugs: dict[str | None, str | None] = field(default_factory=dict, init=False)

    def files(self) -> set[str]:
        """Return the test files with baselines on any device."""
        return self.store.files()

    def keys(self, files: Collection[str]) -> list[tuple[str, Key]]:
        """Return this session's baselines for the tests in ``files``, as sorted pairs (slug, key)."""
        return [(slug, key) for slug, key in self.store.keys(files=files) if self._is_here(slug, key)] if files else []

    def _is_here(self, slug: str, key: Key) -> bool:
        entry = self.store.find(key, slug)
        if isinstance(entry, NoBaseline) or rank_in(key.name) != self.rank:
            return False
        if entry.named_device not in self._slugs:
            self._slugs[entry.named_device] = self.slug_of(entry.named_device)
        return slug == self._slugs[entry.named_device]
