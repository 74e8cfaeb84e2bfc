"""Processes that write into one store at once."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

from pytest_gpumem.judging.baselines.location import backend_of
from pytest_gpumem.judging.baselines.store import Store

WRITER = """
import sys
from pathlib import Path

from pytest_gpumem.judging.gate.baseline import Baseline, Key
from pytest_gpumem.judging.baselines.location import backend_of
from pytest_gpumem.judging.baselines.store import Store
from pytest_gpumem.facts.measurement import Environment, Workload

location, mine, entries = sys.argv[1], sys.argv[2], int(sys.argv[3])
environment = Environment("cpu-x86_64", "CPU (x86_64)", {"torch": "2.13.0"})
store = Store(backend_of(location, Path()))
store.check()
print("ready", flush=True)
sys.stdin.readline()
for number in range(entries):
    entry = Baseline(Workload("call"), environment, {"peak_allocated": number}, "2026-11-02")
    store.change({Key("tests/test_gpt.py", f"test_{mine}_{number}", "call"): entry})
"""


def check_that_nothing_is_lost(location: str, *, processes: int, entries: int) -> None:
    """Have ``processes`` write ``entries`` baselines each, all at once, and look for every one of them."""
    started = [
        subprocess.Popen(
            [sys.executable, "-c", WRITER, location, str(number), str(entries)],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            text=True,
        )
        for number in range(processes)
    ]
    for process in started:
        assert process.stdout.readline() == "ready\n"
    for process in started:
        process.stdin.write("go\n")
        process.stdin.flush()
    for process in started:
        process.communicate()
        assert process.returncode == 0
    stored = Store(backend_of(location, Path())).keys()
    written = [f"test_{mine}_{number}" for mine in range(processes) for number in range(entries)]
    assert [key.test for _, key in stored] == sorted(written)
