"""An import hook for torch. The hook emulates a GPU, and begins to record the process's memory usage.

On an emulated GPU, the hook loads the stand-ins right before torch is imported. Right after this import, the hook enters the
mode for small tensors' values. On a real GPU and on the CPU, the hook only begins to record (see `USAGE`).

This module is imported at the start of every Python process (``startup``). So it imports other modules only together with
torch, except modules that Python itself loads. `pathlib` and `importlib.abc` took 16 ms in a process that needs 10 ms without.
"""

from __future__ import annotations

import atexit
import os
import sys
import time

TYPE_CHECKING = False
if TYPE_CHECKING:
    from collections.abc import Callable, Mapping, Sequence
    from importlib.machinery import ModuleSpec
    from pathlib import Path
    from types import ModuleType

    from pytest_gpumem.emulating.emulated_process.kept_peaks import Statistics
    from pytest_gpumem.emulating.emulation.gpus import Gpu


DESCRIPTION = "GPUMEM_EMULATED_GPU"
"""Environment variable with the emulated GPU's properties. A child process may not find the project that defines the GPU."""
PEAKS = "GPUMEM_EMULATED_PEAKS"
"""Environment variable set by ``gpumem emulate``. If it is set, a process prints its peaks at exit.

If the value is `QUIET`, the process prints only reasons why its peaks may be wrong.
"""
QUIET = "quiet"
USAGE = "GPUMEM_USAGE"
"""Environment variable with a folder. Each process writes a file with its memory usage there."""
LIVE = "GPUMEM_USAGE_LIVE"
"""Environment variable with a number of seconds. A process with `USAGE` looks at its usage at this interval and
at its end, and writes it if it has changed.

So a killed process leaves its last figures.
"""
COUNTER = "GPUMEM_USAGE_COUNTER"
"""Environment variable with the path of a library that counts torch's allocations on the CPU.

If it is set, a process with `LIVE` reports its memory on the CPU instead of its GPU memory.
"""
LIBRARY = "GPUMEM_USAGE_LIBRARY"
"""Environment variable with the path of the same library. A process with `LIVE` publishes its bytes by it (`shared_bytes`), and
records autograd's nodes by it on GPUs."""
FORK = "GPUMEM_USAGE_FORK"
"""Key that is set for a fork of a test's process. Linux shows the tests' command for the fork, so messages say ``fork``."""
STEPS = "GPUMEM_EMULATED_STEPS"
"""Environment variable with a number of optimizer steps, after which a process ends. Ignored without `USAGE`."""
_AUTOGRAD = b"pt_autograd"
_PENDING: list[object] = []
"""Functions that the main thread will call. Python does not keep them alive."""
_MOST_SECONDS = 10.0
"""The longest wait for autograd's threads at exit, in seconds. torch itself waits as long."""


class TorchFinder:
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
            import importlib.util

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

    def __init__(self, word: str | None, variables: Mapping[str, str] = os.environ) -> None:
        super().__init__()
        self.word = word
        # A test session sets variables for its children later, and does not report to itself.
        self._variables = {
            name: variables[name] for name in (PEAKS, USAGE, LIVE, STEPS, FORK, COUNTER, LIBRARY) if name in variables
        }
        self._at_exit: list[Callable[[], None]] = []
        # Exit functions run in reverse order, so these functions run after all functions of the program.
        atexit.register(self._run_at_exit)

    def before_import(self) -> None:
        if library := self._variables.get(LIBRARY):
            _prepare_exit(library)
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
        try:
            record_if_told_to(self._variables, self._at_exit.append)
        except ImportError:
            # A job's process may run in another Python, without this package. The job fails, because the process does not
            # report.
            if self.word is not None:
                raise

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


def record_fork(variables: Mapping[str, str]) -> None:
    """In a fork of a process that does not record itself, record the usage as soon as the fork uses the device.

    Args:
        variables: `USAGE`, `LIVE`, `COUNTER` and `LIBRARY`.
    """
    variables = {**variables, FORK: "1"}
    if "torch" not in sys.modules:
        sys.meta_path.insert(0, _BeforeTorch(None, variables))
        return
    record_if_told_to(variables)


