"""Records times of this machine, quiet and under load, with and without planted slowdowns: what `time_gate.py` judges by.

Every run is a process of its own, since where its memory lies is chance and moves its times. It times each of the steps of
`time_steps.py` in rounds of 20 ms or more, with the package's own device, and reads its conditions and pace in between.

`quiet` are blocks of four neighbouring runs, ABBA: the step, two with a planted slowdown (or none), the step. `loads` are runs
of the step beside other processes. `noise` are runs on a machine that others use, too, with and without a neighbour: of
the step, and of ones that are longer by a quarter or twice as long, by more work and by a busy wait. Each run is written as
soon as it is there, and the next command goes on behind it.
"""

from __future__ import annotations

import argparse
import gc
import json
import math
import os
import platform
import subprocess
import sys
import time
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

from time_file import Recording, Run, Series, read, reading_of, run_from_plain
from time_load import LOADS, neighbours
from time_steps import LARGE_SLOWDOWNS, SLOWDOWNS, STEPS, planted

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator

    from pytest_gpumem.devices.contract import Device

NAME = "time-samples.json"
WARM_UPS = 3
NOISE_BLOCKS = 2_000_000
"""From this number on, blocks are of `noise_plan`."""
SECONDS_A_ROUND = 0.02
QUIET_SECONDS, LOADED_SECONDS, NOISE_SECONDS = 1.5, 2.1, 5.2
"""Of a series: a sample and its re-measurement, and the second that pytest-benchmark takes; under noise two, and pauses."""


@dataclass(frozen=True, slots=True)
class Planned:
    """A run to come."""

    load: str
    percent: int
    block: int
    place: int
    wait: int = 0

    @property
    def key(self) -> tuple[str, int, int, int, int]:
        return self.load, self.percent, self.block, self.place, self.wait


def quiet_plan() -> Iterator[Planned]:
    """Blocks of ABBA without end, the planted slowdowns in turns."""
    block = 0
    while True:
        for percent in (0, *SLOWDOWNS):
            for place, planted_here in enumerate((0, percent, percent, 0)):
                # The block of nothing planted has the place of its own runs, as B of A and A.
                yield Planned("quiet", planted_here, block, place)
            block += 1


def loads_plan() -> Iterator[Planned]:
    """Two runs beside each load, without end."""
    block = 1_000_000
    while True:
        for load in (load for load in LOADS if load != "moderate"):
            for place in range(2):
                yield Planned(load, 0, block, place)
            block += 1


def noise_plan() -> Iterator[Planned]:
    """Beside each load, without end: two runs of the step, and one of each slowdown."""
    block = NOISE_BLOCKS
    while True:
        for load in NOISE:
            work = [(percent, 0) for percent in LARGE_SLOWDOWNS]
            waits = [(0, percent) for percent in LARGE_SLOWDOWNS]
            kinds = [(0, 0), *work, (0, 0), *waits]
            for place, (percent, wait) in enumerate(kinds):
                yield Planned(load, percent, block, place, wait)
            block += 1


NOISE = ("quiet", "moderate")
PLANS: dict[str, Callable[[], Iterator[Planned]]] = {"quiet": quiet_plan, "loads": loads_plan, "noise": noise_plan}
RUNS_A_TURN = {"quiet": 20, "loads": 12, "noise": 12}


def series_of(step: Callable[[], object], device: Device, seconds: float) -> Series:
    """Time ``step`` for ``seconds``, reading the device in the order in which `sample_step` does."""
    for _ in range(WARM_UPS):
        step()
    readings = [reading_of(device.conditions(), device.pace())]
    first = device.time(step)
    readings.append(reading_of(device.conditions(), device.pace()))
    steps = max(1, math.ceil(SECONDS_A_ROUND / first))
    rounds, spent = [first], first

    def several() -> None:
        for _ in range(steps):
            step()

    while spent < seconds:
        took = device.time(several)
        readings.append(reading_of(device.conditions(), device.pace()))
        rounds.append(took / steps)
        spent += took
    return Series(steps, tuple(rounds), tuple(readings))


