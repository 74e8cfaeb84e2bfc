"""A server that imports a program's packages once, and then forks a process for each run of the program.

Example: ``gpumem fit`` runs ``train.py`` on an emulated H100, A100 and L4. The server imports torch once, which takes some
seconds. Each of the three runs is a fork, in which torch is already imported.
"""

from __future__ import annotations

import atexit
import builtins
import gc
import importlib
import os
import runpy
import signal
import sys
import threading
import warnings
from contextlib import suppress
from dataclasses import dataclass
from importlib.machinery import SourceFileLoader
from multiprocessing.connection import Connection
from pathlib import Path
from types import ModuleType
from typing import TYPE_CHECKING, NoReturn

from pytest_gpumem.base.processes import end_with_parent
from pytest_gpumem.emulating.emulated_process.before_torch import record_if_told_to
from pytest_gpumem.emulating.emulation.load import become, current_emulation

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

    from pytest_gpumem.emulating.emulation.gpus import Gpu

BY_NVML = "PYTORCH_NVML_BASED_CUDA_CHECK"
"""Environment variable with which torch asks NVML for GPUs. The server sets it while it imports packages.

Otherwise torch would ask CUDA, and the server's forks could no longer use CUDA.
"""
CODE = """
import sys
if not getattr(sys.flags, "safe_path", False):
    sys.path[0] = sys.argv[1]
from pytest_gpumem.emulating.emulated_process.fork_server import serve
serve([int(descriptor) for descriptor in sys.argv[2:]])
"""
"""The server's code for ``python -c``. The command's arguments are `Program.folder` and descriptors of connections."""


@dataclass(frozen=True, slots=True)
class Program:
    """A program to run, sent to the server as its first message."""

    command: tuple[str, ...]
    """The command: ``("/usr/bin/python", "train.py", "--batch", "8")`` or ``("python", "-m", "train")``."""
    imported: tuple[str, ...]
    """The names of modules to import before the first fork."""

    @property
    def folder(self) -> str:
        """The program's own folder, which Python puts first in ``sys.path``."""
        return str(Path.cwd() if self.command[1] == "-m" else Path(self.command[1]).resolve().parent)


@dataclass(frozen=True, slots=True)
class Fork:
    """A request to run the program in a forked process."""

    gpu: Gpu
    environment: dict[str, str]
    """Environment variables for this run, in addition to the server's."""
    output: str
    """Path of the file to which standard output is appended."""
    errors: str
    """Path of the file to which standard error is appended."""


def serve(descriptors: Sequence[int]) -> None:
    """Import a program's packages, and fork a process for each run of the program.

    The server receives a `Program`, and answers with ``None`` or with the reason why the server cannot fork. Then it receives
    any number of `Fork` requests. The answer to a request is the forked process's id and, after the process has ended, its exit
    status, which is negative if a signal ended the process.

    In a forked process, this function runs the program and does not return.

    Args:
        descriptors: File descriptors of connections. This process serves the first connection, and forks a server for each
            further connection, so several runs can take place at the same time.
    """
    connections = [Connection(descriptor) for descriptor in descriptors]
    connection = connections[0]
    program: Program = connection.recv()
    _import(program.imported)
    connection.send(_why_not())
    connection, servers = _share(connections)
    request = _wait_for_work(connection)
    if request is None:
        for server in servers:
            os.waitpid(server, 0)
        os._exit(0)
    connection.close()
    _begin(request)
    _run(program.command)


def _import(modules: Sequence[str]) -> None:
    previous = os.environ.get(BY_NVML)
    os.environ[BY_NVML] = "1"
    for name in modules:
        # An import may fail here, because the program sets something up first. Then the program itself imports the module.
        with suppress(Exception):
            importlib.import_module(name)
    if previous is None:
        del os.environ[BY_NVML]
    else:
        os.environ[BY_NVML] = previous


def _share(connections: Sequence[Connection]) -> tuple[Connection, list[int]]:
    """Fork a server for each connection except the first.

    Returns:
        The connection of the current process, and the ids of its forked servers. In a forked server, there are no ids.
    """
    own = connections[0]
    servers: list[int] = []
    for other in connections[1:]:
        server = _forked()
        if not server:
            own, servers = other, []
            break
        servers.append(server)
    for other in connections:
        if other is not own:
            other.close()  # with an open copy, the client would not notice if the connection's server ended
    return own, servers


def _wait_for_work(connection: Connection) -> Fork | None:
    """Receive requests, and fork a process for each of them.

    Returns:
        In a forked process, its request. In the server, ``None`` after the client has closed the connection.
    """
    while True:
        try:
            request: Fork = connection.recv()
        except EOFError:
            return None
        process = _forked()
        if not process:
            return request
        connection.send(process)
        connection.send(os.waitstatus_to_exitcode(os.waitpid(process, 0)[1]))


