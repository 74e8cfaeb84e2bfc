"""Run a command as a job: start the command, wait for its end, and collect its processes' memory usage."""

from __future__ import annotations

import errno
import os
import re
import shutil
import tempfile
import threading
import time
from contextlib import ExitStack
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING

from pytest_gpumem.base.errors import JobError
from pytest_gpumem.base.processes import Stop, run
from pytest_gpumem.base.shown_command import shown_command
from pytest_gpumem.emulating.emulated_process.before_torch import LIBRARY, LIVE, USAGE
from pytest_gpumem.emulating.emulated_process.control import listen
from pytest_gpumem.emulating.emulated_process.counter_library import counter_library
from pytest_gpumem.emulating.emulated_process.marks import UNCOUNTED, uncounted_in
from pytest_gpumem.emulating.emulated_process.shared_bytes import SharedBytes
from pytest_gpumem.emulating.emulated_process.start import with_startup
from pytest_gpumem.emulating.emulated_process.usage import RECORD, read_reports
from pytest_gpumem.measuring.jobs.figures import killed_in
from pytest_gpumem.measuring.jobs.processes import JobProcesses, is_running
from pytest_gpumem.torch_support.private_api.native_frames import naming_native_frames

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence

    from pytest_gpumem.emulating.emulated_process.usage import ProcessUsage
    from pytest_gpumem.measuring.jobs.processes import Unseen

JOB_PREFIX = "gpumem-job-"
"""The begin of the names of jobs' folders."""
_LIVE_SECONDS = 0.2
"""The seconds between two looks at a process's peaks. If they have changed, the process writes them."""
_GRACE_SECONDS = 2.0
"""After the command's end, its processes have this many seconds to end as well."""
_TAIL_LINES = 20
_TORCHRUN_REPORT = re.compile(r"(?<=\n).*/elastic/multiprocessing/api\.py:\d+\] failed \(exitcode: .*\n")
"""The line in torchrun's log that names the failed rank. A report of 30 lines follows, without the rank's own error."""


@dataclass(frozen=True, slots=True)
class FinishedJob:
    """An ended command."""

    status: int
    """The exit status. It is negative if a signal ended the command."""
    output: str
    errors: str
    usages: tuple[ProcessUsage, ...]
    """Each reporting process's usage."""
    unseen: tuple[Unseen, ...]
    """The processes with torch or CUDA, and without a report."""
    invalid: tuple[str, ...] = ()
    """A sentence for each process with an invalid report."""
    alive: tuple[str, ...] = ()
    """The commands of processes with torch or CUDA which still run, although the command has ended."""
    uncounted: tuple[tuple[str, str], ...] = ()
    """The commands of processes that cannot count their memory on the CPU, each with the reason."""
    simultaneous: Mapping[int, int] = field(default_factory=dict)
    """The most bytes published by all processes at the same time, by the GPU's index in the machine."""


