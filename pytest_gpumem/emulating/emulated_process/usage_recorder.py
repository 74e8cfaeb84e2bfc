"""Record a process's memory usage, and write it to a file at exit and when the process first runs out of memory.

In a measured job, a thread also writes changed usage several times a second, so a killed process leaves its last figures.
"""

from __future__ import annotations

import os
import re
import signal
import sys
import threading
import time
from contextlib import suppress
from itertools import accumulate
from pathlib import Path
from traceback import walk_stack
from typing import TYPE_CHECKING, Any
from weakref import WeakKeyDictionary

import torch

from pytest_gpumem.emulating.emulated_process.exit_status import watch_exit
from pytest_gpumem.emulating.emulated_process.kept_peaks import KeptPeaks
from pytest_gpumem.emulating.emulated_process.marks import bytes_of, is_own, words_of
from pytest_gpumem.emulating.emulated_process.shared_bytes import PublishedBytes
from pytest_gpumem.emulating.emulated_process.usage import (
    RECORD,
    DeviceUsage,
    OutOfMemory,
    ProcessIdentity,
    ProcessUsage,
    Workspaces,
    local_rank_in,
    no_kernels,
    rank_in,
    ticks_now,
    write_usage,
)
from pytest_gpumem.emulating.emulated_process.usage_thread import start_reporting
from pytest_gpumem.torch_support.private_api.allocator import (
    expandable_segments_are_on,
    observe_out_of_memory,
    when_cuda_begins,
)

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping
    from multiprocessing.process import BaseProcess

    from pytest_gpumem.emulating.emulated_process.block_recorder import BlockRecorder
    from pytest_gpumem.emulating.emulated_process.gradient_graphs import BackwardWatch
    from pytest_gpumem.emulating.emulated_process.kept_peaks import Statistics
    from pytest_gpumem.emulating.emulated_process.usage import Recorded

_OF_TORCH_OR_OURS = (str(Path(torch.__file__).parent), str(Path(__file__).parents[2]), "<")
_INSTALLED = tuple(f"{os.sep}{folder}{os.sep}" for folder in ("site-packages", "dist-packages"))
_EMULATION = "pytest_gpumem.emulating.emulation.load"
"""This module is loaded before torch if a GPU is emulated."""


def record_usage(
    folder: Path,
    at_exit: Callable[[Callable[..., None]], object],
    steps: int | None = None,
    seconds: float | None = None,
    command: tuple[str, ...] = tuple(sys.orig_argv),
    has_sigterm: Callable[[], bool] | None = None,
    source: Statistics | None = None,
    library: str | None = None,
) -> None:
    """Record this process's memory usage, starting when it first uses CUDA.

    In a measured job, recording starts at once, because the caller has waited for the first use of CUDA or of the CPU.

    Args:
        folder: The folder into which the usage is written.
        at_exit: Takes a function to call when the process ends, after the program's own exit functions.
        steps: If given, the process ends with status 0 when an optimizer has made this many steps and begins the next one.
        seconds: The interval between two looks at the usage in a measured job. ``None`` outside jobs.
        command: The process's command.
        has_sigterm: Returns whether SIGTERM has come, although the main thread may not have noticed.
        source: The statistics of the allocator. By default, those of torch's CUDA allocator.
        library: The path of the library by which this process publishes its bytes, and records autograd's nodes on GPUs.
    """
    recorder = _Recorder(folder, seconds, command, has_sigterm, source, library)
    at_exit(recorder.end_with_python)
    if seconds is None:
        when_cuda_begins(recorder.begin)
    else:
        recorder.begin()
    if steps is not None:
        _end_after(steps)


