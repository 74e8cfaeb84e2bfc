"""Runs of a program on several emulated GPUs: the first is a process of its own, the others are forks where that is the same.

To import torch, and what else a program does, takes most of a run's time. The first run tells what the program imports. Another
process then imports that, too, and each further run is a fork of it: the program from its beginning, on another GPU.
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

from pytest_gpumem.emulated_process.before_torch import DESCRIPTION
from pytest_gpumem.emulated_process.fork_server import CODE, Fork, Program
from pytest_gpumem.emulation.gpus import described
from pytest_gpumem.emulation.load import CONTEXT_BYTES
from pytest_gpumem.fit.outcome import found
from pytest_gpumem.fit.run import emulating, run_folder, run_on
from pytest_gpumem.processes import GRACE_SECONDS, POLL_SECONDS, end_group, end_with_parent
from pytest_gpumem.variables import EMULATED

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence
    from multiprocessing.connection import Connection

    from pytest_gpumem.emulation.gpus import Gpu
    from pytest_gpumem.fit.outcome import ProgramRun
    from pytest_gpumem.processes import Stop


def can_be_forked(command: Sequence[str], python: str) -> bool:
    """Return whether a command is this Python with a file or a module, and without options of Python's own.

    Args:
        command: The command.
        python: The path of this Python. A link to it in another folder is that of another environment.
    """
    there = shutil.which(command[0])
    if there is None or len(command) < 2:
        return False
    same = _folder(there) == _folder(python) and all(
        one.samefile(other) for one, other in ((Path(there), Path(python)), (Path(there).parent, Path(python).parent))
    )
    module = command[1] == "-m" and len(command) > 2
    return same and (module or (command[1].endswith(".py") and not command[1].startswith("-")))


def _folder(file: str) -> str:
    return os.path.normpath(Path(file).absolute().parent)


def forks_pay(before_cuda: float, whole: float, others: int, jobs: int = 1) -> bool:
    """Return whether forks are faster: what a program imports is imported once more for them, and its first run is repeated.

    Args:
        before_cuda: Seconds in which the first run did not use CUDA yet, most of which are imports.
        whole: Its seconds in all.
        others: The number of the other GPUs.
        jobs: The number of them that are tried at a time.
    """
    return before_cuda + whole < math.ceil(others / jobs) * before_cuda


class ProgramRuns:
    """Runs of a program on GPUs: a first one, and then several at a time, by threads.

    Args:
        command: The program and its arguments.
        environment: Its environment, but for what concerns the emulated GPU.
        steps: After how many steps of an optimizer to end it; ``None`` for not before it ends.
        jobs: The number of runs at a time, at most.
        stop: The signal that asks for the end of all.
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
        """End what forks are made of."""
        self._close.close()

    def on(self, gpu: Gpu, more: Mapping[str, str]) -> ProgramRun:
        """Run the program to its end.

        Args:
            gpu: The GPU, or several of one.
            more: Settings of the allocator, beside the environment: they make its segments expandable.

        Raises:
            OSError: The program cannot be started.
            Stopped: The end was asked for.
        """
        if self._first is None:
            self._began = time.monotonic_ns()
            run = self._in_process(gpu, more)
            self._seconds = (time.monotonic_ns() - self._began) / 1e9
            self._first = gpu, run
            return run
        # torch counts GPUs once.
        server = self._server if gpu.count == self._first[0].count else None
        forked = server.run(gpu, more, self._steps) if server is not None else None
        # torch reads these settings when CUDA is used; a release might when it is loaded.
        if forked is None or (more and any(one.devices and not one.expandable for one in forked.processes)):
            return self._in_process(gpu, more)
        return forked

    def _in_process(self, gpu: Gpu, more: Mapping[str, str]) -> ProgramRun:
        return run_on(gpu, self._command, {**self._environment, **more}, self._stop, self._steps)

    def prepare(self, others: Sequence[Gpu]) -> None:
        """After the first run, have the runs on the other GPUs be forks, if that is faster, and the same.

        What is forked ends with the thread that calls this.

        Args:
            others: The other GPUs.

        Raises:
            OSError: The program cannot be started.
            Stopped: The end was asked for.
        """
        assert self._first is not None
        first, run = self._first
        alike = [gpu for gpu in others if gpu.count == first.count]
        if not alike or len(run.processes) != 1 or not can_be_forked(self._command, sys.executable):
            return
        (process,) = run.processes
        if not forks_pay((process.began - self._began) / 1e9, self._seconds, len(alike), self._jobs):
            return
        program = Program(self._command, process.imported)
        server = self._close.enter_context(
            closing(ForkServer(alike[0], program, self._environment, self._jobs, self._stop))
        )
        again = server.run(first, {}, self._steps)
        if again is not None and _outcome(again, first) == _outcome(run, first):
            self._server = server
        else:
            server.close()


