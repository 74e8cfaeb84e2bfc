"""Benchmark of ``--gpumem-pack``: 40 tests of 0.2 to 4 GB on one emulated card of 16 GB, with ``-n 1`` and with ``-n 8``.

Each test's step allocates its bytes, launches one kernel, and waits. The wait (``time.sleep``) stands for the time in which a
test's process has nothing to do: it waits for its GPU, for data, for a compiler. On a real GPU kernels of several processes
take turns, so tests that keep it busy gain nothing by being packed; nor do tests that keep the host's cores busy.

Runs under ``-n 8`` share one card, with ``--gpumem-pack`` and without. Wall time is everybody's on a busy machine: only the
ratio of one run is told. Needs Linux on x86-64 with a CUDA build of torch, a C compiler, and pytest-xdist.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
import tempfile
from dataclasses import dataclass
from pathlib import Path

from claims import Claim, conclude, parser_of, print_table
from cost import Cost, cost_of

TESTS, LEAST_MB, MOST_MB = 40, 200, 4000
CARD = "emulated:16GB"
WORKERS = 8
LIMIT = 0.5
SOURCE = """
import time

import pytest
import torch

SIZES = [round({least} + number * ({most} - {least}) / ({tests} - 1)) * 10**6 for number in range({tests})]


@pytest.mark.parametrize("size", SIZES)
def test_step(gpumem, size):
    def step():
        held = torch.empty(size, dtype=torch.uint8, device="cuda")
        held[:1].add_(1)
        time.sleep({wait})

    gpumem.measure(step)
"""


@dataclass(frozen=True)
class Run:
    """One session: what it took, and what it reported."""

    cost: Cost
    passed: int
    out_of_memory: int
    figures: dict[str, dict[str, float]]
    """Metrics by test."""


def run(folder: Path, name: str, *options: str, card: str | None = None) -> Run:
    """Run the suite. What it prints is kept beside it."""
    report = folder / f"{name}.json"
    command = [sys.executable, "-m", "pytest", "-p", "no:cacheprovider", "-p", "no:randomly", f"--gpumem-device={CARD}"]
    environment = {**os.environ, **({} if card is None else {"GPUMEM_EMULATED_CARD": str(folder / card)})}
    command += ["--gpumem-explain=never", f"--gpumem-report={report}", *options]
    cost, done = cost_of(
        lambda: subprocess.run(command, cwd=folder, env=environment, capture_output=True, text=True, check=False)
    )
    (folder / f"{name}.txt").write_text(done.stdout + done.stderr, encoding="utf-8")
    if not report.exists():
        raise SystemExit(f"{name} did not run:\n{done.stdout}{done.stderr}")
    results = json.loads(report.read_text(encoding="utf-8"))["results"]
    figures = {
        result["verdict"]["test"]: verdict["measurement"]["metrics"]
        for result in results
        for verdict in result["verdict"]["verdicts"]
    }
    passed = sum(result["passed"] for result in results)
    return Run(cost, passed, _out_of_memory(done.stdout), figures)


def _out_of_memory(told: str) -> int:
    """Return how many tests ended with an out-of-memory error, by pytest's summary."""
    return sum(line.startswith("FAILED") and "OutOfMemoryError" in line for line in told.splitlines())


def main() -> int:
    """Run the suite in three ways, print what they took, and tell whether the claims hold."""
    parser = parser_of(__doc__, rounds=1)
    parser.add_argument("--wait", type=float, default=1.0, help="seconds that each step waits (default: %(default)s)")
    options = parser.parse_args()
    claims: list[Claim] = []
    for _ in range(options.rounds):
        with tempfile.TemporaryDirectory() as name:
            folder = Path(name)
            source = SOURCE.format(least=LEAST_MB, most=MOST_MB, tests=TESTS, wait=options.wait)
            (folder / "test_it.py").write_text(source, encoding="utf-8")
            (folder / "pytest.ini").write_text("[pytest]\n", encoding="utf-8")
            runs = {
                "-n 1, which records": run(folder, "alone", "-n1", "--gpumem-update=new"),
                f"-n {WORKERS} --gpumem-pack": run(
                    folder, "packed", f"-n{WORKERS}", "--gpumem-baseline", "--gpumem-pack", card="card"
                ),
                f"-n {WORKERS}, one card": run(folder, "at_once", f"-n{WORKERS}", "--gpumem-baseline", card="other"),
            }
        alone, packed, at_once = runs.values()
        print_table(
            ("run", "wall s", "CPU s", "of -n 1", "passed", "out of memory"),
            [
                (
                    title,
                    f"{one.cost.wall:.1f}",
                    f"{one.cost.cpu:.1f}",
                    f"{one.cost.wall / alone.cost.wall:.2f}",
                    str(one.passed),
                    str(one.out_of_memory),
                )
                for title, one in runs.items()
            ],
        )
        claims += [
            Claim("wall time, packed over -n 1", packed.cost.wall / alone.cost.wall, LIMIT),
            Claim("tests that did not pass when packed", TESTS - packed.passed, 0),
            Claim("out of memory when packed", packed.out_of_memory, 0),
            Claim("tests whose figures differ from those alone", _differing(alone, packed), 0),
            Claim(
                "none ran out of memory at once without --gpumem-pack (1: none did)",
                float(not at_once.out_of_memory),
                0,
            ),
        ]
    print(
        f"{TESTS} tests of {LEAST_MB} to {MOST_MB} MB on {CARD}; each step waits {options.wait:g} s, {os.cpu_count()} cores"
    )
    return conclude(claims, check=options.check)


def _differing(alone: Run, packed: Run) -> int:
    """Return how many tests have other bytes or counts, ``peak_reserved`` among them, than alone."""
    return sum(packed.figures.get(test) != figures for test, figures in alone.figures.items()) + abs(
        len(packed.figures) - len(alone.figures)
    )


if __name__ == "__main__":
    sys.exit(main())
