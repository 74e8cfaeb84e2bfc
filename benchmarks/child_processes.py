"""Cost of measuring child processes: a marked test that starts 20 children with `subprocess`, and the start of a child.

Two sessions run side by side, one with the plugin and one with ``-p no:gpumem``. Both use an emulated H100, or the CPU with
``--cpu``. Their tests start children by turns, so a machine that becomes faster or slower changes both.
CPU time (user + system, children included) is claimed, because a session waits while it is the other one's turn.
In the first suite each child imports torch and allocates 4 MB. In the second suite no child imports torch. In the third suite
the test has no child.

A child's start and end are compared with the `sitecustomize` and the variables by which a child reports its memory, and
without them. ``import torch`` takes seconds that vary by a tenth, so a child imports torch before the hook for this import is
called, and its seconds are subtracted. torch's own end takes half a second, so the time ends after the last exit function.

Needs Linux on x86-64 with a CUDA build of torch, and a C compiler. With ``--only-starts`` no session runs. With ``--cpu`` any
build of torch will do.
"""

from __future__ import annotations

import os
import statistics
import subprocess
import sys
import tempfile
from contextlib import suppress
from pathlib import Path
from typing import TYPE_CHECKING

from claims import Claim, claim_of, conclude, difference_of_medians, parser_of, print_table

from pytest_gpumem.emulating.emulated_process.start import environment_for
from pytest_gpumem.emulating.emulation.gpus import emulated_gpu
from pytest_gpumem.measuring.devices.cpu import CpuDevice
from pytest_gpumem.measuring.jobs.run import reporting_to

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence

CHILDREN = 20
GPU = "emulated:h100"
WITH_TORCH, WITHOUT_TORCH, NONE = f"{CHILDREN} children with torch", f"{CHILDREN} children without torch", "no child"
SUITES: dict[str, tuple[int, str]] = {
    WITH_TORCH: (CHILDREN, "import torch; torch.ones(1 << 20, device='{device}')"),
    WITHOUT_TORCH: (CHILDREN, "pass"),
    NONE: (0, "pass"),
}
"""The number of children in a suite's test, and their code."""
SOURCE = """
import os
import subprocess
import sys

import pytest
import torch

ARRIVED, TURN = int(os.environ["ARRIVED"]), int(os.environ["TURN"])


def wait_for_turn():
    os.write(ARRIVED, b"x")
    os.read(TURN, 1)


@pytest.mark.gpumem
def test_children():
    torch.ones(1 << 20, device="{device}")
    for _ in range({children}):
        wait_for_turn()
        subprocess.run([sys.executable, "-c", {child!r}], check=True)
    wait_for_turn()
"""
SESSIONS = {
    "with the plugin": ("--gpumem-explain=never",),
    "-p no:gpumem": ("-p", "no:gpumem", "-W", "ignore"),
}
STARTS = {
    "without torch": ("pass", 5.0),
    "that imports torch": ("", 50.0),
    "with a tensor": ("torch.ones(1 << 20, device='{device}')", 50.0),
}
"""A child's code, and the most milliseconds of CPU time that reporting may add to its start and end."""
IMPORT = """
import os
import sys
import time

hooks = [finder for finder in sys.meta_path if hasattr(finder, "after_import")]
assert hooks or "GPUMEM_USAGE" not in os.environ
sys.meta_path = [finder for finder in sys.meta_path if finder not in hooks]
began = time.process_time()
import contextlib, ctypes, typing  # torch loads these as well

seconds = time.process_time() - began
for hook in hooks:
    hook.before_import()
began = time.process_time()
import torch

seconds += time.process_time() - began
for hook in hooks:
    hook.after_import()
{code}
"""
END = """
import atexit
import os
import time

atexit._run_exitfuncs()
print(time.process_time() - globals().get("seconds", 0), flush=True)
os._exit(0)
"""
MOST_RATIO = 1.1
MOST_MS = 10.0
"""The most milliseconds of CPU time that measuring adds to a child without torch, in the session and in the child."""


class Session:
    """A session of pytest whose test waits for its turn before each child, and before its end."""

    def __init__(self, folder: Path, options: tuple[str, ...], environment: Mapping[str, str]) -> None:
        self._arrived, arrived = os.pipe()
        turn, self._turn = os.pipe()
        self._command = [sys.executable, "-m", "pytest", "-q", "-p", "no:cacheprovider", "-p", "no:randomly", *options]
        self._process = subprocess.Popen(
            self._command,
            cwd=folder,
            env={**environment, "ARRIVED": str(arrived), "TURN": str(turn)},
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
            pass_fds=(arrived, turn),
        )
        os.close(arrived)
        os.close(turn)
        self.wait()

    def wait(self) -> None:
        """Wait until the test waits for its turn, or the session has ended."""
        os.read(self._arrived, 1)

    def go_on(self) -> None:
        """Let the test start its next child, or end."""
        with suppress(BrokenPipeError):  # the session has ended, and `cpu` raises
            os.write(self._turn, b"x")
        self.wait()

    def cpu(self) -> float:
        """Wait for the session's end, and return its CPU time in seconds. Raises if its test did not pass."""
        output = self._process.stdout.read() if self._process.stdout else ""
        _, status, usage = os.wait4(self._process.pid, 0)
        self._process.returncode = os.waitstatus_to_exitcode(status)
        os.close(self._arrived)
        os.close(self._turn)
        if "1 passed" not in output:
            raise SystemExit(f"{' '.join(self._command)} failed:\n{output}")
        return usage.ru_utime + usage.ru_stime