def _outcome(run: ProgramRun, gpu: Gpu) -> object:
    return found(run, gpu, CONTEXT_BYTES)


class ForkServer:
    """The process that is forked, and forks of it which serve further runs at the same time. They run until it is closed.

    Args:
        gpu: The GPU that packages find when they are imported.
        program: The program.
        environment: Its environment, but for what concerns the emulated GPU.
        jobs: The number of runs at a time, at most.
        stop: The signal that asks for the end of all.

    Raises:
        Stopped: The end was asked for.
    """

    def __init__(self, gpu: Gpu, program: Program, environment: Mapping[str, str], jobs: int, stop: Stop) -> None:
        self._stop = stop
        self._close = ExitStack()
        self._said = self._close.enter_context(run_folder())
        pipes = [Pipe() for _ in range(jobs)]
        self._idle: SimpleQueue[Connection] = SimpleQueue()
        """Connections to processes that serve no run now."""
        for ours, _ in pipes:
            self._idle.put(ours)
        theirs = [their.fileno() for _, their in pipes]
        with self._said.output.open("wb") as stdout, self._said.errors.open("wb") as stderr:
            self._process = subprocess.Popen(
                [program.command[0], "-c", CODE, program.folder, *map(str, theirs)],
                env=emulating(gpu, environment),
                stdin=subprocess.DEVNULL,
                stdout=stdout,
                stderr=stderr,
                pass_fds=theirs,
                # Ctrl-C in the terminal is for us; what runs is ended by us.
                start_new_session=True,
                preexec_fn=end_with_parent,  # noqa: PLW1509 - it makes one system call and takes no lock
            )
        for _, their in pipes:
            their.close()
        # It ends when they are closed.
        self._close.callback(self._end)
        for ours, _ in pipes:
            self._close.callback(ours.close)
        self._alive = True
        first = pipes[0][0]
        try:
            self._send(first, program)
            self._alive = self._received(first, stoppable=True) is None and self._alive
        except BaseException:
            self.close()
            raise

    def close(self) -> None:
        """End it."""
        self._close.close()

    def run(self, gpu: Gpu, more: Mapping[str, str], steps: int | None) -> ProgramRun | None:
        """Run the program in a fork; ``None`` where there can be none.

        Raises:
            Stopped: The end was asked for.
        """
        self._stop.check()
        if not self._alive:
            return None
        with run_folder() as folder:
            # Each process begins with what imports say.
            for said, own in ((self._said.output, folder.output), (self._said.errors, folder.errors)):
                shutil.copyfile(said, own)
            variables = {**more, **folder.variables(steps), EMULATED: gpu.device, DESCRIPTION: described(gpu)}
            connection = self._idle.get()
            try:
                status = self._status_of(connection, Fork(gpu, variables, str(folder.output), str(folder.errors)))
            except BaseException:
                self._alive = False  # what its server sends next is of this run
                raise
            self._idle.put(connection)
            return None if status is None else folder.run(status)

    def _status_of(self, connection: Connection, fork: Fork) -> int | None:
        self._send(connection, fork)
        # The server answers at once: a process whose id is not known could not be ended.
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

    def _send(self, connection: Connection, what: Program | Fork) -> None:
        with suppress(BrokenPipeError):  # that it has ended is seen by what it does not answer
            connection.send(what)

    def _received(self, connection: Connection, *, stoppable: bool) -> Any:
        """Return what a server sends; ``None`` if it has ended, as an import may have ended it."""
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
        # With what imports have started.
        with suppress(ProcessLookupError):
            os.killpg(self._process.pid, signal.SIGKILL)
        self._process.wait()
