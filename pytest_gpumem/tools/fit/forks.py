"""Run a program on several emulated GPUs: first in a new process, and then in forked processes if their results are the same.

Imports, especially of torch, take most of the time in a short run. The first run reports which modules the program imports. A
server process then imports the same modules. Each further run is a fork of the server process, in which the program starts from
its beginning on another GPU.

For example, let a program's imports take 8 s, and the other code 2 s. Runs on five GPUs take 50 s without forks. With forks
they take 28 s: 10 s for the first run, 8 s for the server's imports, 2 s to repeat the first run in a fork for comparison, and
2 s for each of the four other GPUs.
"""

from __future__ import annotations

import math
import os
import shutil
import signal
import subprocess
import sys
import time
from contextlib import ExitStack, closing, suppress
from multiprocessing import Pipe
from pathlib import Path
from queue import SimpleQueue
from typing import TYPE_CHECKING, Any

from pytest_gpumem.base.processes import GRACE_SECONDS, POLL_SECONDS, end_group, end_with_parent
from pytest_gpumem.base.variables import EMULATED
from pytest_gpumem.emulating.emulated_process.before_torch import DESCRIPTION
from pytest_gpumem.emulating.emulated_process.fork_server import CODE, Fork, Program
from pytest_gpumem.emulating.emulation.gpus import described
from pytest_gpumem.emulating.emulation.load import CONTEXT_BYTES
from pytest_gpumem.tools.fit.outcome import result_of
from pytest_gpumem.tools.fit.run import emulating, run_folder, run_on

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence
    from multiprocessing.connection import Connection

    from pytest_gpumem.base.processes import Stop
    from pytest_gpumem.emulating.emulation.gpus import Gpu
    from pytest_gpumem.tools.fit.outcome import ProgramRun


def can_be_forked(command: Sequence[str], python: str) -> bool:
    """Return whether a fork of this Python interpreter can run a command: a file or a module, without interpreter options.

    Args:
        command: The command, such as ``["python", "train.py", "--steps=3"]`` or ``["python", "-m", "train"]``.
        python: The path of this Python interpreter. A link to the interpreter from another folder belongs to another virtual
            environment, so the command cannot be forked.
    """
    executable = shutil.which(command[0])
    if executable is None or len(command) < 2:
        return False
    is_this_python = _folder_of(executable) == _folder_of(python) and all(
        path.samefile(python_path)
        for path, python_path in ((Path(executable), Path(python)), (Path(executable).parent, Path(python).parent))
    )
    module = command[1] == "-m" and len(command) > 2
    return is_this_python and (module or (command[1].endswith(".py") and not command[1].startswith("-")))


def _folder_of(file: str) -> str:
    return os.path.normpath(Path(file).absolute().parent)


def forks_pay(before_cuda: float, total: float, other_gpus: int, jobs: int = 1) -> bool:
    """Return whether forks save time. Before the first useful fork, the server repeats the imports, and a fork repeats the
    first run.

    Args:
        before_cuda: The seconds until the first run used CUDA, mostly for imports. Each fork saves this time.
        total: The seconds for the complete first run.
        other_gpus: The number of GPUs after the first.
        jobs: The number of runs at the same time.

    Example:
        With 8 s before CUDA, 10 s in total and 4 other GPUs, forks cost 18 s and save 32 s. With only 2 other GPUs, forks save
        16 s, which is less than their cost.
    """
    return before_cuda + total < math.ceil(other_gpus / jobs) * before_cuda