def described_gpus() -> Mapping[str, Gpu]:
    """Return a project's own GPU from the variable `DESCRIPTION`, by the GPU's name; empty if the variable has none."""
    from pytest_gpumem.emulating.emulation.gpus import from_description

    return from_description(os.environ.get(DESCRIPTION))


def record_if_told_to(
    variables: Mapping[str, str] = os.environ, at_exit: Callable[[Callable[[], None]], object] = atexit.register
) -> None:
    """Record this process's peaks if `PEAKS` is set, and its usage if `USAGE` is set. torch must be imported.

    Args:
        variables: The environment variables.
        at_exit: Takes a function to call when the process ends.
    """
    if printed := variables.get(PEAKS):
        from pytest_gpumem.emulating.emulated_process.peaks import print_at_exit

        print_at_exit(is_quiet=printed == QUIET)
    folder, seconds = variables.get(USAGE), variables.get(LIVE)
    if not folder:
        return

    from pathlib import Path

    endings: list[Callable[[int], None]] = []

    def also_at_sigterm(end: Callable[..., None]) -> None:
        at_exit(end)
        endings.append(end)

    def record(source: Statistics | None = None) -> None:
        from pytest_gpumem.emulating.emulated_process.usage_recorder import record_usage

        steps = variables.get(STEPS)
        command = ("python", "fork") if variables.get(FORK) else tuple(sys.orig_argv)
        interval = float(seconds) if seconds else None
        has_sigterm = _watch_sigterm(endings) if seconds else None
        record_usage(
            Path(folder),
            also_at_sigterm,
            int(steps) if steps else None,
            interval,
            command,
            has_sigterm,
            source,
            variables.get(LIBRARY),
        )

    def record_or_be_unseen(source: Statistics | None = None) -> None:
        try:
            record(source)
        except BaseException as error:
            unmark_as_reporting(Path(folder))
            # An error here must not fail the program's first use of the device. Its signal handlers may raise others.
            if not isinstance(error, Exception):
                raise

    if seconds:
        from pytest_gpumem.emulating.emulated_process.marks import mark_as_reporting, unmark_as_reporting

        mark_as_reporting(Path(folder))
        # A process without CUDA, or without tensors on the CPU, does not load the recorder.
        if counter := variables.get(COUNTER):
            _count_on_cpu(Path(folder), counter, at_exit, record_or_be_unseen)
        else:
            from pytest_gpumem.torch_support.private_api.allocator import when_cuda_begins

            when_cuda_begins(record_or_be_unseen)
    else:
        record()


def _prepare_exit(library: str) -> None:
    try:
        from pytest_gpumem.emulating.emulated_process.exit_status import prepare_exit
    except ImportError:
        return  # a job's process may run in another Python, without this package
    prepare_exit(library)


def _count_on_cpu(
    folder: Path, library: str, at_exit: Callable[[Callable[[], None]], object], record: Callable[[Statistics], None]
) -> None:
    """Count this process's allocations on the CPU, and call ``record`` at the first one. Processes that cannot count say so."""
    from pytest_gpumem.base.errors import MeasuringError
    from pytest_gpumem.emulating.emulated_process.cpu_statistics import CpuStatistics
    from pytest_gpumem.emulating.emulated_process.marks import mark_as_uncounted

    try:
        counting = CpuStatistics(library)
    except MeasuringError as error:
        mark_as_uncounted(folder, str(error))
        return

    def record_unless_worker() -> None:
        if counting.counts:
            record(counting)

    at_exit(counting.stop_calls)
    counting.when_it_begins(record_unless_worker)


