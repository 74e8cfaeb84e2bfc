"""Runs of a program on several emulated GPUs: the first is a process of its own, the others are forks where that is the same.

To import torch, and what else a program does, takes most of a run's time. The first run tells what the program imports. Another
process then imports that, too, and each further run is a fork of it: the program from its beginning, on another GPU.
"""

from __future__ import annotations

import os
import shutil
import signal
import subprocess
import sys
import time
from contextlib import ExitStack, closing
from multiprocessing import Pipe
from pathlib import Path
from typing import TYPE_CHECKING, Any

from pytest_gpumem.emulated_process.before_torch import DESCRIPTION
from pytest_gpumem.emulated_process.fork_server import CODE, Fork, Program
from pytest_gpumem.emulated_process.start import VARIABLE
from pytest_gpumem.emulation.gpus import described
from pytest_gpumem.emulation.load import CONTEXT_BYTES
from pytest_gpumem.fit.outcome import found
from pytest_gpumem.fit.run import emulating, run_folder, run_on

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence

    from pytest_gpumem.emulation.gpus import Gpu
    from pytest_gpumem.fit.outcome import ProgramRun


def can_be_forked(command: Sequence[str], python: str) -> bool:
    """Return whether a command is this Python with a file or a module, and without options of Python's own.

    Args:
        command: The command.
        python: The path of this Python. A link to it in another folder is that of another environment.
    """
    there = shutil.which(command[0])
    if there is None or len(command) < 2:
        return False
    same = Path(there).absolute().parent == Path(python).absolute().parent and Path(there).samefile(python)
    module = command[1] == "-m" and len(command) > 2
    return same and (module or (command[1].endswith(".py") and not command[1].startswith("-")))


def forks_pay(before_cuda: float, whole: float, others: int) -> bool:
    """Return whether forks are faster: what a program imports is imported once more for them, and its first run is repeated.

    Args:
        before_cuda: Seconds in which the first run did not use CUDA yet, most of which are imports.
        whole: Its seconds in all.
        others: The number of the other GPUs.
    """
    return before_cuda + whole < others * before_cuda


class ProgramRuns:
    """Runs of a program on GPUs, one after the other.

    Args:
        command: The program and its arguments.
        environment: Its environment, but for what concerns the emulated GPU.
        steps: After how many steps of an optimizer to end it; ``None`` for not before it ends.
        gpus: The number of GPUs that it will run on, if nothing ends that earlier.
    """

    def __init__(self, command: Sequence[str], environment: Mapping[str, str], steps: int | None, gpus: int) -> None:
        self._command, self._environment, self._steps = tuple(command), environment, steps
        self._others = gpus - 1
        self._first: tuple[Gpu, ProgramRun] | None = None
        self._began = 0
        self._seconds = 0.0
        self._server: ForkServer | None = None
        self._asked = False
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
        """
        if self._first is None:
            self._began = time.monotonic_ns()
            run = self._in_process(gpu, more)
            self._seconds = (time.monotonic_ns() - self._began) / 1e9
            self._first = gpu, run
            return run
        server = self._server_for(gpu)
        forked = server.run(gpu, more, self._steps) if server is not None else None
        # torch reads these settings when CUDA is used; a release might when it is loaded.
        if forked is None or (more and any(one.devices and not one.expandable for one in forked.processes)):
            return self._in_process(gpu, more)
        return forked

    def _in_process(self, gpu: Gpu, more: Mapping[str, str]) -> ProgramRun:
        return run_on(gpu, self._command, {**self._environment, **more}, self._steps)

    def _server_for(self, gpu: Gpu) -> ForkServer | None:
        """Return the server if a fork of it is what a process is."""
        assert self._first is not None
        first, run = self._first
        # torch counts GPUs once.
        if gpu.count != first.count:
            return None
        if not self._asked:
            self._asked = True
            if len(run.processes) != 1 or not can_be_forked(self._command, sys.executable):
                return None
            (process,) = run.processes
            if not forks_pay((process.began - self._began) / 1e9, self._seconds, self._others):
                return None
            server = self._close.enter_context(
                closing(ForkServer(gpu, Program(self._command, process.imported), self._environment))
            )
            again = server.run(first, {}, self._steps)
            if again is not None and _outcome(again, first) == _outcome(run, first):
                self._server = server
            else:
                server.close()
        return self._server


def _outcome(run: ProgramRun, gpu: Gpu) -> object:
    return found(run, gpu, CONTEXT_BYTES)


class ForkServer:
    """The process that is forked. It runs until it is closed."""

    def __init__(self, gpu: Gpu, program: Program, environment: Mapping[str, str]) -> None:
        self._close = ExitStack()
        self._said = self._close.enter_context(run_folder())
        self._connection, theirs = Pipe()
        self._close.callback(self._connection.close)
        with theirs, self._said.output.open("wb") as stdout, self._said.errors.open("wb") as stderr:
            self._process = subprocess.Popen(
                [program.command[0], "-c", CODE, program.folder, str(theirs.fileno())],
                env=emulating(gpu, environment),
                stdin=subprocess.DEVNULL,
                stdout=stdout,
                stderr=stderr,
                pass_fds=[theirs.fileno()],
            )
        self._close.callback(self._end)
        self._alive = True
        self._connection.send(program)
        self._alive = self._received() is None and self._alive

    def close(self) -> None:
        """End it."""
        self._close.close()

    def run(self, gpu: Gpu, more: Mapping[str, str], steps: int | None) -> ProgramRun | None:
        """Run the program in a fork; ``None`` where there can be none."""
        if not self._alive:
            return None
        with run_folder() as folder:
            # Each process begins with what imports say.
            for said, own in ((self._said.output, folder.output), (self._said.errors, folder.errors)):
                shutil.copyfile(said, own)
            variables = {**more, **folder.variables(steps), VARIABLE: gpu.device, DESCRIPTION: described(gpu)}
            status = self._status_of(Fork(gpu, variables, str(folder.output), str(folder.errors)))
            return None if status is None else folder.run(status)

    def _status_of(self, fork: Fork) -> int | None:
        self._connection.send(fork)
        process = self._received()
        if process is None:
            return None
        try:
            status: int | None = self._received()
        except BaseException:
            os.kill(process, signal.SIGKILL)
            raise
        return status

    def _received(self) -> Any:
        """Return what the server sends; ``None`` if it has ended, as an import may have ended it."""
        try:
            return self._connection.recv()
        except (EOFError, ConnectionResetError):
            self._alive = False
            return None

    def _end(self) -> None:
        self._process.kill()
        self._process.wait()