class _Recorder:
    def __init__(
        self,
        folder: Path,
        seconds: float | None,
        command: tuple[str, ...],
        has_sigterm: Callable[[], bool] | None = None,
        source: Statistics | None = None,
        library: str | None = None,
    ) -> None:
        self._folder = folder
        self._library = library
        self._source = source or _of_cuda()
        self._has_sigterm = has_sigterm
        self._command = command
        self._seconds = seconds
        self._process: int | None = None
        self._began = 0
        self._peaks = KeptPeaks(self._source)
        self._published = PublishedBytes(library, folder, is_cuda=self._source.device_type == "cuda")
        self._times = 0
        self._ran_out: OutOfMemory | None = None
        self._imported: dict[str, None] = {}
        self._backward: BackwardWatch | None = None
        self._ended = False
        self._status: int | None = None
        self._written: object = None
        self._window: int | None = None
        self._blocks: BlockRecorder | None = None
        self._workspaces: dict[int, Workspaces] = {}
        """The workspaces at a request, by GPU. At other times they are not looked for."""
        self._before: dict[int, tuple[int, int]] = {}
        """The live bytes and the number of allocations when the window began, by GPU."""

    def begin(self) -> None:
        self._process, self._began = os.getpid(), time.monotonic_ns()
        self._imported = dict.fromkeys(self._packages())
        self._record_blocks()
        self._peaks.begin()
        self._publish()
        self._write(None)
        if self._source.device_type == "cuda" and self._source.is_kept:
            observe_out_of_memory(self._out_of_memory)
            from pytest_gpumem.emulating.emulated_process.gradient_graphs import BackwardWatch

            self._backward = BackwardWatch()
        watch_exit(self._library, self._folder, self._report_name())
        os._exit = self._ending(os._exit, takes_status=True)
        if self._seconds is not None:
            os.execv, os.execve = self._ending(os.execv), self._ending(os.execve)
            start_reporting(self, self._folder, self._seconds, self._has_sigterm)

    def _packages(self) -> list[str]:
        """Return the imported modules of installed packages. Nobody reads them from a process in a measured job."""
        return _installed() if self._seconds is None else []

    def _publish(self) -> None:
        """Publish this process's bytes from now on."""
        if self._source.is_kept:
            self._published.begin(
                _started(), [self._source.index_in_machine(device) for device in self._source.devices()]
            )

    def _ending(self, leave: Callable[..., Any], *, takes_status: bool = False) -> Callable[..., Any]:
        """Return a function that writes the usage, and then calls ``leave``, which ends the program.

        If ``leave`` fails, the program goes on, and so does the recording. For example, ``os.execvp`` tries each folder in
        ``PATH``.
        """

        def end_and_leave(*arguments: Any, **named: Any) -> None:
            try:
                status = next(iter((*arguments, *named.values())), None) if takes_status else None
                self.end(status & 0xFF if isinstance(status, int) else None)
            finally:
                try:
                    leave(*arguments, **named)
                finally:
                    self._go_on()

        return end_and_leave

    def _go_on(self) -> None:
        if self._process == os.getpid():
            with self._peaks.lock:
                self._ended, self._status = False, None
                self._publish()
                self._write(None)

    def write_if_changed(self) -> None:
        """Write the usage of a running process if its peaks have changed since the last call."""
        with self._peaks.lock:
            if self._ended:
                return
            self._peaks.take()
            current_peaks = dict(self._peaks.allocated), dict(self._peaks.reserved)
            if current_peaks != self._written:
                self._write(None)
                self._written = current_peaks

    def begin_window(self, window: int) -> ProcessUsage | None:
        """Begin a window with new peaks, and return the usage in the window before. If this process ends, return ``None``."""
        with self._peaks.lock:
            if self._ended:
                return None
            self._workspaces = self._source.workspaces()
            usage = self._usage(None, with_blocks=True)
            self._record_blocks(with_older=True)
            self._window, self._times = window, 0
            self._published.restart_peaks()
            self._peaks.restart()
            self._before = {device: (self._live(device), self._peaks.allocations(device)) for device in self._used()}
            self._workspaces = {}
            self._write(None)
            return usage

    def _record_blocks(self, *, with_older: bool = False) -> None:
        """Begin a new recording of allocations if the test asks for it. End any earlier recording."""
        if self._blocks is not None:
            self._blocks.end()
            self._blocks.failure = None
        if (self._folder / RECORD).exists():
            from pytest_gpumem.emulating.emulated_process.block_recorder import BlockRecorder, CudaHistory

            self._blocks = self._blocks or BlockRecorder(self._source.own_history or CudaHistory(self._library))
            self._blocks.begin(with_older=with_older)

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
                self._source.index_in_machine(device), requested, allocated, reserved, _programs_line(), without_tensor
            )
            self._write(None)

    def end(self, status: int | None = None) -> None:
        """Write the usage of an ending process, with `ProcessUsage.status` if that is known already."""
        # A forked process inherits this exit function, and must not write its parent's usage.
        if self._process == os.getpid():
            self._imported.update(dict.fromkeys(name for name in self._packages() if name.startswith("torch.")))
            with self._peaks.lock:
                self._ended, self._status = True, status
                self._write(time.monotonic_ns())
                self._published.end()

    def end_with_python(self, status: int | None = None) -> None:
        """Write the usage of an ending process, and read no more stacks."""
        if status is None and issubclass(getattr(sys, "last_type", None) or object, KeyboardInterrupt):
            status = -signal.SIGINT  # Python ends by this signal then, and calls no `exit`
        self.end(status)
        if self._blocks is not None:
            self._blocks.python_ends()

    def _write(self, ended: int | None) -> None:
        usage = self._usage(ended, with_blocks=ended is not None)
        # The command or session that made this folder may have ended before this process. That must not fail the program.
        with suppress(OSError):
            if is_own(self._folder):
                write_usage(self._folder, self._report_name(), usage)

    def _report_name(self) -> str:
        return f"{self._process}-{self._began}"

    def _usage(self, ended: int | None, *, with_blocks: bool) -> ProcessUsage:
        self._peaks.take()
        blocks: Mapping[int, Recorded] = {}
        if self._blocks is not None and with_blocks:
            # An ended process retains nothing.
            blocks = self._blocks.recorded(self._workspaces, with_holders=ended is None)
        used = self._used()
        return ProcessUsage(
            began=self._began,
            ended=ended,
            status=self._status,
            devices=tuple(self._of_device(device, blocks.get(device)) for device in used),
            times_out_of_memory=self._times,
            ran_out=self._ran_out,
            # A snapshot of all blocks takes long, and a measured job needs none.
            expandable=self._seconds is None and bool(used) and expandable_segments_are_on(),
            without_statistics=not self._source.is_kept,
            imported=tuple(self._imported),
            process=process_identity(self._command),
            window=self._window,
            unrecorded=self._blocks.failure if self._blocks is not None and with_blocks else None,
            written=ticks_now(),
            **_doubts(self._peaks.allocated),
        )

    def _used(self) -> list[int]:
        """Return the devices on which this process's memory counts. Memory that does not count is not published either."""
        if self._source.counts:
            return self._source.used(self._peaks.reserved)
        self._published.end()
        return []

    def _of_device(self, device: int, recorded: Recorded | None) -> DeviceUsage:
        live_before, earlier_allocations = self._before.get(device, (0, 0))
        allocations = self._peaks.allocations(device)
        if not allocations:  # cudaMallocAsync counts none
            allocations = int(self._peaks.allocated[device] > live_before)
        return DeviceUsage(
            self._source.index_in_machine(device),
            self._peaks.allocated[device],
            self._peaks.reserved[device],
            self._source.retries(device),
            self._peaks.requested[device] - self._workspaces.get(device, Workspaces()).by_chance,
            self._live(device),
            live_before,
            allocations - earlier_allocations,
            recorded,
            published=self._published.live(device, self._peaks.live(device), self._peaks.allocated[device]),
        )

    def _live(self, device: int) -> int:
        """Return the requested bytes in tensors, without known workspaces."""
        return self._peaks.live(device) - self._workspaces.get(device, Workspaces()).total


