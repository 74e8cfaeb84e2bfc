"""The heap that a session freezes, in a process without torch: its tests go through all objects several times each."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

_PLUGINS = ("anyio", "benchmark", "cacheprovider", "gpumem", "hypothesispytest", "memray", "randomly", "xdist")


def test_a_heap_is_frozen_and_gone_through_as_the_tests_of_it_say():
    file = Path(__file__).with_name("frozen_heap.py")
    command = [sys.executable, "-m", "pytest", "--noconftest", *(f"-pno:{name}" for name in _PLUGINS), str(file)]
    done = subprocess.run(command, cwd=Path(__file__).parents[2], capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stdout + done.stderr
    assert "15 passed" in done.stdout