def _forked() -> int:
    """Fork this process. Return the child's id in the parent, and 0 in the child, which leads a new process group."""
    sys.stdout.flush()
    sys.stderr.flush()
    with warnings.catch_warnings():
        # Python warns if there are threads, but libraries such as OpenBLAS stop their threads before a fork.
        warnings.simplefilter("ignore", DeprecationWarning)
        process = os.fork()
    if not process:
        end_with_parent()
    # Parent and child both set the child's group, so neither continues before the group exists. In the parent, the call fails
    # if the child has ended or has started another program.
    with suppress(ProcessLookupError, PermissionError):
        os.setpgid(process, 0)
    return process


def _why_not() -> str | None:
    emulation = current_emulation()
    if emulation is None:
        return "torch was not imported"
    if emulation.was_told():
        return "an imported module reads the GPU's properties"
    return "an imported module starts threads" if threading.active_count() > 1 else None


def _begin(request: Fork) -> None:
    """Set up a forked process: its output files, its environment variables and the requested GPU."""
    for number, path in ((1, request.output), (2, request.errors)):
        file = os.open(path, os.O_WRONLY | os.O_APPEND)
        os.dup2(file, number)
        os.close(file)
    os.environ.update(request.environment)
    become(request.gpu)
    record_if_told_to()
    importlib.invalidate_caches()
    if numpy := sys.modules.get("numpy"):
        numpy.random.seed()  # Python seeds its own random numbers in each fork, but not NumPy's


def _run(command: tuple[str, ...]) -> NoReturn:
    """Run the program as ``__main__``, and then end the process in the same way as the interpreter."""
    leave, loaded, files = os._exit, set(sys.modules), _open_files()  # the usage recorder will replace `os._exit`
    sys.orig_argv = list(command)
    server_main = vars(sys.modules["__main__"])
    sys.modules["__main__"] = ModuleType("__main__")
    vars(sys.modules["__main__"]).update(
        {"__builtins__": builtins}, **{name: {} for name in server_main if name == "__annotations__"}
    )
    status = _status_of(_run_module if command[1] == "-m" else _run_file, command)
    threading._shutdown()  # type: ignore[attr-defined] # noqa: SLF001 -- the interpreter calls it at exit, too
    atexit._run_exitfuncs()  # noqa: SLF001 -- likewise
    # The interpreter would destroy all objects at exit, which takes longer than most programs run. Here objects are destroyed
    # only if the program has left files open, because destroying a file object writes its buffer.
    if _open_files() - files:
        for name in ["__main__", *(name for name in sys.modules if name not in loaded)]:
            _clear(sys.modules.pop(name, None))
        gc.collect()
    for stream in (sys.stdout, sys.stderr):
        with suppress(Exception):
            stream.flush()
    if status < 0:
        signal.signal(-status, signal.SIG_DFL)
        os.kill(os.getpid(), -status)
    leave(status)


def _clear(module: ModuleType | None) -> None:
    """Release a module's values one after another, as the interpreter does at exit.

    If the garbage collector destroyed all values together, files could lose buffered data.
    """
    values = vars(module) if isinstance(module, ModuleType) else {}
    for name in [name for name in values if name != "__builtins__"]:
        values[name] = None


def _open_files() -> set[str]:
    return {str(file.readlink()) for file in Path("/proc/self/fd").iterdir() if file.is_symlink()}


def _run_module(command: tuple[str, ...]) -> None:
    sys.argv = [command[1], *command[3:]]
    runpy._run_module_as_main(command[2])  # type: ignore[attr-defined] # noqa: SLF001 -- likewise


def _run_file(command: tuple[str, ...]) -> None:
    sys.argv = list(command[1:])
    path = command[1] if Path(command[1]).is_absolute() else f"{Path.cwd()}/{command[1]}"
    main = vars(sys.modules["__main__"])
    main.update(__file__=path, __loader__=SourceFileLoader("__main__", path))
    if sys.version_info < (3, 15):
        main["__cached__"] = None
    exec(compile(Path(path).read_bytes(), path, "exec", dont_inherit=True), main)  # noqa: S102


def _status_of(run: Callable[[tuple[str, ...]], None], command: tuple[str, ...]) -> int:
    """Call ``run``, and return the program's exit status, which is negative after Ctrl-C.

    If the program raises an error, print its traceback without the frames of this module.
    """
    try:
        run(command)
    except SystemExit as end:
        if end.code is None or isinstance(end.code, int):
            return (end.code or 0) & 0xFF
        print(end.code, file=sys.stderr)  # noqa: T201 -- the interpreter prints it, too
        return 1
    except BaseException as error:  # noqa: BLE001
        own_frames = 2
        traceback = error.__traceback__
        while traceback is not None and own_frames:
            traceback, own_frames = traceback.tb_next, own_frames - 1
        sys.excepthook(type(error), error.with_traceback(traceback), traceback)
        return -signal.SIGINT if isinstance(error, KeyboardInterrupt) else 1
    return 0