def run_job(
    command: Sequence[str],
    environment: Mapping[str, str],
    folder: Path,
    timeout: float | None = None,
    watch: Callable[[frozenset[int]], None] = lambda _: None,
    *,
    record: bool = False,
) -> FinishedJob:
    """Run a command to its end.

    Args:
        command: The program and its arguments.
        environment: The command's environment. The variables from `reporting_to` are added.
        folder: The command's working directory.
        timeout: The longest time in seconds, or ``None`` for no limit. Afterwards the command and its processes are ended.
        watch: A function called a few times a second with the pids of the command's processes.
        record: Whether the processes record their allocations.

    Raises:
        JobError: The command cannot be started, or takes longer than ``timeout``.
    """
    if not os.path.isdir(folder):  # noqa: PTH112 -- `Path.is_dir` raises if the name is too long
        raise JobError(f"`{shown_command(command)}` cannot be started: cwd={str(folder)!r} is not a folder")
    deadline = None if timeout is None else time.monotonic() + min(timeout, threading.TIMEOUT_MAX)
    with tempfile.TemporaryDirectory(prefix=JOB_PREFIX, ignore_cleanup_errors=True) as name, ExitStack() as undo:
        # While somebody listens there, no other session removes the folder.
        if (listener := listen(Path(name))) is not None:
            undo.callback(listener.close)
        reports, output, errors = Path(name, "usage"), Path(name, "output"), Path(name, "errors")
        reports.mkdir(mode=0o700)
        shared = SharedBytes(reports)
        undo.callback(shared.close)
        if record:
            (reports / RECORD).touch()
        processes = JobProcesses(reports)

        def tick() -> None:
            processes.look()
            watch(processes.pids())
            if deadline is not None and time.monotonic() > deadline:
                processes.kill()
                raise JobError(
                    f"`{shown_command(command)}` did not end within timeout={timeout:g} seconds, and was ended"
                    + _tail(_text(output) + _text(errors))
                )

        try:
            status = run(
                command,
                folder=folder,
                environment={**environment, **reporting_to(reports, environment)},
                output=output,
                errors=errors,
                stop=Stop(),
                tick=tick,
                started=processes.begin,
            )
        except OSError as error:
            reason = f"{error.strerror or error}{_cause(command[0], environment, folder, error)}"
            raise JobError(f"`{shown_command(command)}` cannot be started: {reason}") from None
        processes.look()
        until = time.monotonic() + _GRACE_SECONDS
        while processes.alive() and time.monotonic() < until:
            time.sleep(0.05)
        contents = read_reports(reports)
        usages, invalid = tuple(contents.usages.values()), tuple(contents.invalid.values())
        return FinishedJob(
            status,
            _text(output),
            _text(errors),
            usages,
            processes.unseen(),
            invalid,
            (*processes.alive(), *_running(usages)),
            tuple(map(uncounted_in, reports.glob(f"*{UNCOUNTED}"))),
            shared.restart(),
        )


def reporting_to(folder: Path, environment: Mapping[str, str]) -> dict[str, str]:
    """Return environment variables for a process. The process and its children then report memory usage to a folder.

    Args:
        folder: The folder.
        environment: The process's other environment variables. Their ``PYTHONPATH`` is extended.
    """
    library = counter_library()
    of_library = {} if isinstance(library, str) else {LIBRARY: str(library)}
    return {
        USAGE: str(folder),
        LIVE: str(_LIVE_SECONDS),
        **of_library,
        **naming_native_frames(environment),
        **with_startup(environment),
    }


def _cause(program: str, environment: Mapping[str, str], folder: Path, error: OSError) -> str:
    """Return the reason why a program cannot be started, as the end of a sentence; empty if it is not known."""
    # `Path.exists` and `Path.is_dir` raise if a name is too long, or if a folder is closed to this user.
    path = os.path.join(folder, program)  # noqa: PTH118
    if isinstance(error, PermissionError) and error.filename == folder:
        return f", because this user may not enter cwd={str(folder)!r}"
    if os.sep not in program:
        is_absent = shutil.which(program, path=environment.get("PATH")) is None
        is_named = isinstance(error, FileNotFoundError) and is_absent
        return ", because no folder in PATH has this program" if is_named else ""
    if os.path.isdir(path):  # noqa: PTH112
        return ", because it is a folder"
    if isinstance(error, PermissionError):
        return ". Make the file executable, or start it by its interpreter"
    if isinstance(error, FileNotFoundError) and os.path.exists(path):  # noqa: PTH110
        return ", because the interpreter in its first line does not exist"
    return ". A script needs a first line such as #!/bin/sh" if error.errno == errno.ENOEXEC else ""


def _running(usages: Iterable[ProcessUsage]) -> Iterator[str]:
    """Yield the commands of processes that still run. A process may have left the job, as a daemon does."""
    for usage in usages:
        if usage.ended is None and is_running(usage.process.pid, usage.process.started):
            yield shown_command(usage.process.command)


def failure(command: Sequence[str], job: FinishedJob) -> str:
    """Return a message about a failed command, with killed processes and the last lines of its output."""
    how = f"ended with exit status {job.status}" if job.status >= 0 else f"was ended by signal {-job.status}"
    if not job.alive:
        how = ". ".join((how, *killed_in(job.usages)))
    return f"`{shown_command(command)}` {how}{_tail(job.output + job.errors)}"


def _tail(text: str) -> str:
    if report := _TORCHRUN_REPORT.search(text):
        text = text[: report.end()]
    lines = text.rstrip().splitlines()[-_TAIL_LINES:]
    return ":\n" + "\n".join(lines) if lines else ", without output"


def _text(path: Path) -> str:
    try:
        return path.read_text(encoding="utf-8", errors="replace")
    except OSError:
        return ""
