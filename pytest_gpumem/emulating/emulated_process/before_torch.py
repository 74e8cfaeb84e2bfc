"""Import hook that loads the stand-ins before torch. Afterwards, the hook enters the mode for computing small values.

The module runs at the start of every Python process (``startup``), so it imports nothing from this package before torch.
"""

from __future__ import annotations

import atexit
import importlib.util
import os
import sys
import time
from importlib.abc import MetaPathFinder
from pathlib import Path
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence
    from importlib.machinery import ModuleSpec
    from types import ModuleType

    from pytest_gpumem.emulating.emulation.gpus import Gpu


DESCRIPTION = "GPUMEM_EMULATED_GPU"
"""Variable with the emulated GPU's figures, because a child process may not find the project that defines the GPU."""
PEAKS = "GPUMEM_EMULATED_PEAKS"
"""Variable for each process that `gpumem emulate` runs. The process prints its peaks at its end. If the value is `QUIET`, it
prints only reasons why figures may be wrong."""
QUIET = "quiet"
USAGE = "GPUMEM_EMULATED_USAGE"
"""Variable with the folder to which each process writes its usage."""
STEPS = "GPUMEM_EMULATED_STEPS"
"""Variable with the number of optimizer steps after which a process ends. It needs `USAGE`."""
_MOST_SECONDS = 10.0
"""Seconds to wait for autograd's threads at exit. torch itself waits for the same time."""


class _BeforeTorch(MetaPathFinder):
    """Finder before all other finders, which notices when torch is about to be imported."""

    def __init__(self, word: str) -> None:
        self.word = word
        self._looking = False

    def find_spec(self, name: str, path: Sequence[str] | None, target: ModuleType | None = None) -> ModuleSpec | None:
        if name != "torch" or self._looking:
            return None
        from pytest_gpumem.emulating.emulation.gpus import emulated_gpu
        from pytest_gpumem.emulating.emulation.load import load

        self._looking = True
        try:
            load(emulated_gpu(self.word, described_gpus()))
            spec = importlib.util.find_spec("torch")
        finally:
            self._looking = False
        if spec is not None and spec.loader is not None:
            run = spec.loader.exec_module

            def exec_module(module: ModuleType) -> None:
                run(module)
                # Exit functions run in reverse order, so this function runs last.
                atexit.register(_wait_for_autograd)
                from pytest_gpumem.emulating.host_values import scope

                scope.begin()
                record_if_told_to()

            spec.loader.exec_module = exec_module  # type: ignore[method-assign]
        return spec


def install(word: str) -> None:
    """Emulate a GPU such as ``"emulated:h100"`` as soon as torch is imported. A second call has no effect."""
    # Compare names of classes, because `sitecustomize` loads this file as a module with another name.
    if not any(type(finder).__name__ == _BeforeTorch.__name__ for finder in sys.meta_path):
        sys.meta_path.insert(0, _BeforeTorch(word))


def described_gpus() -> Mapping[str, Gpu]:
    """Return the project's own GPU that the parent process described, by its name; empty if there is none."""
    from pytest_gpumem.emulating.emulation.gpus import from_description

    return from_description(os.environ.get(DESCRIPTION))


def record_if_told_to() -> None:
    """Record peaks or usage of this process if a variable asks for it. torch must be imported."""
    if printed := os.environ.get(PEAKS):
        from pytest_gpumem.emulating.emulated_process.peaks import print_at_exit

        print_at_exit(is_quiet=printed == QUIET)
    if folder := os.environ.get(USAGE):
        from pytest_gpumem.emulating.emulated_process.usage_recorder import record_usage

        steps = os.environ.get(STEPS)
        record_usage(Path(folder), int(steps) if steps else None)


def _wait_for_autograd() -> None:
    """Wait until autograd's threads have released the nodes that they ran.

    ``backward`` returns earlier, and a thread may still release Python objects. On an emulated GPU no kernel takes time, so
    the interpreter may already be ending. The interpreter then ends each thread that asks for its lock. If such a thread is in
    a C++ destructor at this moment, C++ aborts the process.
    """
    deadline = time.monotonic() + _MOST_SECONDS
    previous, current = None, _threads_of_autograd()
    while (
        current
        and not (current == previous and all(is_asleep for is_asleep, _ in current.values()))
        and time.monotonic() < deadline
    ):
        time.sleep(0.002)  # sleeping releases the interpreter's lock, so a waiting thread wakes up
        previous, current = current, _threads_of_autograd()


def _threads_of_autograd() -> dict[str, tuple[bool, str]]:
    """Return whether each autograd thread sleeps, and how often it has gone to sleep, by thread id."""
    states = {}
    for thread in Path("/proc/self/task").glob("*"):
        try:
            # A thread's name may be any bytes.
            if (thread / "comm").read_bytes().startswith(b"pt_autograd"):
                status = dict(line.split(":\t", 1) for line in (thread / "status").read_text().splitlines())
                states[thread.name] = status["State"].startswith("S"), status.get("voluntary_ctxt_switches", "")
        except OSError:
            continue  # the thread has ended
    return states
