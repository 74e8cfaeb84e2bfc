"""Record a process's GPU memory usage, and write it to a file at exit and when the process first runs out of memory.

In a measured job, a thread also writes changed usage several times a second, so a killed process leaves its last figures.
"""

from __future__ import annotations

import os
import signal
import sys
import sysconfig
import threading
import time
from contextlib import suppress
from itertools import accumulate
from pathlib import Path
from traceback import walk_stack
from typing import TYPE_CHECKING, Any
from weakref import WeakKeyDictionary

import torch

from pytest_gpumem.base.variables import CUDA_VISIBLE_DEVICES
from pytest_gpumem.emulating.emulated_process.gradient_graphs import BackwardWatch
from pytest_gpumem.emulating.emulated_process.peaks import KeptPeaks, keeps_statistics
from pytest_gpumem.emulating.emulated_process.usage import (
    SEEN,
    DeviceUsage,
    OutOfMemory,
    ProcessIdentity,
    ProcessUsage,
    among_all,
    no_kernels,
    write_usage,
)
from pytest_gpumem.emulating.emulation.load import current_emulation
from pytest_gpumem.emulating.host_values.scope import current
from pytest_gpumem.torch_support.private_api.allocator import (
    expandable_segments_are_on,
    observe_out_of_memory,
    when_cuda_begins,
)

if TYPE_CHECKING:
    from collections.abc import Callable

_OF_TORCH_OR_OURS = (str(Path(torch.__file__).parent), str(Path(__file__).parents[2]), "<")
_INSTALLED = tuple(f"{os.sep}{folder}{os.sep}" for folder in ("site-packages", "dist-packages"))
_OF_LIBRARIES = tuple({sysconfig.get_path(name) for name in ("stdlib", "platstdlib", "purelib", "platlib")})


def record_usage(
    folder: Path,
    at_exit: Callable[[Callable[[], None]], object],
    steps: int | None = None,
    seconds: float | None = None,
) -> None:
    """Record this process's GPU memory usage, starting when it first uses CUDA.

    Args:
        folder: The folder into which the usage is written.
        at_exit: Takes a function to call when the process ends, after the program's own exit functions.
        steps: If given, the process ends with status 0 when an optimizer has made this many steps and begins the next one.
        seconds: The interval between two looks at the usage in a measured job. ``None`` outside jobs.
    """
    recorder = _Recorder(folder, seconds)
    if seconds is not None:
        _mark_as_reporting(folder)
    at_exit(recorder.end)
    when_cuda_begins(recorder.begin)
    if steps is not None:
        _end_after(steps)


