"""A program in a fork: it runs, fails and ends as it does in an interpreter of its own."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

PROGRAM = """
import atexit, multiprocessing, os, signal, sys, warnings

def fails(at: int):
    raise ValueError(at)

if __name__ == "__main__":
    case = sys.argv[1]
    atexit.register(print, "at exit")
    print(__file__, __package__, type(__loader__).__name__, sys.argv, sys.path[0], type(__builtins__).__name__)
    print(sorted(name for name in globals() if name.startswith("__")), sys.modules["__main__"].__dict__ is globals())
    print(fails.__annotations__)
    kept = open("kept.txt", "w")
    kept.write(case)
    warnings.warn("careful")
    warnings.warn("old", DeprecationWarning)
    if case == "error":
        fails(1)
    if case == "status":
        sys.exit(-1)
    if case == "text":
        sys.exit("a text")
    if case == "leave":
        os._exit(4)
    if case == "killed":
        os.kill(os.getpid(), signal.SIGKILL)
    if case == "interrupted":
        os.kill(os.getpid(), signal.SIGINT)
    if case == "hook":
        sys.excepthook = lambda kind, error, trace: print(kind, trace.tb_frame.f_code.co_name)
        fails(2)
    if case == "spawn":
        process = multiprocessing.get_context("spawn").Process(target=fails, args=(3,))
        process.start()
        process.join()
        print(process.exitcode)
"""
AS_A_FORK = (
    "import sys; from pytest_gpumem.emulating.emulated_process.fork_server import _run; sys.path[0] = sys.argv[1]; "
)
AS_A_FORK += "_run((sys.executable, *sys.argv[2:]))"


def ended(folder: Path, *command: str) -> tuple[object, ...]:
    kept = folder / "kept.txt"
    kept.unlink(missing_ok=True)
    environment = {**os.environ, "PYTHONPATH": str(Path(__file__).parents[2])}
    environment |= {"PYTHONHASHSEED": "0", "PYTHONWARNINGS": ""}
    done = subprocess.run(
        [sys.executable, *command], cwd=folder, env=environment, capture_output=True, text=True, check=False
    )
    return done.returncode, done.stdout, done.stderr, kept.read_text(encoding="utf-8") if kept.exists() else None


@pytest.mark.parametrize(
    "command",
    [
        *(
            f"program.py {case}"
            for case in ("ends", "error", "status", "text", "leave", "killed", "interrupted", "hook")
        ),
        "./program.py error",
        "program.py spawn",
        "-m program error",
        "-m not_there",
        "broken.py",
    ],
)
def test_a_fork_runs_fails_and_ends_as_an_interpreter_does(tmp_path, command):
    (tmp_path / "program.py").write_text(PROGRAM, encoding="utf-8")
    (tmp_path / "broken.py").write_text("def (\n", encoding="utf-8")
    alone = ended(tmp_path, *command.split())
    assert ended(tmp_path, "-c", AS_A_FORK, str(tmp_path), *command.split()) == alone