class ProgramRuns:
    """Runs a program on several GPUs. After the first run, several threads may call `on` at the same time.

    Args:
        command: The program and its arguments.
        environment: The program's environment, without variables for the emulated GPU.
        steps: The number of optimizer steps after which the program ends, or ``None`` to run to its end.
        jobs: The maximum number of runs at the same time.
        stop: Ends all runs when this process receives a signal such as SIGTERM.
    """

    def __init__(
        self, command: Sequence[str], environment: Mapping[str, str], steps: int | None, jobs: int, stop: Stop
    ) -> None:
        self._command, self._environment, self._steps = tuple(command), environment, steps
        self._jobs, self._stop = jobs, stop
        self._first: tuple[Gpu, ProgramRun] | None = None
        self._began = 0
        self._seconds = 0.0
        self._server: ForkServer | None = None
        self._close = ExitStack()

    def close(self) -> None:
        """End the server process, if `prepare` has started a server."""
        self._close.close()

    def on(self, gpu: Gpu, more: Mapping[str, str]) -> ProgramRun:
        """Run the program on a GPU to its end. Use a fork if `prepare` has started a server.

        Args:
            gpu: The GPU, or several equal GPUs.
            more: Further environment variables. They make the allocator's segments expandable, or are empty.

        Raises:
            OSError: The program cannot be started.
            StopSignal: A signal ended the run.
        """
        if self._first is None:
            self._began = time.monotonic_ns()
            run = self._in_process(gpu, more)
            self._seconds = (time.monotonic_ns() - self._began) / 1e9
            self._first = gpu, run
            return run
        # torch counts the GPUs only once, so a fork sees as many GPUs as the first run. Use no fork for another number of GPUs.
        server = self._server if gpu.count == self._first[0].count else None
        forked = server.run(gpu, more, self._steps) if server is not None else None
        # torch reads the allocator's settings when CUDA is first used. If a torch release reads them already at import, the
        # fork ignores `more`, so repeat the run in a new process.
        if forked is None or (more and any(process.devices and not process.expandable for process in forked.processes)):
            return self._in_process(gpu, more)
        return forked

    def _in_process(self, gpu: Gpu, more: Mapping[str, str]) -> ProgramRun:
        return run_on(gpu, self._command, {**self._environment, **more}, self._stop, self._steps)

    def prepare(self, other_gpus: Sequence[Gpu]) -> None:
        """After the first run, start a server for forks if forks are faster and a fork has the same result as the first run.

        The server process ends when the calling thread ends.

        Args:
            other_gpus: The other GPUs.

        Raises:
            OSError: The program cannot be started.
            StopSignal: A signal ended the run.
        """
        assert self._first is not None
        first, run = self._first
        alike = [gpu for gpu in other_gpus if gpu.count == first.count]
        if not alike or len(run.processes) != 1 or not can_be_forked(self._command, sys.executable):
            return
        (process,) = run.processes
        if not forks_pay((process.began - self._began) / 1e9, self._seconds, len(alike), self._jobs):
            return
        program = Program(self._command, process.imported)
        server = self._close.enter_context(
            closing(ForkServer(alike[0], program, self._environment, self._jobs, self._stop))
        )
        repeated = server.run(first, {}, self._steps)
        if repeated is not None and _outcome(repeated, first) == _outcome(run, first):
            self._server = server
        else:
            server.close()


def _outcome(run: ProgramRun, gpu: Gpu) -> object:
    return result_of(run, gpu, CONTEXT_BYTES)