def _watch_sigterm(endings: Sequence[Callable[[int], None]]) -> Callable[[], bool]:
    """Call `_end_at_sigterm` in the main thread, and return a function that returns whether SIGTERM has come.

    Another thread may be the first to use CUDA, for example a server's thread at the first request. Then the main thread calls
    the function before its next Python instruction. If the main thread waits in C until the end, it never does.
    """
    watches: list[Callable[[], bool]] = []

    def begin() -> None:
        has_come = _end_at_sigterm(endings)
        if has_come is not None:
            watches.append(has_come)

    _call_in_main_thread(begin)
    return lambda: any(has_come() for has_come in watches)


def _call_in_main_thread(function: Callable[[], None]) -> None:
    import threading

    if threading.current_thread() is threading.main_thread():
        function()
        return
    import ctypes

    def call(_: object) -> int:
        function()
        return 0

    pending = ctypes.PYFUNCTYPE(ctypes.c_int, ctypes.c_void_p)(call)
    _PENDING.append(pending)
    ctypes.pythonapi.Py_AddPendingCall(pending, None)


def _end_at_sigterm(endings: Sequence[Callable[[int], None]]) -> Callable[[], bool] | None:
    """At SIGTERM, for example from ``Process.terminate()``, call functions before the process dies.

    A program's own handler replaces this one, or calls it and goes on. Only the main thread can set a handler.

    Args:
        endings: The functions. Each gets the negative number of the signal.

    Returns:
        A function that returns whether SIGTERM has come. Python runs a handler only between two instructions of the main
        thread, which may wait in C. ``None`` if the handler is not set, or if the program is told of signals in the same way.
    """
    import signal

    if signal.getsignal(signal.SIGTERM) is not signal.SIG_DFL:
        return None

    def end_and_die(signum: int, _frame: object) -> None:
        if signal.getsignal(signum) is not end_and_die:
            return  # the program's own handler calls this one
        try:
            for end in endings:
                end(-signum)
        finally:
            signal.signal(signum, signal.SIG_DFL)
            os.kill(os.getpid(), signum)

    signal.signal(signal.SIGTERM, end_and_die)
    reading, writing = os.pipe()
    os.set_blocking(reading, False)
    os.set_blocking(writing, False)
    previous = signal.set_wakeup_fd(writing, warn_on_full_buffer=False)
    if previous != -1:
        signal.set_wakeup_fd(previous)
        os.close(reading)
        os.close(writing)
        return None

    if hasattr(os, "register_at_fork"):
        os.register_at_fork(after_in_child=lambda: _undo_in_fork(end_and_die, writing))

    def has_come() -> bool:
        try:
            numbers = os.read(reading, 4096)
        except OSError:
            return False
        return signal.SIGTERM in numbers and signal.getsignal(signal.SIGTERM) is end_and_die

    return has_come


def _undo_in_fork(handler: Callable[..., None], writing: int) -> None:
    """In a fork, remove the handler and the pipe. Otherwise a signal to the fork would end its parent through the pipe.

    Args:
        handler: The handler of SIGTERM.
        writing: The pipe's end into which Python writes the numbers of signals.
    """
    import signal

    if signal.getsignal(signal.SIGTERM) is handler:
        signal.signal(signal.SIGTERM, signal.SIG_DFL)
    current = signal.set_wakeup_fd(-1)
    if current not in (-1, writing):
        signal.set_wakeup_fd(current)  # the program's own


def _wait_for_autograd() -> None:
    """Wait until autograd's threads have released their graph nodes.

    ``backward`` returns before the threads have done so. So a thread may still release Python objects when the program ends.
    On an emulated GPU this happens often, because kernels take no time. If a thread requests the lock of an ending interpreter,
    the interpreter ends this thread. If the thread is in a C++ destructor at this moment, C++ aborts the process.
    """
    from pytest_gpumem.emulating.emulated_process.threads import other_threads

    deadline = time.monotonic() + _MOST_SECONDS
    previous, current = None, other_threads(_AUTOGRAD)
    while (
        current
        and not (current == previous and all(is_asleep for is_asleep, _ in current.values()))
        and time.monotonic() < deadline
    ):
        time.sleep(0.002)  # sleeping releases the interpreter's lock, so autograd's threads can finish
        previous, current = current, other_threads(_AUTOGRAD)
