"""Plan which measured tests run on a GPU at the same time (``--gpumem-pack``). Tests with the largest known peaks run
first.

For example, on an 80 GB GPU four workers run tests with peaks of 30, 30, 12 and 8 GB at the same time. The next test, with
a peak of 40 GB, waits until enough memory is free.
"""

from __future__ import annotations

from collections import Counter
from dataclasses import dataclass
from typing import TYPE_CHECKING, Literal

from pytest_gpumem.base.errors import DeviceUnavailable
from pytest_gpumem.base.units import counted
from pytest_gpumem.facts.metrics import METRICS
from pytest_gpumem.facts.values.option_words import EMULATED_SLUG
from pytest_gpumem.judging.gate.baseline import Baseline
from pytest_gpumem.plugin.runtest.hook_results import environment_of

if TYPE_CHECKING:
    from collections.abc import Iterable, Mapping, Sequence

    import pytest

    from pytest_gpumem.judging.baselines.store import Store
    from pytest_gpumem.judging.gate.baseline import Budget
    from pytest_gpumem.measuring.devices.contract import Device
    from pytest_gpumem.measuring.devices.memory_ledger import SharedMemory
    from pytest_gpumem.measuring.devices.registry import Devices
    from pytest_gpumem.plugin.config.selection import MeasuredTest
    from pytest_gpumem.plugin.config.settings import Settings

WhyAlone = Literal["timed", "with unknown peak"]
"""The reason why a test needs the whole GPU for itself."""


@dataclass(frozen=True, slots=True)
class GpuShare:
    """A test's part of a GPU's memory."""

    memory: SharedMemory
    needed: int | None
    """The bytes that the test needs in addition to the memory of its process; ``None`` if it needs the whole GPU."""
    why_alone: WhyAlone | None = None
    """The reason why the test needs the whole GPU; ``None`` if the test shares the GPU."""
    largest_need: int | None = None
    """The largest need of the test, in bytes, on any GPU with baselines. All workers sort the tests by this number, so they
    have the same order."""


@dataclass(frozen=True, slots=True)
class Packed:
    """The sharing of GPUs among a session's tests. All workers report the same figures, except for ``repeated``."""

    sharing: int = 0
    """The number of tests that share a GPU."""
    alone: tuple[tuple[WhyAlone, str], ...] = ()
    """The tests that get a whole GPU, each with the reason."""
    repeated: frozenset[str] = frozenset()
    """The tests which exceeded their reserved memory, so they ran again with the whole GPU."""
    not_shared: frozenset[str] = frozenset()
    """The reasons why tests could not share a device, as clauses."""

    def merged(self, other: Packed) -> Packed:
        """Combine the figures from two workers in the same session."""
        return Packed(
            max(self.sharing, other.sharing),
            self.alone or other.alone,
            self.repeated | other.repeated,
            self.not_shared | other.not_shared,
        )

    def line(self) -> str:
        """Return the line about packing for a report.

        For example, ``packing: 12 measured tests shared the GPU; 1 had the whole GPU (1 timed; the first is
        test_it.py::test_speed)``.
        """
        parts = [f"{counted(self.sharing, 'measured test')} shared the GPU"]
        if self.alone:
            reasons = ", ".join(f"{count} {why}" for why, count in Counter(why for why, _ in self.alone).items())
            parts.append(f"{len(self.alone)} had the whole GPU ({reasons}; the first is {self.alone[0][1]})")
        if self.repeated:
            tests = ", ".join(sorted(self.repeated))
            parts.append(
                f"{len(self.repeated)} ran again with the whole GPU, because they exceeded their known peak: {tests}"
            )
        if not self.sharing and not self.alone:
            parts = []
        return f"packing: {'; '.join([*parts, *sorted(self.not_shared)]) or 'no measured test'}"


NOT_AMONG_RANKS = Packed(not_shared=frozenset({"ranks share no GPU, because torchrun gives each rank its own"}))
"""The figures for a session under torchrun, in which nothing is packed."""