class _Recorder:
    def __init__(self, folder: Path, seconds: float | None) -> None:
        self._folder = folder
        self._seconds = seconds
        self._visible: str | None = None
        self._process: int | None = None
        self._began = 0
        self._peaks = KeptPeaks()
        self._times = 0
        self._ran_out: OutOfMemory | None = None
        self._imported: dict[str, None] = {}
        self._backward: BackwardWatch | None = None
        self._ended = False

    def begin(self) -> None:
        self._process, self._began = os.getpid(), time.monotonic_ns()
        self._visible = os.environ.get(CUDA_VISIBLE_DEVICES)
        self._imported = dict.fromkeys(_installed())
        self._write(None)
        self._peaks.begin()
        if keeps_statistics():
            observe_out_of_memory(self._out_of_memory)
            self._backward = BackwardWatch()
        os._exit = self._ending(os._exit)
        if self._seconds is not None:
            os.execv, os.execve = self._ending(os.execv), self._ending(os.execve)
            self._end_at_sigterm()
            with suppress(RuntimeError):  # an ending interpreter starts no thread
                threading.Thread(
                    target=self._write_often, args=(self._seconds,), name="gpumem-usage", daemon=True
                ).start()

    def _ending(self, leave: Callable[..., Any]) -> Callable[..., Any]:
        """Return a function that writes the usage, and then calls ``leave``, which ends the program.

        If ``leave`` fails, the program goes on, and so does the recording. For example, ``os.execvp`` tries each folder in
        ``PATH``.
        """

        def end_and_leave(*arguments: Any) -> None:
            try:
                self.end()
            finally:
                try:
                    leave(*arguments)
                finally:
                    self._go_on()

        return end_and_leave

    def _go_on(self) -> None:
        if self._process == os.getpid():
            with self._peaks.lock:
                self._ended = False
                self._write(None)

    def _end_at_sigterm(self) -> None:
        """Write the usage at SIGTERM, for example from ``Process.terminate()``, if the program does not handle this signal."""
        is_main_thread = threading.current_thread() is threading.main_thread()
        if not is_main_thread or signal.getsignal(signal.SIGTERM) is not signal.SIG_DFL:
            return

        def end_and_die(signum: int, _frame: object) -> None:
            self.end()
            signal.signal(signum, signal.SIG_DFL)
            os.kill(os.getpid(), signum)

        signal.signal(signal.SIGTERM, end_and_die)

    def _write_often(self, seconds: float) -> None:
        written: object = None
        while True:
            time.sleep(seconds)
            with self._peaks.lock:
                if self._ended:
                    continue
                self._peaks.take()
                current_peaks = dict(self._peaks.allocated), dict(self._peaks.reserved)
                if current_peaks != written:
                    self._write(None)
                    written = current_peaks

    def _out_of_memory(self, device: int, requested: int, total: int, free: int) -> None:
        with self._peaks.lock:
            self._note_out_of_memory(device, requested)

    def _note_out_of_memory(self, device: int, requested: int) -> None:
        self._times += 1
        if self._ran_out is None:
            allocated, reserved = torch.cuda.memory_allocated(device), torch.cuda.memory_reserved(device)
            without_tensor = None
            # Inspecting the program's objects may raise an error. The allocator's own error, which follows, must not get lost.
            if self._backward is not None:
                with suppress(Exception):
                    without_tensor = self._backward.bytes_without_tensor(device, allocated)
            self._ran_out = OutOfMemory(
                self._number(device), requested, allocated, reserved, _programs_line(), without_tensor
            )
            self._write(None)

    def end(self) -> None:
        """Write the usage of an ending process."""
        # A forked process inherits this exit function, and must not write its parent's usage.
        if self._process == os.getpid():
            self._imported.update(dict.fromkeys(name for name in _installed() if name.startswith("torch.")))
            with self._peaks.lock:
                self._ended = True
                self._write(time.monotonic_ns())

    def _write(self, ended: int | None) -> None:
        if not self._folder.is_dir():
            return  # the command that made this folder has ended before this process
        self._peaks.take()
        values, emulation = current(), current_emulation()
        used = [device for device, reserved in self._peaks.reserved.items() if reserved]
        usage = ProcessUsage(
            began=self._began,
            ended=ended,
            devices=tuple(self._of_device(device) for device in sorted(used)),
            times_out_of_memory=self._times,
            ran_out=self._ran_out,
            expandable=bool(used) and expandable_segments_are_on(),
            unknown=values.reads.first_trouble if values is not None else None,
            without_statistics=not keeps_statistics(),
            lacking=emulation.cudnn.lacking(self._peaks.allocated) if emulation is not None else None,
            no_kernels=no_kernels(torch.__version__, torch.cuda.get_arch_list(), emulation.gpu.capability)
            if emulation is not None
            else None,
            imported=tuple(self._imported),
            process=process_identity(),
        )
        write_usage(self._folder, f"{self._process}-{self._began}", usage)

    def _number(self, device: int) -> int:
        """Return a GPU's index among all GPUs. The variable counts as it was when CUDA began, because torch read it then."""
        return among_all(device, self._visible)

    def _of_device(self, device: int) -> DeviceUsage:
        retries = torch.cuda.memory_stats(device).get("num_alloc_retries", 0)
        return DeviceUsage(self._number(device), self._peaks.allocated[device], self._peaks.reserved[device], retries)