def _of_cuda() -> Statistics:
    # A process on the CPU loads none of this.
    from pytest_gpumem.emulating.emulated_process.cuda_statistics import CudaStatistics

    return CudaStatistics()


def _doubts(allocated: Mapping[int, int]) -> dict[str, str | None]:
    """Return the usage's remarks about an emulated GPU. On a real GPU there are none.

    The modules imported here take 0.1 s, so a process with a real GPU does not import them.
    """
    if _EMULATION not in sys.modules:
        return {}
    from pytest_gpumem.emulating.emulation.load import current_emulation
    from pytest_gpumem.emulating.host_values.scope import current

    values, emulation = current(), current_emulation()
    doubts = {}
    if values is not None:
        doubts = {"unknown": values.reads.first_trouble, "invalid": values.reads.first_invalid}
    if emulation is not None:
        doubts["lacking"] = emulation.cudnn.lacking(allocated)
        doubts["no_kernels"] = no_kernels(torch.__version__, torch.cuda.get_arch_list(), emulation.gpu.capability)
    return doubts


def process_identity(command: tuple[str, ...]) -> ProcessIdentity:
    """Return this process's program, its time of start, and its rank."""
    rank, rank_variable = rank_in(os.environ)
    restart = os.environ.get("TORCHELASTIC_RESTART_COUNT", "")
    multiprocessing = sys.modules.get("multiprocessing.process")
    name = "" if multiprocessing is None else name_of_process(multiprocessing.current_process())
    parent_pid = os.getppid()
    return ProcessIdentity(
        pid=os.getpid(),
        started=_started(),
        command=command,
        name="" if name == "MainProcess" else name,
        rank=rank,
        rank_variable=rank_variable,
        local_rank=local_rank_in(os.environ),
        restart=int(restart) if restart.isdecimal() else 0,
        parent=_command_of(parent_pid),
        parent_pid=parent_pid,
    )


def name_of_process(process: BaseProcess) -> str:
    """Return a process's name from `multiprocessing`: ``Encoder`` for the process ``Encoder-3`` from a class ``Encoder``.

    Python counts the processes since the session's start, so such a number is another one in each run. Only the names of
    Python's own classes keep it, which no measurement is called after.
    """
    kind, name = type(process), str(process.name)
    is_own = kind.__module__.partition(".")[0] != "multiprocessing"
    return kind.__name__ if is_own and re.fullmatch(rf"{re.escape(kind.__name__)}-[\d:]+", name) else name


def _command_of(pid: int) -> tuple[str, ...]:
    """Return the command of the parent process. It is unknown if the parent has ended, so that process 1 is the parent now."""
    return tuple(words_of(bytes_of(Path(f"/proc/{pid}/cmdline")))) if pid > 1 else ()


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
    import sysconfig  # takes 3 ms, and few processes run out of memory

    libraries = {sysconfig.get_path(name) for name in ("stdlib", "platstdlib", "purelib", "platlib")}
    main = sys._current_frames().get(threading.main_thread().ident or 0)  # noqa: SLF001 -- documented
    threads = [sys._getframe(1), main]  # noqa: SLF001 -- likewise
    for passed_over in ((*_OF_TORCH_OR_OURS, *libraries), _OF_TORCH_OR_OURS):
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