def needed_bytes(budget: Budget, stored: Iterable[Baseline]) -> int | None:
    """Return the bytes needed by a test on a GPU; ``None`` if its peak is not known.

    The known peak is the largest peak in the test's baselines, or the budget's limit if there are no baselines. A peak of
    reserved bytes (``peak_reserved``, ``max_reserved``) is preferred to a peak of allocated bytes. The tolerance of
    ``peak_reserved``, 2 % or at least 40 MiB, is added, because reserved bytes vary by this amount although the same bytes
    are allocated (`METRICS`).

    Example:
        A test whose baseline has 4 GB of ``peak_reserved`` needs 4.08 GB. A test with 100 MiB needs 140 MiB.
    """
    known_peaks = [_peak(entry.metrics) for entry in stored] or [_peak(budget.limits)]
    peaks = [peak for peak in known_peaks if peak is not None]
    if len(peaks) < len(known_peaks):
        return None
    tolerance = METRICS["peak_reserved"].tolerance
    assert tolerance is not None, "peak_reserved is judged"
    return max(round(peak + tolerance.allowed(peak)) for peak in peaks)


def _peak(bytes_by_metric: Mapping[str, float]) -> float | None:
    return bytes_by_metric.get("peak_reserved", bytes_by_metric.get("peak_allocated"))


def largest_first(items: Sequence[pytest.Item], shares: Mapping[pytest.Item, GpuShare]) -> list[pytest.Item]:
    """Sort the tests into the order in which they should run.

    Tests on a shared GPU come first, ordered by ``largest_need``. Tests without a GPU follow, and tests with a whole GPU
    come last. pytest-xdist requires the same order in all workers, but workers may have different GPUs. So the order does
    not depend on this worker's GPU.
    """

    def place(item: pytest.Item) -> tuple[int, int]:
        share = shares.get(item)
        if share is None:
            return 1, 0
        return (2, 0) if share.largest_need is None else (0, -share.largest_need)

    return sorted(items, key=place)


class Planner:
    """Finds a `GpuShare` for each measured test.

    The methods raise `StoreError` or `BackendError` if the store cannot be read, and ``OSError`` if the GPU's ledger (the
    file with all processes' reservations) cannot be used.
    """

    def __init__(self, config: pytest.Config, settings: Settings, devices: Devices, store: Store) -> None:
        self._config = config
        self._settings = settings
        self._devices = devices
        self._store = store
        self._slugs: dict[str, str] = {}
        self._stored_peaks: dict[tuple[str, str], list[Baseline]] | None = None
        self.not_shared: set[str] = set()

    def shares(self, measured: Mapping[pytest.Item, MeasuredTest]) -> dict[pytest.Item, GpuShare]:
        """Return a `GpuShare` for each test on a device with shared memory, and enter this process in the device's ledger."""
        shares = {}
        for item, test in measured.items():
            try:
                device = self._devices.get(test.budget.device or self._settings.device)
            except DeviceUnavailable:
                continue  # The test itself reports later that its device is not available.
            if device.shared_memory is None:
                self.not_shared.add(_why_not_shared(device))
                continue
            if device.name not in self._slugs:
                device.shared_memory.ledger.enter(device.shared_memory.now().held)
                self._slugs[device.name] = environment_of(device, self._config).slug
            shares[item] = self._share(test, device, device.shared_memory)
        return shares

    def _share(self, test: MeasuredTest, device: Device, memory: SharedMemory) -> GpuShare:
        if test.has_fixture and device.tells_time and self._settings.time is not False:
            return GpuShare(memory, None, "timed")
        slug = self._settings.compared_slug(self._slugs[device.name])
        entries = (self._store.find(test.key(name), slug) for name in self._store.names(slug, test.file, test.test))
        needed = needed_bytes(test.budget, [entry for entry in entries if isinstance(entry, Baseline)])
        return GpuShare(memory, needed, "with unknown peak" if needed is None else None, self._largest_need(test))

    def _largest_need(self, test: MeasuredTest) -> int | None:
        """Return a test's largest need in bytes, from its baselines on any device, or otherwise from its budget."""
        if self._stored_peaks is None:
            self._stored_peaks = {}
            keys = self._store.keys()
            for slug, key in keys:
                entry = self._store.find(key, slug)
                if isinstance(entry, Baseline) and _peak(entry.metrics) is not None:
                    self._stored_peaks.setdefault((key.file, key.test), []).append(entry)
        return needed_bytes(test.budget, self._stored_peaks.get((test.file, test.test), []))


def _why_not_shared(device: Device) -> str:
    if device.environment().slug.startswith(EMULATED_SLUG):
        return "without pytest-xdist, each process has its own emulated GPU: add -n 8, for example"
    return f"tests on the {device.name} device do not share a GPU"
