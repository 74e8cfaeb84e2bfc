"""The baselines for a session: those of its own device, and those of devices named by markers."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import TYPE_CHECKING

from pytest_gpumem.gate.baseline import NoBaseline
from pytest_gpumem.values.rank import rank_in

if TYPE_CHECKING:
    from collections.abc import Callable, Collection

    from pytest_gpumem.baselines.store import Store
    from pytest_gpumem.gate.baseline import Key
    from pytest_gpumem.values.rank import Rank


@dataclass(eq=False, repr=False)
class StoreHere:
    """The baselines for a session, in a store with those of many devices.

    If a marker named a device when a baseline was recorded, that device decides; otherwise the device of the session does.
    For example, a session on the CPU looks at ``cpu-x86_64``, and for a test marked with ``device="cuda"`` at ``nvidia-h100``.
    """

    store: Store
    rank: Rank | None
    """The rank of this process. Other ranks, and jobs of another size, have their own baselines."""
    slug_of: Callable[[str | None], str | None]
    """Returns the slug of a device (``None`` stands for that of the session), or ``None`` if the device is not available.
    It may load torch, so it is called only if there are baselines."""
    _slugs: dict[str | None, str | None] = field(default_factory=dict, init=False)

    def files(self) -> set[str]:
        """Return the test files that have baselines on any device."""
        return self.store.files()

    def keys(self, files: Collection[str]) -> list[tuple[str, Key]]:
        """Return the baselines of test ``files``, as (slug, key), sorted."""
        return [(slug, key) for slug, key in self.store.keys(files=files) if self._is_here(slug, key)] if files else []

    def _is_here(self, slug: str, key: Key) -> bool:
        entry = self.store.find(key, slug)
        if isinstance(entry, NoBaseline) or rank_in(key.name) != self.rank:
            return False
        if entry.named_device not in self._slugs:
            self._slugs[entry.named_device] = self.slug_of(entry.named_device)
        return slug == self._slugs[entry.named_device]
