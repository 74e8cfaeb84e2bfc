"""The cases of the table of truth, and what a case measures."""

from __future__ import annotations

from contextlib import contextmanager
from dataclasses import dataclass
from fnmatch import fnmatchcase
from typing import TYPE_CHECKING, Any

import torch
from truth_models import Subject, subjects

from pytest_gpumem.devices.contract import CannotRun
from pytest_gpumem.steps.config import ConfigError, StepConfig, combinations
from pytest_gpumem.steps.prepared import MeasuringContext
from pytest_gpumem.steps.training import prepared_train_step
from pytest_gpumem.timing.sampling import TimeBudget
from pytest_gpumem.torch_support.garbage_collector import FrozenHeap, cyclic_collector_off

if TYPE_CHECKING:
    from collections.abc import Iterator, Sequence

    from counters import Bytes, Counters

    from pytest_gpumem.devices.contract import Device
    from pytest_gpumem.steps.reading import Phase

AXES = {
    "precision": ("fp32", "amp-bf16", "amp-fp16", "bf16"),
    "checkpoint": ("none", "blocks", "ops"),
    "optimizer": ("sgd", "adamw-foreach", "adamw-fused"),
}
SEED = 0
PHASES = ("forward", "backward", "optimizer")


@dataclass(frozen=True, slots=True)
class Case:
    """A model that takes a training step under a config."""

    model: str
    subject: Subject
    config: StepConfig

    @property
    def name(self) -> str:
        """``"gpt2-small/amp-bf16-ckpt-blocks-adamw-fused"``."""
        return f"{self.model}/{self.config.id}"


def cases(size: str, patterns: Sequence[str] = ()) -> list[Case]:
    """The cases of a size, or those whose name has one of the ``patterns`` in it (``*`` and ``?`` as in a shell)."""
    made = [Case(model, subject, config) for model, subject in subjects(size).items() for config in combinations(AXES)]
    return [
        case for case in made if not patterns or any(fnmatchcase(case.name, f"*{pattern}*") for pattern in patterns)
    ]


def result_of(case: Case, device: Device, counters: Counters) -> dict[str, Any]:
    """What the case gave: its figures, or under ``cannot_run`` or ``failed`` why there are none."""
    head = {"model": case.model, "config": str(case.config)}
    try:
        return head | figures_of(case, device, counters)
    except (CannotRun, ConfigError) as error:
        return head | {"cannot_run": str(error)}
    except Exception as error:  # noqa: BLE001 - the others are to run whatever becomes of this one
        if is_out_of_memory(error):
            # Who held the rest of the GPU is another each time.
            return head | {"cannot_run": _first_line(error).partition(" GPU ")[0]}
        return head | {"failed": f"{type(error).__name__}: {_first_line(error)}"}


def figures_of(case: Case, device: Device, counters: Counters) -> dict[str, Any]:
    """Settle the step, time it, and read the counters over one more, which begins with an empty cache.

    Bytes count from what was there before the case. Times are seconds.
    """
    device.quiesce()
    torch.manual_seed(SEED)
    before = counters.current()
    bench = MeasuringContext(device, TimeBudget())
    with (
        _collections_made_short(),
        prepared_train_step(bench, case.subject.build, case.subject.batch, config=case.config) as prepared,
    ):
        step = prepared.measure()
        figures, workload = step.figures, step.workload
        assert figures.times is not None, "the bench times"
        rest = counters.current()
        peaks = peaks_of(prepared.phases, counters)
        notes = list(step.notes)
    return {
        "batch": workload.batch,
        "parameters": workload.parameters,
        "settled": figures.settled,
        "notes": notes,
        "step_time": round(figures.times.median, 6),
        "step_times": [round(seconds, 6) for seconds in figures.times.rounds],
        "peaks": {"rest": _over(before, rest)} | {phase: _over(before, peak) for phase, peak in peaks.items()},
    }


def peaks_of(phases: Sequence[Phase], counters: Counters) -> dict[str, Bytes]:
    """Run a step. The peaks of each of its phases, which are begun anew at every border."""
    peaks: dict[str, Bytes] = {}
    with cyclic_collector_off():
        counters.take_peaks()
        for phase in phases:
            phase.run()
            peak, seen = counters.take_peaks(), peaks.get(phase.name, {})
            peaks[phase.name] = {name: max(size, seen.get(name, size)) for name, size in peak.items()}
    return peaks


def is_out_of_memory(error: Exception) -> bool:
    """Of a GPU, or of the host, for which torch has no class of its own."""
    return isinstance(error, (torch.OutOfMemoryError, MemoryError)) or "can't allocate memory" in str(error)


@contextmanager
def _collections_made_short() -> Iterator[None]:
    """Every step ends with a collection, which would look at all that transformers imports: more work than the step."""
    heap = FrozenHeap()
    heap.freeze()
    try:
        yield
    finally:
        heap.thaw()


def _first_line(error: Exception) -> str:
    return str(error).strip().partition("\n")[0]


def _over(before: Bytes, reading: Bytes) -> Bytes:
    return {name: size - before[name] for name, size in reading.items()}
