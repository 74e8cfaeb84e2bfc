"""Sharing of a GPU among measured tests (``--gpumem-pack``): by their known peaks, the largest first."""

from __future__ import annotations

from collections import Counter
from dataclasses import dataclass
from typing import TYPE_CHECKING, Literal

from pytest_gpumem.devices.contract import DeviceUnavailable
from pytest_gpumem.gate.baseline import Baseline
from pytest_gpumem.metrics import METRICS
from pytest_gpumem.runtest.hook_results import environment_of
from pytest_gpumem.units import counted
from pytest_gpumem.values.option_words import EMULATED_SLUG

if TYPE_CHECKING:
    from collections.abc import Iterable, Mapping, Sequence

    import pytest

    from pytest_gpumem.baselines.store import Store
    from pytest_gpumem.config.selection import MeasuredTest
    from pytest_gpumem.config.settings import Settings
    from pytest_gpumem.devices.contract import Device
    from pytest_gpumem.devices.memory_ledger import SharedMemory
    from pytest_gpumem.devices.registry import Devices
    from pytest_gpumem.gate.baseline import Budget

WhyAlone = Literal["timed", "of unknown peak"]
"""The reason why a test has the whole GPU."""


@dataclass(frozen=True, slots=True)
class GpuShare:
    """A test's part of a GPU: ``wanted`` bytes beside what its process holds, or all of it, and ``alone`` says why."""

    memory: SharedMemory
    wanted: int | None
    alone: WhyAlone | None = None
    most: int | None = None
    """The most bytes that it takes of any GPU that has baselines, by which tests are ordered: alike in all workers."""


@dataclass(frozen=True, slots=True)
class Packed:
    """Figures of packing for a session's reports. The same in each worker, but for ``repeated``."""

    sharing: int = 0
    alone: tuple[tuple[WhyAlone, str], ...] = ()
    """The tests that had the whole GPU, and why."""
    repeated: frozenset[str] = frozenset()
    """The tests that ran out of what was reserved, and ran once more with the whole GPU."""
    not_shared: frozenset[str] = frozenset()
    """Clauses that say why nothing is shared on a device."""

    def merged(self, other: Packed) -> Packed:
        """Return what two workers of one session say together."""
        return Packed(
            max(self.sharing, other.sharing),
            self.alone or other.alone,
            self.repeated | other.repeated,
            self.not_shared | other.not_shared,
        )

    def line(self) -> str:
        """Return what a report says."""
        parts = [f"{counted(self.sharing, 'measured test')} shared the GPU by known peaks"]
        if self.alone:
            reasons = ", ".join(f"{count} {why}" for why, count in Counter(why for why, _ in self.alone).items())
            parts.append(f"{len(self.alone)} had it alone ({reasons}; the first is {self.alone[0][1]})")
        if self.repeated:
            tests = ", ".join(sorted(self.repeated))
            parts.append(f"{len(self.repeated)} ran once more with all of it, having needed more than known: {tests}")
        if not self.sharing and not self.alone:
            parts = []
        return f"packing: {'; '.join([*parts, *sorted(self.not_shared)]) or 'no measured test'}"


NOT_AMONG_RANKS = Packed(not_shared=frozenset({"ranks share no GPU, as torchrun gives each its own"}))
"""The result for a session of one rank."""


def wanted_bytes(budget: Budget, stored: Iterable[Baseline]) -> int | None:
    """Return the bytes that a test takes of a GPU by what is known of it; ``None`` where its peak is not known.

    The largest of its baselines, else its budget: of what the allocator reserves (``peak_reserved``, ``max_reserved``), or
    where only that is known of what tensors hold; and the tolerance of ``peak_reserved`` on top, 2 % and at least two segments
    of 20 MiB, by which that varies at equal bytes (`METRICS`).
    """
    known = [_peak(entry.metrics) for entry in stored] or [_peak(budget.limits)]
    peaks = [peak for peak in known if peak is not None]
    if len(peaks) < len(known):
        return None
    tolerance = METRICS["peak_reserved"].tolerance
    assert tolerance is not None, "it is judged"
    return max(round(peak + tolerance.allowed(peak)) for peak in peaks)


def _peak(bytes_by_metric: Mapping[str, float]) -> float | None:
    return bytes_by_metric.get("peak_reserved", bytes_by_metric.get("peak_allocated"))


def largest_first(items: Sequence[pytest.Item], shares: Mapping[pytest.Item, GpuShare]) -> list[pytest.Item]:
    """Return the tests that share in order of what they take at most, then those that need none, then those that take all.

    Workers may have GPUs of several models, and pytest-xdist needs one order: what this worker's GPU would say is not asked.
    """

    def place(item: pytest.Item) -> tuple[int, int]:
        share = shares.get(item)
        if share is None:
            return 1, 0
        return (2, 0) if share.most is None else (0, -share.most)

    return sorted(items, key=place)


class Planner:
    """Finder of each measured test's part of its GPU. Raises what reading the store raises, and ``OSError``."""

    def __init__(self, config: pytest.Config, settings: Settings, devices: Devices, store: Store) -> None:
        self._config = config
        self._settings = settings
        self._devices = devices
        self._store = store
        self._slugs: dict[str, str] = {}
        self._known: dict[tuple[str, str], list[Baseline]] | None = None
        self.not_shared: set[str] = set()

    def shares(self, measured: Mapping[pytest.Item, MeasuredTest]) -> dict[pytest.Item, GpuShare]:
        """Return the shares of the tests whose devices are shared, on which this process is entered from now on."""
        found = {}
        for item, one in measured.items():
            try:
                device = self._devices.get(one.budget.device or self._settings.device)
            except DeviceUnavailable:
                continue  # the test will say so
            if device.shared_memory is None:
                self.not_shared.add(_why_not_shared(device))
                continue
            if device.name not in self._slugs:
                device.shared_memory.ledger.enter(device.shared_memory.now().held)
                self._slugs[device.name] = environment_of(device, self._config).slug
            found[item] = self._share(one, device, device.shared_memory)
        return found

    def _share(self, one: MeasuredTest, device: Device, memory: SharedMemory) -> GpuShare:
        if one.has_fixture and device.tells_time and self._settings.time is not False:
            return GpuShare(memory, None, "timed")
        slug = self._settings.compared_slug(self._slugs[device.name])
        found = (self._store.find(one.key(name), slug) for name in self._store.names(slug, one.file, one.test))
        wanted = wanted_bytes(one.budget, [entry for entry in found if isinstance(entry, Baseline)])
        return GpuShare(memory, wanted, "of unknown peak" if wanted is None else None, self._most(one))

    def _most(self, one: MeasuredTest) -> int | None:
        """Return the bytes that a test takes at most, by its baselines on any device that tell a peak, else by its budget."""
        if self._known is None:
            self._known = {}
            listed = self._store.keys()
            for slug, key in listed:
                entry = self._store.find(key, slug)
                if isinstance(entry, Baseline) and _peak(entry.metrics) is not None:
                    self._known.setdefault((key.file, key.test), []).append(entry)
        return wanted_bytes(one.budget, self._known.get((one.file, one.test), []))


def _why_not_shared(device: Device) -> str:
    if device.environment().slug.startswith(EMULATED_SLUG):
        return "an emulated GPU is each process's own without pytest-xdist: add -n 8, say"
    return f"the {device.name} device has no memory that tests would have to share"