class ForkServer:
    """A process with the program's modules imported. Its forks run the program. The process ends after `close`.

    Args:
        gpu: The GPU that the server emulates while it imports the modules.
        program: The program's command, and the modules to import.
        environment: The program's environment, without variables for the emulated GPU.
        jobs: The maximum number of runs at the same time.
        stop: Ends all runs when this process receives a signal such as SIGTERM.

    Raises:
        StopSignal: A signal ended the run.
    """

    def __init__(self, gpu: Gpu, program: Program, environment: Mapping[str, str], jobs: int, stop: Stop) -> None:
        self._stop = stop
        self._close = ExitStack()
        self._import_output = self._close.enter_context(run_folder())
        pipes = [Pipe() for _ in range(jobs)]
        self._idle: SimpleQueue[Connection] = SimpleQueue()
        """Connections to the server, one for each simultaneous run. A connection is removed while a run uses it."""
        for own_end, _ in pipes:
            self._idle.put(own_end)
        descriptors = [server_end.fileno() for _, server_end in pipes]
        with self._import_output.output.open("wb") as stdout, self._import_output.errors.open("wb") as stderr:
            self._process = subprocess.Popen(
                [program.command[0], "-c", CODE, program.folder, *map(str, descriptors)],
                env=emulating(gpu, environment),
                stdin=subprocess.DEVNULL,
                stdout=stdout,
                stderr=stderr,
                pass_fds=descriptors,
                # Start a new session, so Ctrl-C in the terminal reaches only this process, which then ends the runs.
                start_new_session=True,
                preexec_fn=end_with_parent,  # noqa: PLW1509 - a single system call without locks
            )
        for _, server_end in pipes:
            server_end.close()
        # Close the connections first: the server then ends by itself.
        self._close.callback(self._end)
        for own_end, _ in pipes:
            self._close.callback(own_end.close)
        self._alive = True
        first = pipes[0][0]
        try:
            self._send(first, program)
            self._alive = self._received(first, stoppable=True) is None and self._alive
        except BaseException:
            self.close()
            raise

    def close(self) -> None:
        """End the server, and all runs in its forks."""
        self._close.close()

    def run(self, gpu: Gpu, more: Mapping[str, str], steps: int | None) -> ProgramRun | None:
        """Run the program in a fork, or return ``None`` if the server has ended.

        Args:
            gpu: The GPU, or several equal GPUs.
            more: Further environment variables for the run.
            steps: The number of optimizer steps after which the program ends, or ``None``.

        Raises:
            StopSignal: A signal ended the run.
        """
        self._stop.check()
        if not self._alive:
            return None
        with run_folder() as folder:
            # Begin the run's output with the text printed by the modules during their import.
            for source, target in (
                (self._import_output.output, folder.output),
                (self._import_output.errors, folder.errors),
            ):
                shutil.copyfile(source, target)
            variables = {**more, **folder.variables(steps), EMULATED: gpu.device, DESCRIPTION: described(gpu)}
            connection = self._idle.get()
            try:
                status = self._status_of(connection, Fork(gpu, variables, str(folder.output), str(folder.errors)))
            except BaseException:
                self._alive = (
                    False  # Use the server no more, because this run's answer would be taken for the next run's.
                )
                raise
            self._idle.put(connection)
            return None if status is None else folder.run(status)

    def _status_of(self, connection: Connection, fork: Fork) -> int | None:
        self._send(connection, fork)
        # Wait for the forked process's id, which the server sends at once. This wait cannot be interrupted, because without the
        # id the forked process could not be ended.
        process = self._received(connection, stoppable=False)
        if process is None:
            return None
        try:
            status: int | None = self._received(connection, stoppable=True)
        except BaseException:
            with suppress(EOFError, ConnectionResetError):
                end_group(process, self._stop, connection.poll)
            raise
        return status

    def _send(self, connection: Connection, request: Program | Fork) -> None:
        with suppress(BrokenPipeError):  # `_received` notices the server's end
            connection.send(request)

    def _received(self, connection: Connection, *, stoppable: bool) -> Any:
        """Return the server's next answer, or ``None`` if the server has ended, for example during an import."""
        try:
            while stoppable and not connection.poll(POLL_SECONDS):
                self._stop.check()
            return connection.recv()
        except (EOFError, ConnectionResetError):
            self._alive = False
            return None

    def _end(self) -> None:
        with suppress(subprocess.TimeoutExpired):
            self._process.wait(GRACE_SECONDS)
        # Imported modules may have started processes, so kill the server's whole process group.
        with suppress(ProcessLookupError):
            os.killpg(self._process.pid, signal.SIGKILL)
        self._process.wait()
