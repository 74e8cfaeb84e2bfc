"""The table of truth: memory at the peak of each phase of a training step, and its time, by model and step config.

216 cases. Each is run until its step repeats, once more while the allocator's counters are read, and then timed.
A result is on the disk as soon as it is there; started again, the command goes on with the cases that are missing or failed.

- ``peaks`` are bytes over what was there before the case, by phase: ``forward``, ``backward``, ``optimizer`` (with
  ``zero_grad``), and ``rest``, what is held between steps. The step that they are read in begins with an empty cache; at every
  boundary of a phase the peaks are reset to what is in use.
- On CUDA they are four counters of ``torch.cuda.memory_stats()``, those of ``.all.peak``: ``requested`` (what tensors asked
  for), ``allocated`` (the same in rounded blocks), ``active`` (with freed blocks that wait for another stream) and ``reserved``
  (what the allocator holds from the driver). A CPU has one figure, what tensors hold; it is called ``allocated``.
- ``step_time`` is the median of ``step_times``, in seconds; with ``--seconds 0`` there are none. ``settled`` is false, with a
  note, where a step never repeated.
- A case that does not fit, or that the device lacks something for, has its reason under ``cannot_run``; one that broke, under
  ``failed``.
"""

from __future__ import annotations

import argparse
import itertools
import json
import math
import platform
import sys
import time
from contextlib import contextmanager
from dataclasses import dataclass
from fnmatch import fnmatchcase
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
from claims import print_table
from truth_models import SIZES, Subject, subjects

from pytest_gpumem.base.errors import CannotRun, ConfigError, DeviceUnavailable
from pytest_gpumem.base.units import format_bytes, format_seconds
from pytest_gpumem.measuring.devices.cuda_runtime import TorchCuda
from pytest_gpumem.measuring.devices.registry import AUTO, BUILT_IN, Devices
from pytest_gpumem.measuring.measure.context import MeasuringContext
from pytest_gpumem.measuring.measure.reading import run_phases
from pytest_gpumem.measuring.step_config.config import StepConfig, combinations
from pytest_gpumem.measuring.steps.model_source import ModelFactory
from pytest_gpumem.measuring.steps.train_step import prepared_train_step
from pytest_gpumem.measuring.timing.sampling import TimeBudget, time_step
from pytest_gpumem.torch_support.garbage_collector import FrozenHeap, cyclic_collector_off

if TYPE_CHECKING:
    from collections.abc import Iterator, Mapping, Sequence

    from pytest_gpumem.measuring.devices.contract import Device
    from pytest_gpumem.measuring.measure.reading import Phase

RESULTS = Path(__file__).parent / "results"
FILES = {"full": "truth.json", "small": "truth-small.json"}
FORMAT = 1
INTERRUPTED = 130
AXES = {
    "precision": ("fp32", "amp-bf16", "amp-fp16", "bf16"),
    "checkpoint": ("none", "blocks", "ops"),
    "optimizer": ("sgd", "adamw-foreach", "adamw-fused"),
}
PHASES = ("forward", "backward", "optimizer")
COUNTERS = ("allocated", "active", "requested", "reserved")
SEED = 0
Bytes = dict[str, int]
"""By counter. Only differences of two readings mean anything."""


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
    """Return the cases of a size, or those whose name has one of the ``patterns`` in it (``*`` and ``?`` as in a shell)."""
    made = [Case(model, subject, config) for model, subject in subjects(size).items() for config in combinations(AXES)]
    return [
        case for case in made if not patterns or any(fnmatchcase(case.name, f"*{pattern}*") for pattern in patterns)
    ]


class CudaCounters:
    """The statistics of ``torch.cuda.memory_stats()`` over all of its pools."""

    def __init__(self, runtime: TorchCuda) -> None:
        self._runtime = runtime

    def current(self) -> Bytes:
        """Return the bytes now."""
        return self._read("current")

    def take_peaks(self) -> Bytes:
        """Return the peaks since the last call of this; the next ones begin at what is there now."""
        peaks = self._read("peak")
        self._runtime.reset_peaks()
        return peaks

    def _read(self, which: str) -> Bytes:
        statistics = self._runtime.statistics()
        # Not every allocator that torch may be told to use keeps all of them.
        keys = {name: f"{name}_bytes.all.{which}" for name in COUNTERS}
        return {name: statistics[key] for name, key in keys.items() if key in statistics}


class DeviceCounters:
    """As `CudaCounters`, for a device without an allocator to ask."""

    def __init__(self, device: Device) -> None:
        self._device = device

    def current(self) -> Bytes:
        return {"allocated": self._device.live()}

    def take_peaks(self) -> Bytes:
        return {"allocated": self._device.pop_peak().allocated}


Counters = CudaCounters | DeviceCounters


