"""Recordings of a GPU's allocator statistics, and a `CudaRuntime` that plays them back where there is no GPU.

A recording holds a workload of named moments ("forward", "matmul", ...). For each it holds the statistics right after it
ran, after the backend's workspaces were cleared, and after the allocator's cache was emptied, so that a `CudaDevice` can
be led through them in any way that it likes to read. Beside them stand the bytes that the workload was written to hold.
"""

from __future__ import annotations

import gc
import json
import weakref
from dataclasses import asdict, dataclass
from typing import TYPE_CHECKING, Any

from pytest_gpumem.devices.cuda import CudaDevice
from pytest_gpumem.devices.cuda_runtime import GpuProperties
from tests.silent_cuda import SilentCuda

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping, Sequence

    import torch

    from pytest_gpumem.devices.cuda_runtime import CudaRuntime

FORMAT = 1
COUNTERS = ("requested_bytes.all", "allocated_bytes.all", "reserved_bytes.all")
"""The statistics that `CudaDevice` reads, each as ``.current``, ``.peak`` and ``.allocated`` (in all, since ever)."""

Reading = dict[str, int]
Held = dict[str, object]


@dataclass(frozen=True)
class Action:
    """A moment of a workload. ``held`` and ``peak`` are bytes of its tensors, by hand, over what was held when it began.

    ``peak`` is ``None`` where a library takes workspaces of its own.
    """

    name: str
    run: Callable[[CudaRuntime, Held], None]
    held: int
    peak: int | None


@dataclass(frozen=True)
class Moment:
    """What an action did to the statistics. Peaks count from its beginning, and so does ``turnover``: bytes by counter."""

    name: str
    held: int
    peak: int | None
    turnover: Reading
    after: Reading
    cleared: Reading
    emptied: Reading


@dataclass(frozen=True)
class Recording:
    """The moments of a workload on one GPU, and the statistics before the first."""

    device: str
    details: dict[str, str | int]
    start: Reading
    moments: tuple[Moment, ...]

    def to_json(self) -> str:
        return json.dumps({"format": FORMAT, **asdict(self)}, indent=2) + "\n"

    @classmethod
    def from_json(cls, text: str) -> Recording:
        """The recording that `to_json` wrote. Raises ``ValueError`` for another format."""
        document: dict[str, Any] = json.loads(text)
        if document.pop("format", None) != FORMAT:
            raise ValueError(f"not a recording of format {FORMAT}; record it again")
        moments = tuple(Moment(**moment) for moment in document.pop("moments"))
        return cls(moments=moments, **document)


def record(
    runtime: CudaRuntime, workload: Sequence[Action], device: str, details: Mapping[str, str | int]
) -> Recording:
    """Run ``workload`` and read the statistics of ``runtime`` around each of its actions."""
    held: Held = {}
    gc.collect()
    runtime.clear_workspaces()
    start = _emptied(runtime)
    moments = []
    for action in workload:
        runtime.reset_peaks()
        before = _read(runtime, "allocated")
        action.run(runtime, held)
        turnover = {counter: nbytes - before[counter] for counter, nbytes in _read(runtime, "allocated").items()}
        after = _reading(runtime)
        runtime.clear_workspaces()
        cleared = _reading(runtime)
        moments.append(Moment(action.name, action.held, action.peak, turnover, after, cleared, _emptied(runtime)))
    return Recording(device, dict(details), start, tuple(moments))


def _emptied(runtime: CudaRuntime) -> Reading:
    runtime.empty_cache()
    runtime.synchronize()
    return _reading(runtime)


def _reading(runtime: CudaRuntime) -> Reading:
    return {
        f"{counter}.{which}": nbytes
        for which in ("current", "peak")
        for counter, nbytes in _read(runtime, which).items()
    }


def _read(runtime: CudaRuntime, which: str) -> Reading:
    statistics = runtime.statistics()
    return {counter: statistics[f"{counter}.{which}"] for counter in COUNTERS if f"{counter}.{which}" in statistics}


