"""Server that imports a program's packages once, and forks a process of the program for each emulated GPU.

Example: `gpumem fit` runs ``train.py`` on `h100`, `a100` and `l4`. The server imports torch once, which takes some seconds, and
each of the three forks starts with torch already imported.
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
"""Set while packages are imported, so torch asks NVML for GPUs. A fork could not use CUDA after its parent has used it."""
CODE = """
import sys
if not getattr(sys.flags, "safe_path", False):
    sys.path[0] = sys.argv[1]
from pytest_gpumem.emulating.emulated_process.fork_server import serve
serve([int(descriptor) for descriptor in sys.argv[2:]])
"""
"""The server's Python code (for ``python -c``). Its arguments are the program's folder and the connections' descriptors."""


@dataclass(frozen=True, slots=True)
class Program:
    """A Python command."""

    command: tuple[str, ...]
    """``("/usr/bin/python", "train.py", "--batch", "8")`` or ``("python", "-m", "train")``."""
    imported: tuple[str, ...]
    """The modules to import before the first fork."""

    @property
    def folder(self) -> str:
        """The first folder in which the program searches for modules."""
        return str(Path.cwd() if self.command[1] == "-m" else Path(self.command[1]).resolve().parent)


@dataclass(frozen=True, slots=True)
class Fork:
    """A request for a process of the program."""

    gpu: Gpu
    environment: dict[str, str]
    """Environment variables in addition to the server's own."""
    output: str
    """The file to which standard output is appended."""
    errors: str
    """The file to which standard error is appended."""


def serve(descriptors: Sequence[int]) -> None:
    """Import a program's packages, and fork a process of the program for each request.

    The server answers a `Program` with ``None``, or with the reason why it cannot fork, as a clause. It answers each `Fork`
    with the process's id, and later with its exit status, which is negative if a signal ended the process.

    In a forked process, this function runs the program and does not return.

    Args:
        descriptors: File descriptors of connections. This process serves the first connection, and forks a server for each
            other connection.
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
        # If this import fails, the program imports the module itself, because the program may set up something first.
        with suppress(Exception):
            importlib.import_module(name)
    if previous is None:
        del os.environ[BY_NVML]
    else:
        os.environ[BY_NVML] = previous


def _share(connections: Sequence[Connection]) -> tuple[Connection, list[int]]:
    """Fork a server for each connection except the first.

    Returns:
        The connection of the current process, and the ids of the servers that it forked.
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
            other.close()  # an open copy would hide the end of the connection's server
    return own, servers


def _wait_for_work(connection: Connection) -> Fork | None:
    """Fork a process for each request.

    Returns:
        The request in a forked process; ``None`` in the server, after the connection was closed.
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
    """Fork this process, and return the child's id, or 0 in the child. The child leads a new process group."""
    sys.stdout.flush()
    sys.stderr.flush()
    with warnings.catch_warnings():
        # Python warns about threads, but the threads of libraries such as OpenBLAS stop before a fork.
        warnings.simplefilter("ignore", DeprecationWarning)
        process = os.fork()
    if not process:
        end_with_parent()
    # Both processes set the group, so neither continues without it. The child may have ended, or run another program already.
    with suppress(ProcessLookupError, PermissionError):
        os.setpgid(process, 0)
    return process


def _why_not() -> str | None:
    emulation = current_emulation()
    if emulation is None:
        return "torch was not imported"
    if emulation.was_told():
        return "an import asks for the GPU's properties"
    return "an import starts threads" if threading.active_count() > 1 else None


def _begin(request: Fork) -> None:
    """Set up the forked process for the requested GPU, as if it had imported all modules itself."""
    for number, path in ((1, request.output), (2, request.errors)):
        file = os.open(path, os.O_WRONLY | os.O_APPEND)
        os.dup2(file, number)
        os.close(file)
    os.environ.update(request.environment)
    become(request.gpu)
    record_if_told_to()
    importlib.invalidate_caches()
    if numpy := sys.modules.get("numpy"):
        numpy.random.seed()  # Python seeds its own generator in each fork


def _run(command: tuple[str, ...]) -> NoReturn:
    """Run the program as ``__main__``, and end the process as the interpreter does."""
    leave, loaded, files = os._exit, set(sys.modules), _open_files()  # the usage recorder replaces `os._exit`
    sys.orig_argv = list(command)
    server_main = vars(sys.modules["__main__"])
    sys.modules["__main__"] = ModuleType("__main__")
    vars(sys.modules["__main__"]).update(
        {"__builtins__": builtins}, **{name: {} for name in server_main if name == "__annotations__"}
    )
    status = _status_of(_run_module if command[1] == "-m" else _run_file, command)
    threading._shutdown()  # type: ignore[attr-defined] # noqa: SLF001 -- the interpreter's own way
    atexit._run_exitfuncs()  # noqa: SLF001 -- likewise
    # The interpreter destroys all objects at exit, which would take longer than most runs. Here only open files are flushed.
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
    """Release a module's values one by one, as the interpreter does.

    If all values were collected together, files could lose data.
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
    """Call ``run`` and return the exit status, negative for Ctrl-C. Errors are printed without the frames of this module."""
    try:
        run(command)
    except SystemExit as end:
        if end.code is None or isinstance(end.code, int):
            return (end.code or 0) & 0xFF
        print(end.code, file=sys.stderr)  # noqa: T201 -- as the interpreter does
        return 1
    except BaseException as error:  # noqa: BLE001
        own_frames = 2
        traceback = error.__traceback__
        while traceback is not None and own_frames:
            traceback, own_frames = traceback.tb_next, own_frames - 1
        sys.excepthook(type(error), error.with_traceback(traceback), traceback)
        return -signal.SIGINT if isinstance(error, KeyboardInterrupt) else 1
    return 0