def result_of(case: Case, device: Device, counters: Counters, seconds: float) -> dict[str, Any]:
    """Return the case's figures, or under ``cannot_run`` or ``failed`` why there are none."""
    head = {"model": case.model, "config": str(case.config)}
    try:
        return head | figures_of(case, device, counters, seconds)
    except (CannotRun, ConfigError) as error:
        return head | {"cannot_run": str(error)}
    except Exception as error:  # noqa: BLE001 - the others are to run whatever becomes of this one
        first_line = str(error).strip().partition("\n")[0]
        # Of a GPU, or of the host, for which torch has no class of its own.
        if isinstance(error, (torch.OutOfMemoryError, MemoryError)) or "can't allocate memory" in str(error):
            # Who held the rest of the GPU is another each time.
            return head | {"cannot_run": first_line.partition(" GPU ")[0]}
        return head | {"failed": f"{type(error).__name__}: {first_line}"}


def figures_of(case: Case, device: Device, counters: Counters, seconds: float) -> dict[str, Any]:
    """Settle the step, read the counters over one more, and time it for at most ``seconds``; not at all for 0."""
    device.quiesce()
    torch.manual_seed(SEED)
    before = counters.current()
    with (
        _collections_made_short(),
        prepared_train_step(
            MeasuringContext(device, None), ModelFactory(case.subject.build), case.subject.batch, config=case.config
        ) as prepared,
    ):
        step = prepared.measure()
        figures, workload = step.figures, step.workload
        rest = counters.current()
        peaks = {"rest": rest} | peaks_of(prepared.phases, counters)
        notes = list(step.notes)
        # Not before: how many steps it takes is chance, and which blocks the next one finds depends on them.
        times = times_of(prepared.phases, device, seconds) if seconds else {}
    return {
        "batch": workload.batch,
        "parameters": workload.parameters,
        "settled": figures.is_settled,
        "notes": notes,
        **times,
        "peaks": {
            phase: {name: size - before[name] for name, size in reading.items()} for phase, reading in peaks.items()
        },
    }


def times_of(phases: Sequence[Phase], device: Device, seconds: float) -> dict[str, Any]:
    """Run steps for at most about as many ``seconds``. Returns the times of its rounds and their median, in seconds."""
    with cyclic_collector_off():
        # A sample takes half of a budget.
        times = time_step(lambda: run_phases(phases), phases, device, TimeBudget(2 * seconds))
    return {"step_time": round(times.median, 6), "step_times": [round(one, 6) for one in times.rounds]}


def peaks_of(phases: Sequence[Phase], counters: Counters) -> dict[str, Bytes]:
    """Run a step. Returns the peaks of each of its phases, which are begun anew at every boundary."""
    peaks: dict[str, Bytes] = {}
    with cyclic_collector_off():
        counters.take_peaks()
        for phase in phases:
            phase.run()
            peak, seen = counters.take_peaks(), peaks.get(phase.name, {})
            peaks[phase.name] = {name: max(size, seen.get(name, size)) for name, size in peak.items()}
    return peaks


@contextmanager
def _collections_made_short() -> Iterator[None]:
    """Every step ends with a collection, which would look at all that transformers imports: more work than the step."""
    heap = FrozenHeap()
    heap.freeze()
    try:
        yield
    finally:
        heap.thaw()


class TruthFile:
    """Results by case, of one environment. Each is on the disk as soon as it is there.

    What another environment gave is not mixed in, and not lost: its file is kept beside this one as ``before``.
    """

    def __init__(self, path: Path, environment: Mapping[str, str | int]) -> None:
        self.path = path
        self.before: Path | None = None
        self._head = {"format": FORMAT, "environment": dict(environment)}
        self.cases: dict[str, dict[str, Any]] = {}
        if path.exists():
            document = json.loads(path.read_text(encoding="utf-8"))
            cases = document.pop("cases")
            if document == self._head:
                self.cases = cases
            else:
                names = (path.with_suffix(f".before-{number}.json") for number in itertools.count(1))
                self.before = next(name for name in names if not name.exists())

    def has(self, case: str) -> bool:
        """Tell whether the case has a result that another run would give, too. A failure is tried again."""
        return case in self.cases and "failed" not in self.cases[case]

    def put(self, case: str, result: dict[str, Any]) -> None:
        """Keep a result, and write the file: whole, or not at all."""
        self.cases[case] = result
        if self.before is not None and not self.before.exists():
            self.path.replace(self.before)
        self.path.parent.mkdir(parents=True, exist_ok=True)
        beside = self.path.with_suffix(".tmp")
        beside.write_text(_lines(self._head | {"cases": self.cases}) + "\n", encoding="utf-8")
        beside.replace(self.path)


def _lines(value: object, indent: str = "") -> str:
    """JSON with sorted keys, in which a mapping or list of plain values is one line."""
    if not isinstance(value, dict) or not any(isinstance(inner, (dict, list)) for inner in value.values()):
        return json.dumps(value, sort_keys=True, ensure_ascii=False)
    deeper = indent + "  "
    entries = [f"{deeper}{json.dumps(key)}: {_lines(value[key], deeper)}" for key in sorted(value)]
    return "{\n" + ",\n".join(entries) + f"\n{indent}}}"


