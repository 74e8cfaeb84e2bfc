"""The contract of a device: what measuring needs to know of the place where a step runs."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Protocol

if TYPE_CHECKING:
    from contextlib import AbstractContextManager
    from pathlib import Path

    import torch

    from pytest_gpumem.measurement import Environment
    from pytest_gpumem.values.events import Token
    from pytest_gpumem.values.interference import Conditions

Blocks = Mapping[int, int]
"""Memory blocks: address -> bytes."""


Known = frozenset[tuple[int, int]]
"""Blocks that a device knew at some moment, by address and number: another block at the same address is another one."""


class DeviceUnavailable(Exception):
    """This device cannot be used here; the message is a clause that says why ("no CUDA device: ...")."""


class CannotRun(Exception):
    """This device cannot run a step as its config wants it; the message is a clause that says why."""


@dataclass(frozen=True, slots=True)
class Peak:
    """The most bytes live at once, in the device's own counting: only differences of two readings mean anything."""

    allocated: int
    reserved: int | None = None
    """``None`` where the device has no such thing."""


class Device(Protocol):
    """A device as measuring sees it.

    Readings (`live`, `pop_peak`) count bytes from a zero of the device's own choosing, so only differences between
    readings of one `open` ... `close` stretch are meaningful. Readings taken outside of one raise ``RuntimeError``.
    """

    name: str
    """The word of ``--gpumem-device``."""

    @property
    def torch_device(self) -> torch.device:
        """Where tensors go."""

    def environment(self) -> Environment:
        """What this device is, with the versions that its figures depend on."""

    def lacks(self, feature: str) -> str | None:
        """Why no step can use ``feature`` here, as a clause; ``None`` when it can.

        A precision (``"tf32"``), a kind of checkpointing (``"offload"``), a mode of torch.compile (``"max-autotune"``), or
        ``"values"``: that tensors are computed at all.
        """

    def random_devices(self) -> Sequence[int]:
        """Indices of the accelerators that have random numbers of their own (``torch.random.fork_rng``)."""

    @property
    def tells_time(self) -> bool:
        """Whether seconds on this device mean something."""

    def lost(self) -> str | None:
        """Why what was read since the last call of this (or `open`) means nothing, as a clause; ``None`` where it is good."""

    def libraries(self) -> Mapping[str, str]:
        """Releases of the libraries by which what ran since `forget_libraries` (or `open`) has the figures that it has.

        Details of its environment, beside those of `environment`, which are the same whatever runs.
        """

    def forget_libraries(self) -> None:
        """Something else is measured from here on."""

    def open(self) -> None:
        """Begin to count. Raises `DeviceUnavailable` when the device turns out not to count what is allocated."""

    def close(self) -> None:
        """Stop counting and give back what `open` took. Closing twice does nothing."""

    def quiesce(self) -> None:
        """Bring memory to rest: collect garbage, drop the backend's caches and workspaces, wait for the device."""

    def release_workspaces(self) -> None:
        """Drop what the backend keeps for itself between operations, which is nobody's leak."""

    def live(self) -> int:
        """Bytes live now."""

    def reserved(self) -> int | None:
        """Bytes that the allocator holds from the device now; ``None`` where there is no such thing."""

    def pop_peak(self) -> Peak:
        """The peak since the last call of this (or `open`), and start the next one from what is live now."""

    def turnover(self) -> int:
        """Bytes allocated until the latest reading, whether freed or not: only differences mean anything."""

    def register_existing(self, storages: Iterable[torch.UntypedStorage]) -> None:
        """Learn of storages that were allocated before `open`, so that their being freed is noticed."""

    def known(self) -> Known:
        """The blocks that the device knows one by one; empty where it only knows sums."""

    def blocks(self) -> Blocks:
        """The live blocks that the device knows one by one; empty where it only knows sums."""

    def recorded(self, tokens: list[Token]) -> AbstractContextManager[None]:
        """A stretch whose allocations are told with what they happened in: ``tokens`` is filled when it ends.

        Readings are not possible within. Raises `MeasuringError` when the recording was cut short.
        """

    def keep_snapshot(self, path: Path) -> None:
        """Write what the allocator itself recorded in the latest `recorded` stretch, where it does. Raises ``OSError``."""

    def unrecorded(self) -> AbstractContextManager[None]:
        """A stretch in which nothing is recorded or slowed down, for taking times.

        Allocations and frees may go unnoticed in it; `reconcile` sets that right.
        """

    def reconcile(self, since: Known, storages: Iterable[torch.UntypedStorage]) -> None:
        """Of the blocks that are not in ``since`` (what was `known` at some moment) only those of ``storages`` still live."""

    def time(self, run: Callable[[], object]) -> float:
        """Seconds that the device needed for ``run``."""

    def laps(self, runs: Sequence[Callable[[], object]]) -> list[float]:
        """Seconds that the device needed for each of ``runs``, one after another and without waiting in between."""

    def launches(self, run: Callable[[], object]) -> Mapping[str, int] | None:
        """Run it and count the kernels that the host launched, by name; ``None``, and not run, where there are none."""

    def conditions(self) -> Conditions:
        """What may disturb a timed stretch, as it is now; cheap enough to be read between two rounds.

        For the calling thread: the two readings of a stretch must be its own.
        """

    def pace(self) -> float | None:
        """The rate of the clock that steps run by now, so that seconds times pace is a step's time in its cycles.

        On CUDA the SM clock in Hz: to be read right after a round's end, before the GPU has come to rest. On the CPU runs
        per second of a fixed piece of work, which is run for it, within `unrecorded`. ``None`` where nobody can tell.
        """

    @property
    def seconds_between_readings(self) -> float:
        """How far apart pace and conditions are to be read: as far as that would show in the steps that come next."""

    def alone(self) -> AbstractContextManager[str | None]:
        """A stretch in which no measured test of another process of this user runs on this device, for taking times.

        Yields ``None``, or a clause that says why it could not be had: the stretch runs all the same. Between `open` and
        `close` the device is shared with others, and never while one of them is alone. May be nested.
        """