def _mark_as_reporting(folder: Path) -> None:
    """Write the command of this process, and of each fork, into a file in the folder. So the job knows this process."""

    def mark() -> None:
        # The job may have ended, and its folder with it. Other systems have no such file, and their jobs look at no process.
        with suppress(OSError):
            (folder / f"{os.getpid()}{SEEN}").write_bytes(Path("/proc/self/cmdline").read_bytes())

    mark()
    if hasattr(os, "register_at_fork"):
        os.register_at_fork(after_in_child=mark)


def process_identity() -> ProcessIdentity:
    """Return this process's program, its time of start, and its rank."""
    numbers = [os.environ.get(name, "") for name in ("RANK", "LOCAL_RANK", "WORLD_SIZE", "TORCHELASTIC_RESTART_COUNT")]
    rank, local_rank, world, restart = (int(number) if number.isdecimal() else None for number in numbers)
    multiprocessing = sys.modules.get("multiprocessing.process")
    name = "" if multiprocessing is None else str(multiprocessing.current_process().name)
    return ProcessIdentity(
        pid=os.getpid(),
        parent=os.getppid(),
        started=_started(),
        command=tuple(sys.orig_argv),
        name="" if name == "MainProcess" else name,
        rank=rank,
        local_rank=local_rank,
        world=world,
        restart=restart or 0,
    )


def _started() -> int:
    """Return when this process started, in ticks of the system's clock since the machine started; 0 if unknown."""
    try:
        return int(Path("/proc/self/stat").read_text(encoding="utf-8", errors="replace").rpartition(")")[2].split()[19])
    except (OSError, ValueError, IndexError):
        return 0


def _installed() -> list[str]:
    """Return the names of the fully imported modules in installed packages, in import order.

    A module is left out while the module or a parent package is still being imported.
    """
    specs = {name: getattr(module, "__spec__", None) for name, module in list(sys.modules.items())}
    begun = {name for name, spec in specs.items() if getattr(spec, "_initializing", False)}  # set by importlib
    return [
        name
        for name, spec in specs.items()
        if any(folder in str(getattr(spec, "origin", None)) for folder in _INSTALLED)
        and begun.isdisjoint(accumulate(name.split("."), "{}.{}".format))
    ]


def _programs_line() -> str:
    """Return the program's current line in this thread. In autograd's threads, return the main thread's current line."""
    main = sys._current_frames().get(threading.main_thread().ident or 0)  # noqa: SLF001 -- documented
    threads = [sys._getframe(1), main]  # noqa: SLF001 -- likewise
    for passed_over in ((*_OF_TORCH_OR_OURS, *_OF_LIBRARIES), _OF_TORCH_OR_OURS):
        for thread in threads:
            for frame, line in walk_stack(thread) if thread is not None else ():
                if not frame.f_code.co_filename.startswith(passed_over):
                    return f"{frame.f_code.co_filename}:{line} {frame.f_code.co_name}"
    return ""


def _end_after(steps: int) -> None:
    """End this process when an optimizer has made this many steps and begins the next step."""
    from torch.optim.optimizer import register_optimizer_step_pre_hook

    step_counts: WeakKeyDictionary[torch.optim.Optimizer, int] = WeakKeyDictionary()

    def before_step(optimizer: torch.optim.Optimizer, *_: object) -> None:
        if step_counts.get(optimizer, 0) == steps:
            sys.stdout.flush()
            sys.stderr.flush()
            # `sys.exit` would raise an exception, which the program may catch to save a checkpoint or to evaluate.
            os._exit(0)
        step_counts[optimizer] = step_counts.get(optimizer, 0) + 1

    register_optimizer_step_pre_hook(before_step)