def main(arguments: Sequence[str] | None = None) -> int:
    """Run the cases that were asked for, and print the table. Returns the exit status: 1 when a case has failed."""
    options = parser().parse_args(arguments)
    if not 0 <= options.seconds < math.inf:
        print(f"--seconds {options.seconds}: expected a number of seconds, 0 for no times", file=sys.stderr)
        return 2
    chosen = cases(options.size, options.only)
    if not chosen:
        print(f"no case has {' or '.join(options.only)} in its name; --list shows the names", file=sys.stderr)
        return 2
    if options.list:
        print("\n".join(case.name for case in chosen))
        return 0
    try:
        device = Devices(BUILT_IN).get(options.device)
        file = TruthFile(options.out / device.environment().slug / FILES[options.size], environment_of(device))
        device.open()
    except DeviceUnavailable as error:
        print(error, file=sys.stderr)
        return 2
    try:
        run(chosen, device, file, seconds=options.seconds, again=options.again)
    except KeyboardInterrupt:
        print(f"\ninterrupted; what was measured is in {file.path}", file=sys.stderr)
        return INTERRUPTED
    finally:
        device.close()
    return conclude(chosen, file)


def parser() -> argparse.ArgumentParser:
    made = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    made.add_argument("--device", choices=(*BUILT_IN, AUTO), default=AUTO)
    made.add_argument("--size", choices=SIZES, default="full", help="small: tiny models of the same make, for a CPU")
    made.add_argument(
        "--only",
        action="append",
        default=[],
        metavar="PATTERN",
        help="cases with this in their name, such as 'gpt2' or 'bert*-fused'; may be given again",
    )
    made.add_argument("--out", type=Path, default=RESULTS, metavar="FOLDER", help="default: %(default)s")
    made.add_argument(
        "--seconds",
        type=float,
        default=1.0,
        metavar="N",
        help="the most that the times of a step may take; 0 takes none, as on an emulated GPU (default: %(default)s)",
    )
    made.add_argument("--list", action="store_true", help="print the names of the cases and run none")
    made.add_argument("--again", action="store_true", help="measure cases that the file has already, too")
    return made


def environment_of(device: Device) -> Mapping[str, str | int]:
    """Return what the figures depend on: the device's own account, and what the models are built by."""
    import transformers

    transformers.utils.logging.set_verbosity_error()  # type: ignore[no-untyped-call]
    environment = device.environment()
    return {
        "device": environment.device,
        "python": platform.python_version(),
        "transformers": transformers.__version__,
        **environment.details,
    }


def run(chosen: Sequence[Case], device: Device, file: TruthFile, *, seconds: float, again: bool) -> None:
    """Run the cases one after the other, and say so."""
    counters = CudaCounters(TorchCuda()) if device.name == "cuda" else DeviceCounters(device)
    todo = [case for case in chosen if again or not file.has(case.name)]
    kept = f"; {len(chosen) - len(todo)} are in {file.path} already" if len(todo) < len(chosen) else ""
    print(f"{len(todo)} cases on {device.environment().device}{kept}", flush=True)
    if file.before is not None:
        print(f"{file.path} is of another environment; it is kept as {file.before.name}", flush=True)
    for number, case in enumerate(todo, 1):
        began = time.perf_counter()
        result = result_of(case, device, counters, seconds)
        file.put(case.name, result)
        took = time.perf_counter() - began
        print(f"[{number}/{len(todo)}] {case.name}: {_in_short(result)} (took {took:.1f} s)", flush=True)


def conclude(chosen: Sequence[Case], file: TruthFile) -> int:
    """Print the table of the cases, and where it is. Returns the exit status."""
    results = {case.name: file.cases[case.name] for case in chosen}
    print()
    print_table(
        ("case", *PHASES, "reserved", "step"),
        [(name, *_cells(result)) for name, result in results.items() if "peaks" in result],
    )
    for name, result in results.items():
        for kind in ("cannot_run", "failed"):
            if kind in result:
                print(f"{name} {kind.replace('_', ' ')}: {result[kind]}")
    failed = sum("failed" in result for result in results.values())
    print(f"{len(results)} cases, {failed} failed; the figures are in {file.path}")
    return 1 if failed else 0


def _cells(result: Mapping[str, Any]) -> tuple[str, ...]:
    peaks = result["peaks"]
    reserved = max(peaks[phase].get("reserved", 0) for phase in PHASES)
    return (
        *(format_bytes(peaks[phase]["allocated"]) for phase in PHASES),
        format_bytes(reserved) if reserved else "",
        format_seconds(result["step_time"]) if "step_time" in result else "",
    )


def _in_short(result: Mapping[str, Any]) -> str:
    if "peaks" not in result:
        return str(result.get("cannot_run") or result["failed"])
    highest = max(result["peaks"][phase]["allocated"] for phase in PHASES)
    time_of = f", {format_seconds(result['step_time'])}" if "step_time" in result else ""
    return f"{format_bytes(highest)}{time_of}"


if __name__ == "__main__":
    sys.exit(main())