def record(planned: Planned) -> Run:
    """Time every step in this process."""
    import torch

    from pytest_gpumem.devices.cpu import CpuDevice

    torch.manual_seed(0)
    began, device = time.time(), CpuDevice()
    seconds = QUIET_SECONDS if planned.load == "quiet" else LOADED_SECONDS
    if planned.block >= NOISE_BLOCKS:
        seconds = NOISE_SECONDS
    device.open()
    try:
        with device.unrecorded():
            series = {}
            for name, make in STEPS.items():
                step = planted(make(), planned.percent, planned.wait)
                gc.collect()
                gc.disable()
                series[name] = series_of(step, device, seconds)
                gc.enable()
    finally:
        device.close()
    return Run(planned.load, planned.block, planned.place, planned.percent, began, series, planned.wait)


def recorded_apart(planned: Planned) -> Run:
    """The run, in a process of its own beside the neighbours of its load."""
    arguments = [planned.load, planned.percent, planned.block, planned.place, planned.wait]
    with neighbours(planned.load):
        command = [sys.executable, __file__, "--run", *map(str, arguments)]
        done = subprocess.run(command, check=True, stdout=subprocess.PIPE, text=True)
    return run_from_plain(json.loads(done.stdout))


def machine() -> dict[str, str]:
    """What the times depend on, as the package tells environments apart."""
    from pytest_gpumem.devices.cpu import CpuDevice

    environment = CpuDevice().environment()
    versions = {"python": platform.python_version(), "kernel": platform.release()}
    details = {name: str(value) for name, value in environment.details.items()}
    return {"slug": environment.slug, "device": environment.device, **details, **versions}


def begin(path: Path, here: dict[str, str]) -> Recording:
    """What is recorded already. Raises ``ValueError`` when it is of another machine, which times cannot be mixed with."""
    cores = os.cpu_count() or 1
    if not path.exists():
        return Recording(here, cores, ())
    recording = read(path)
    if dict(recording.machine) != here:
        changed = [
            f"{key} {recording.machine.get(key)} -> {value}"
            for key, value in here.items()
            if recording.machine.get(key) != value
        ]
        raise ValueError(f"{path} was recorded elsewhere ({', '.join(changed)}); move it away")
    return recording


def main() -> int:
    """Record until the minutes are over. Returns the exit status."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--minutes", type=float, default=60, help="when to stop (default: %(default)s)")
    parser.add_argument("--only", choices=PLANS, action="append", help="a part of the plan; may be repeated")
    parser.add_argument("--out", type=Path, default=Path(__file__).parent / "results", help="folder of results")
    parser.add_argument(
        "--name", default=NAME, help="the file in the device's folder of results (default: %(default)s)"
    )
    parser.add_argument("--run", nargs=5, help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.run:
        load, *numbers = options.run
        print(json.dumps(record(Planned(load, *map(int, numbers))).to_plain()))
        return 0
    here = machine()
    path = options.out / here["slug"] / options.name
    try:
        recording = begin(path, here)
    except ValueError as error:
        print(error, file=sys.stderr)
        return 2
    end = time.monotonic() + 60 * options.minutes
    done = {run.key for run in recording.runs}
    plans = [PLANS[name]() for name in options.only or PLANS]
    while time.monotonic() < end:
        for name, plan in zip(options.only or PLANS, plans, strict=True):
            for planned in (next(plan) for _ in range(RUNS_A_TURN[name])):
                if planned.key in done or time.monotonic() >= end:
                    continue
                run = recorded_apart(planned)
                recording = Recording(recording.machine, recording.cores, (*recording.runs, run))
                recording.write(path)
                print(
                    f"{len(recording.runs)} runs: {planned.load}, {planned.percent + planned.wait} % planted",
                    flush=True,
                )
    print(f"{path}: {path.stat().st_size / 1e6:.2f} MB")
    return 0


if __name__ == "__main__":
    sys.exit(main())
