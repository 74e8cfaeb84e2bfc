"""The table of truth: memory at the peak of each phase of a training step, and its time, by model and step config.

216 cases, each settled, timed, and run once more while the allocator's counters are read. A result is on the disk as soon as
it is there; started again, the command goes on with the cases that are missing.
"""

from __future__ import annotations

import argparse
import platform
import sys
import time
from pathlib import Path
from typing import TYPE_CHECKING, Any

from claims import print_table
from counters import counters_of
from truth_cases import PHASES, Case, cases, result_of
from truth_file import TruthFile
from truth_models import SIZES

from pytest_gpumem.devices.contract import DeviceUnavailable
from pytest_gpumem.devices.registry import AUTO, BUILT_IN, Devices
from pytest_gpumem.units import format_bytes, format_seconds

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence

    from counters import Counters

    from pytest_gpumem.devices.contract import Device

RESULTS = Path(__file__).parent / "results"
FILES = {"full": "truth.json", "small": "truth-small.json"}
INTERRUPTED = 130


def main(arguments: Sequence[str] | None = None) -> int:
    """Run the cases that were asked for, and print the table. Returns the exit status: 1 when a case has failed."""
    options = parser().parse_args(arguments)
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
    except (DeviceUnavailable, ValueError) as error:
        print(error, file=sys.stderr)
        return 2
    try:
        run(chosen, device, counters_of(device), file, again=options.again)
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
    made.add_argument("--list", action="store_true", help="print the names of the cases and run none")
    made.set_defaults(again=False)
    earlier = made.add_mutually_exclusive_group()
    earlier.add_argument(
        "--resume", dest="again", action="store_false", help="leave out cases that the file has already (the default)"
    )
    earlier.add_argument("--again", action="store_true", help="measure them again")
    return made


def environment_of(device: Device) -> Mapping[str, str | int]:
    """What the figures depend on: the device's own account, and what the models are built by."""
    import transformers

    transformers.utils.logging.set_verbosity_error()  # type: ignore[no-untyped-call]
    environment = device.environment()
    return {
        "device": environment.device,
        "python": platform.python_version(),
        "transformers": transformers.__version__,
        **environment.details,
    }


def run(chosen: Sequence[Case], device: Device, counters: Counters, file: TruthFile, *, again: bool) -> None:
    """Run the cases one after the other, and say so."""
    todo = [case for case in chosen if again or not file.has(case.name)]
    kept = f"; {len(chosen) - len(todo)} are in {file.path} already" if len(todo) < len(chosen) else ""
    print(f"{len(todo)} cases on {device.environment().device}{kept}", flush=True)
    if file.before is not None:
        print(f"{file.path} is of another environment; it is kept as {file.before.name}", flush=True)
    for number, case in enumerate(todo, 1):
        began = time.perf_counter()
        result = result_of(case, device, counters)
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
        format_seconds(result["step_time"]),
    )


def _in_short(result: Mapping[str, Any]) -> str:
    if "peaks" not in result:
        return str(result.get("cannot_run") or result["failed"])
    highest = max(result["peaks"][phase]["allocated"] for phase in PHASES)
    return f"{format_bytes(highest)}, {format_seconds(result['step_time'])}"


if __name__ == "__main__":
    sys.exit(main())
