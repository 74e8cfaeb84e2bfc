"""Import hook that loads the stand-ins before torch, and enters the mode for values of small tensors after it.

Imports nothing of this package until torch is imported: it is run at the start of every Python (``startup``).
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

    from pytest_gpumem.emulation.gpus import Gpu


DESCRIPTION = "GPUMEM_EMULATED_GPU"
"""Variable with the figures of the emulated GPU, which may be of a project that a process knows nothing of."""
PEAKS = "GPUMEM_EMULATED_PEAKS"
"""Set for each process of a program that `gpumem emulate` runs. It prints its peaks when it ends, or with `QUIET` only what is
wrong with them."""
QUIET = "quiet"
USAGE = "GPUMEM_EMULATED_USAGE"
"""The folder to which each process writes its usage, if it does."""
STEPS = "GPUMEM_EMULATED_STEPS"
"""With `USAGE`: the number of an optimizer's steps after which a process ends, if it does."""
_MOST_SECONDS = 10.0
"""Seconds that the end of a process waits for autograd's threads: as many as torch itself waits."""


class _BeforeTorch(MetaPathFinder):
    """First of all finders, which is called when torch is about to be imported."""

    def __init__(self, word: str) -> None:
        self.word = word
        self._looking = False

    def find_spec(self, name: str, path: Sequence[str] | None, target: ModuleType | None = None) -> ModuleSpec | None:
        if name != "torch" or self._looking:
            return None
        from pytest_gpumem.emulation.gpus import emulated_gpu
        from pytest_gpumem.emulation.load import load

        self._looking = True
        try:
            load(emulated_gpu(self.word, gpu_told()))
            spec = importlib.util.find_spec("torch")
        finally:
            self._looking = False
        if spec is not None and spec.loader is not None:
            run = spec.loader.exec_module

            def exec_module(module: ModuleType) -> None:
                run(module)
                # The first that is registered is the last that is called.
                atexit.register(_wait_for_autograd)
                from pytest_gpumem.host_values import scope

                scope.begin()
                record_if_told_to()

            spec.loader.exec_module = exec_module  # type: ignore[method-assign]
        return spec


def install(word: str) -> None:
    """Emulate the GPU that ``word`` names (``"emulated:h100"``) as soon as torch is imported. Twice does nothing more."""
    # By its name: a process that was started within such a session has it from a module of another name.
    if not any(type(finder).__name__ == _BeforeTorch.__name__ for finder in sys.meta_path):
        sys.meta_path.insert(0, _BeforeTorch(word))


def gpu_told() -> Mapping[str, Gpu]:
    """Return by its name the GPU of a project's own that the process which started this one has told of; none otherwise."""
    from pytest_gpumem.emulation.gpus import from_description

    return from_description(os.environ.get(DESCRIPTION))


def record_if_told_to() -> None:
    """Record peaks or usage of this process where the environment says so. torch has been imported."""
    if printed := os.environ.get(PEAKS):
        from pytest_gpumem.emulated_process.peaks import print_at_exit

        print_at_exit(is_quiet=printed == QUIET)
    if folder := os.environ.get(USAGE):
        from pytest_gpumem.emulated_process.usage_recorder import record_usage

        steps = os.environ.get(STEPS)
        record_usage(Path(folder), int(steps) if steps else None)


def _wait_for_autograd() -> None:
    """Wait until autograd's threads have let go of what they ran.

    ``backward`` returns before, and what a thread lets go of may be Python's. Where no kernel takes time, the interpreter may
    be ending by then: it ends a thread that asks for its lock, and C++ aborts the process, as this leaves a destructor.
    """
    until = time.monotonic() + _MOST_SECONDS
    before, now = None, _threads_of_autograd()
    while now and not (now == before and all(asleep for asleep, _ in now.values())) and time.monotonic() < until:
        time.sleep(0.002)  # without the interpreter's lock: a thread that waits for it wakes up
        before, now = now, _threads_of_autograd()


def _threads_of_autograd() -> dict[str, tuple[bool, str]]:
    """Return, for each thread of autograd by its id, whether it sleeps, and how often it has gone to sleep."""
    found = {}
    for thread in Path("/proc/self/task").glob("*"):
        try:
            # A thread's name may be any bytes.
            if (thread / "comm").read_bytes().startswith(b"pt_autograd"):
                status = dict(line.split(":\t", 1) for line in (thread / "status").read_text().splitlines())
                found[thread.name] = status["State"].startswith("S"), status.get("voluntary_ctxt_switches", "")
        except OSError:
            continue  # it has ended
    return found