class ReplayedCuda(SilentCuda):
    """A `CudaRuntime` whose statistics are those of a recording. `play` makes a moment happen."""

    def __init__(self, recording: Recording) -> None:
        self._recording = recording
        self._moments = {moment.name: moment for moment in recording.moments}
        self._now = _currents(recording.start)
        self._peaks = dict(self._now)
        self._turnover = dict.fromkeys(self._now, 0)
        self._playing: Moment | None = None
        self._is_cleared = True
        self._probes = 0

    def play(self, name: str) -> None:
        """The moment called ``name`` happens now."""
        moment = self._moments[name]
        self._playing, self._is_cleared = moment, False
        self._now = _currents(moment.after)
        for counter in self._peaks:
            self._peaks[counter] = max(self._peaks[counter], moment.after[f"{counter}.peak"] + self._probes)
            self._turnover[counter] += moment.turnover[counter]

    def torch_device(self) -> torch.device:
        import torch

        return torch.device("cuda", 0)

    def properties(self) -> GpuProperties:
        details = self._recording.details
        return GpuProperties(
            self._recording.device,
            int(details["total_memory"]),
            str(details["driver"]),
            uuid="a recording",
            capability=(9, 0),
        )

    def statistics(self) -> dict[str, int]:
        current = {counter: nbytes + self._probes for counter, nbytes in self._now.items()}
        return {
            f"{counter}.{which}": nbytes
            for which, values in (("current", current), ("peak", self._peaks), ("allocated", self._turnover))
            for counter, nbytes in values.items()
        }

    def reset_peaks(self) -> None:
        self._peaks = {counter: nbytes + self._probes for counter, nbytes in self._now.items()}

    def clear_workspaces(self) -> None:
        if self._playing is not None:
            self._now = _currents(self._playing.cleared)
            self._is_cleared = True

    def empty_cache(self) -> None:
        # What an empty cache leaves was only read once the workspaces were gone.
        if self._playing is not None and self._is_cleared:
            self._now = _currents(self._playing.emptied)

    def allocate(self, nbytes: int) -> object:
        block = _Block()
        self._probe(nbytes)
        weakref.finalize(block, self._probe, -nbytes)
        return block

    def laps(self, runs: Sequence[Callable[[], object]]) -> list[float]:
        for run in runs:
            run()
        return [0.0] * len(runs)

    def _probe(self, nbytes: int) -> None:
        self._probes += nbytes
        for counter, now in self._now.items():
            self._turnover[counter] += max(nbytes, 0)
            self._peaks[counter] = max(self._peaks[counter], now + self._probes)


class _Block:
    """Stands for memory that was allocated during the replay."""


def _currents(reading: Reading) -> Reading:
    return {counter: reading[f"{counter}.current"] for counter in COUNTERS if f"{counter}.current" in reading}


@dataclass(frozen=True)
class Seen:
    """What a `CudaDevice` made of a moment: bytes over what was live when it began; at the peak, and at its end."""

    name: str
    held: int
    peak: int


def seen_by_device(recording: Recording) -> list[Seen]:
    """Lead a `CudaDevice` through a recording, with a rest after each moment."""
    runtime = ReplayedCuda(recording)
    device = CudaDevice(runtime)
    device.open()
    try:
        seen = []
        for moment in recording.moments:
            device.quiesce()
            before = device.live()
            device.pop_peak()
            runtime.play(moment.name)
            peak = device.pop_peak().allocated - before
            device.release_workspaces()
            seen.append(Seen(moment.name, device.live() - before, peak))
        return seen
    finally:
        device.close()


# The workload. A training step in miniature, with sizes that no allocator rounds to themselves.

PARAMETERS = 4_000_004
ACTIVATIONS = 10_000_001
TEMPORARY = 3_000_001
SIDE = 1024


def _parameters(runtime: CudaRuntime, held: Held) -> None:
    held["parameters"] = runtime.allocate(PARAMETERS)


def _forward(runtime: CudaRuntime, held: Held) -> None:
    held["activations"] = runtime.allocate(ACTIVATIONS)
    runtime.allocate(TEMPORARY)


def _backward(runtime: CudaRuntime, held: Held) -> None:
    held["gradients"] = runtime.allocate(PARAMETERS)
    runtime.allocate(TEMPORARY)
    del held["activations"]


def _optimizer(runtime: CudaRuntime, held: Held) -> None:
    runtime.allocate(PARAMETERS)
    del held["gradients"]


def _matmul(runtime: CudaRuntime, held: Held) -> None:
    import torch

    matrix = torch.ones(SIDE, SIDE, device=runtime.torch_device())
    held["product"] = matrix @ matrix


def _drop(name: str) -> Callable[[CudaRuntime, Held], None]:
    def drop(runtime: CudaRuntime, held: Held) -> None:
        del held[name]

    return drop


STEP = ("forward", "backward", "optimizer")
"""The moments after which everything is as before: they may be played again and again."""

TENSORS = (
    Action("parameters", _parameters, held=PARAMETERS, peak=PARAMETERS),
    Action("forward", _forward, held=ACTIVATIONS, peak=ACTIVATIONS + TEMPORARY),
    Action("backward", _backward, held=PARAMETERS - ACTIVATIONS, peak=PARAMETERS + TEMPORARY),
    Action("optimizer", _optimizer, held=-PARAMETERS, peak=PARAMETERS),
)
MATMUL = (
    Action("matmul", _matmul, held=SIDE * SIDE * 4, peak=None),
    Action("no more product", _drop("product"), held=-SIDE * SIDE * 4, peak=0),
)
END = (Action("no more parameters", _drop("parameters"), held=-PARAMETERS, peak=0),)
WORKLOAD = (*TENSORS, *MATMUL, *END)