def run_by_turns(
    folder: Path, sessions: Sequence[tuple[str, ...]], environment: Mapping[str, str], turns: int
) -> list[float]:
    """Run sessions with these options side by side, and return the CPU time of each in seconds."""
    running = [Session(folder, options, environment) for options in sessions]
    for number in range(turns):
        for session in running if number % 2 else reversed(running):
            session.go_on()
    return [session.cpu() for session in running]


def compare_sessions(rounds: int, environment: dict[str, str], device: str) -> list[Claim]:
    """Run the sessions by turns, and print what they took.

    Args:
        rounds: The number of runs of each session.
        environment: The environment in which torch can be imported.
        device: The value of ``--gpumem-device``.
    """
    plugin, no_plugin = SESSIONS.values()
    options = (*plugin, f"--gpumem-device={device}"), no_plugin
    torch_device = "cpu" if device == "cpu" else "cuda"
    cpus: dict[str, list[list[float]]] = {}
    for suite, (children, child) in SUITES.items():
        with tempfile.TemporaryDirectory() as name:
            folder = Path(name)
            (folder / "pytest.ini").write_text("[pytest]\n", encoding="utf-8")
            child_code = child.format(device=torch_device)
            source = SOURCE.format(child=child_code, children=children, device=torch_device)
            (folder / "test_it.py").write_text(source, encoding="utf-8")
            pairs = [run_by_turns(folder, options, environment, children + 1) for _ in range(rounds)]
        cpus[suite] = [list(seconds) for seconds in zip(*pairs, strict=True)]
        print(f"a test with {suite}, {rounds} rounds of both sessions by turns\n")
        rows = [(name, *_seconds(seconds)) for name, seconds in zip(SESSIONS, cpus[suite], strict=True)]
        print_table(("session", "CPU, median", "CPU, least"), rows)
    ratios = [ours / theirs for ours, theirs in zip(*cpus[WITH_TORCH], strict=True)]
    text = f"{WITH_TORCH}: CPU time with the plugin over without, median of the rounds' ratios"
    claims = [claim_of(text, statistics.median, (ratios,), MOST_RATIO)]
    # A session also measures the test's own process, which costs the same with any number of children.
    own = statistics.median(ours - theirs for ours, theirs in zip(*cpus[NONE], strict=True))
    each = [1000 * (ours - theirs - own) / CHILDREN for ours, theirs in zip(*cpus[WITHOUT_TORCH], strict=True)]
    text = f"{WITHOUT_TORCH}: milliseconds of CPU time that the plugin adds for each child, median of the rounds"
    return [*claims, claim_of(text, statistics.median, (each,), MOST_MS)]


def compare_starts(starts: int, environment: dict[str, str], device: str) -> list[Claim]:
    """Start children with and without reporting in turns, and print what the starts took.

    Args:
        starts: The number of starts of each kind.
        environment: The environment in which torch can be imported.
        device: The value of ``--gpumem-device``.
    """
    unset = () if device != "cpu" else ("GPUMEM_",)
    plain = {name: value for name, value in environment.items() if not name.startswith(unset)}
    claims = []
    with tempfile.TemporaryDirectory() as name:
        of_device = CpuDevice().variables_of_processes() if device == "cpu" else {}
        reporting = {**plain, **reporting_to(Path(name), plain), **of_device}
        environments = {"reporting": reporting, "not reporting": plain}
        for child, (code, limit) in STARTS.items():
            torch_code = IMPORT.format(code=code.format(device="cpu" if device == "cpu" else "cuda"))
            program = code if child == "without torch" else torch_code
            costs: dict[str, list[float]] = {kind: [] for kind in environments}
            for number in range(-1, starts):
                for kind in environments if number % 2 else reversed(environments):
                    cost = start(program, environments[kind])
                    if number >= 0:  # the first start may compile bytecode
                        costs[kind].append(1000 * cost)
            rows = [(kind, f"{statistics.median(each):.1f} ms", f"{min(each):.1f} ms") for kind, each in costs.items()]
            print(f"a child {child}, {starts} starts of each kind in turns, without the import of torch\n")
            print_table(("child", "CPU, median", "CPU, least"), rows)
            text = f"a child {child}: milliseconds of CPU time for reporting"
            claims.append(claim_of(text, difference_of_medians, list(costs.values()), limit))
    return claims


def start(code: str, environment: dict[str, str]) -> float:
    """Run a child with this code until its exit functions have run, and return its CPU time in seconds."""
    command = [sys.executable, "-c", code + END]
    return float(subprocess.run(command, env=environment, check=True, capture_output=True, text=True).stdout)


def _seconds(seconds: list[float]) -> tuple[str, ...]:
    return tuple(f"{reduce(seconds):.2f} s" for reduce in (statistics.median, min))


def main() -> int:
    """Run everything in turns, print what it took, and tell whether the claims hold."""
    parser = parser_of(__doc__, rounds=5)
    parser.add_argument("--only-starts", action="store_true", help="run no sessions")
    parser.add_argument("--cpu", action="store_true", help="measure on the CPU instead of an emulated GPU")
    options = parser.parse_args()
    device = "cpu" if options.cpu else GPU
    emulating = {} if options.cpu else environment_for(emulated_gpu(GPU), os.environ)
    environment = {**os.environ, **emulating}
    claims = [] if options.only_starts else compare_sessions(options.rounds, environment, device)
    return conclude([*claims, *compare_starts(4 * options.rounds, environment, device)], check=options.check)


if __name__ == "__main__":
    sys.exit(main())
