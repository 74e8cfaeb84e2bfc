"""An import hook for torch. The hook emulates a GPU, and begins to record the process's GPU memory usage.

On an emulated GPU, the hook loads the stand-ins right before torch is imported. Right after this import, the hook enters the
mode for small tensors' values. On a real GPU, the hook only begins to record (see `USAGE`).

This module is imported at the start of every Python process (``startup``), so it imports the package's other modules only
together with torch.
"""

from __future__ import annotations

import atexit
import importlib.util
import os
import sys
import time
from contextlib import nullcontext, suppress
from importlib.abc import MetaPathFinder
from pathlib import Path
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping, Sequence
    from importlib.machinery import ModuleSpec
    from types import ModuleType

    from pytest_gpumem.emulating.emulation.gpus import Gpu


DESCRIPTION = "GPUMEM_EMULATED_GPU"
"""Environment variable with the emulated GPU's properties. A child process may not find the project that defines the GPU."""
PEAKS = "GPUMEM_EMULATED_PEAKS"
"""Environment variable set by ``gpumem emulate``. If it is set, a process prints its peaks at exit.

If the value is `QUIET`, the process prints only reasons why its peaks may be wrong.
"""
QUIET = "quiet"
USAGE = "GPUMEM_USAGE"
"""Environment variable with a folder. Each process writes a file with its GPU memory usage there."""
LIVE = "GPUMEM_USAGE_LIVE"
"""Environment variable with a number of seconds. A process with `USAGE` writes its usage at this interval, and at its end.

So a killed process leaves its last figures.
"""
STEPS = "GPUMEM_EMULATED_STEPS"
"""Environment variable with a number of optimizer steps, after which a process ends. Ignored without `USAGE`."""
_MOST_SECONDS = 10.0
"""The longest wait for autograd's threads at exit, in seconds. torch itself waits as long."""


class TorchFinder(MetaPathFinder):
    """The first finder in ``sys.meta_path``, which is therefore called when torch is about to be imported."""

    def __init__(self) -> None:
        self._looking = False

    def before_import(self) -> None:
        """Do something right before torch is imported. By default, nothing."""

    def after_import(self) -> None:
        """Do something right after torch was imported. By default, nothing."""

    def find_spec(self, name: str, path: Sequence[str] | None, target: ModuleType | None = None) -> ModuleSpec | None:
        if name != "torch" or self._looking:
            return None
        self._looking = True
        try:
            self.before_import()
            spec = importlib.util.find_spec("torch")
        finally:
            self._looking = False
        if spec is not None and spec.loader is not None:
            run = spec.loader.exec_module

            def exec_module(module: ModuleType) -> None:
                run(module)
                self.after_import()

            spec.loader.exec_module = exec_module  # type: ignore[method-assign]
        return spec


class _BeforeTorch(TorchFinder):
    """Emulates the GPU called ``word``, unless it is ``None``, and begins to record if the environment says so."""

    def __init__(self, word: str | None) -> None:
        super().__init__()
        self.word = word
        self._at_exit: list[Callable[[], None]] = []
        # Exit functions run in reverse order, so these functions run after all functions of the program.
        atexit.register(self._run_at_exit)

    def before_import(self) -> None:
        if self.word is None:
            return
        from pytest_gpumem.emulating.emulation.gpus import emulated_gpu
        from pytest_gpumem.emulating.emulation.load import load

        load(emulated_gpu(self.word, described_gpus()))

    def after_import(self) -> None:
        if self.word is not None:
            # Exit functions run in reverse order, so this function runs after all functions registered later.
            atexit.register(_wait_for_autograd)
            from pytest_gpumem.emulating.host_values import scope

            scope.begin()
        # A job's process may run in another Python, without this package. The job fails, because the process does not report.
        with suppress(ImportError) if self.word is None else nullcontext():
            record_if_told_to(self._at_exit.append)

    def _run_at_exit(self) -> None:
        for function in self._at_exit:
            function()


def install(word: str | None) -> None:
    """Install the hook for the next import of torch. Further calls have no effect.

    Args:
        word: The GPU to emulate, such as ``"emulated:h100"``, or ``None`` to use the machine's GPUs.
    """
    # `sitecustomize` loads this file under another module name, so there may be two such classes with the same name.
    if not any(type(finder).__name__ == _BeforeTorch.__name__ for finder in sys.meta_path):
        sys.meta_path.insert(0, _BeforeTorch(word))


def described_gpus() -> Mapping[str, Gpu]:
    """Return a project's own GPU from the variable `DESCRIPTION`, by the GPU's name; empty if the variable has none."""
    from pytest_gpumem.emulating.emulation.gpus import from_description

    return from_description(os.environ.get(DESCRIPTION))


def record_if_told_to(at_exit: Callable[[Callable[[], None]], object] = atexit.register) -> None:
    """Record this process's peaks if `PEAKS` is set, and its usage if `USAGE` is set. torch must be imported.

    ``at_exit`` takes a function to call when the process ends.
    """
    if printed := os.environ.get(PEAKS):
        from pytest_gpumem.emulating.emulated_process.peaks import print_at_exit

        print_at_exit(is_quiet=printed == QUIET)
    if folder := os.environ.get(USAGE):
        from pytest_gpumem.emulating.emulated_process.usage_recorder import record_usage

        steps, seconds = os.environ.get(STEPS), os.environ.get(LIVE)
        record_usage(Path(folder), at_exit, int(steps) if steps else None, float(seconds) if seconds else None)


def _wait_for_autograd() -> None:
    """Wait until autograd's threads have released their graph nodes.

    ``backward`` returns before the threads have done so. So a thread may still release Python objects when the program ends.
    On an emulated GPU this happens often, because kernels take no time. If a thread requests the lock of an ending interpreter,
    the interpreter ends this thread. If the thread is in a C++ destructor at this moment, C++ aborts the process.
    """
    deadline = time.monotonic() + _MOST_SECONDS
    previous, current = None, _threads_of_autograd()
    while (
        current
        and not (current == previous and all(is_asleep for is_asleep, _ in current.values()))
        and time.monotonic() < deadline
    ):
        time.sleep(0.002)  # sleeping releases the interpreter's lock, so autograd's threads can finish
        previous, current = current, _threads_of_autograd()


def _threads_of_autograd() -> dict[str, tuple[bool, str]]:
    """Return, by thread id, whether an autograd thread sleeps, and how often this thread has gone to sleep so far."""
    states = {}
    for thread in Path("/proc/self/task").glob("*"):
        try:
            # Compare bytes, because a thread's name may not be valid text.
            if (thread / "comm").read_bytes().startswith(b"pt_autograd"):
                status = dict(line.split(":\t", 1) for line in (thread / "status").read_text().splitlines())
                states[thread.name] = status["State"].startswith("S"), status.get("voluntary_ctxt_switches", "")
        except OSError:
            continue  # the thread has ended
    return states
