"""Server that forks a program's process for each emulated GPU, from one in which the packages that it imports are loaded."""

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

from pytest_gpumem.emulated_process.before_torch import record_if_told_to
from pytest_gpumem.emulation.load import become, current_emulation
from pytest_gpumem.processes import end_with_parent

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

    from pytest_gpumem.emulation.gpus import Gpu

BY_NVML = "PYTORCH_NVML_BASED_CUDA_CHECK"
"""Set while packages are imported: torch asks NVML whether there is a GPU, then, and not CUDA, which no fork could use."""
CODE = """
import sys
if not getattr(sys.flags, "safe_path", False):
    sys.path[0] = sys.argv[1]
from pytest_gpumem.emulated_process.fork_server import serve
serve([int(descriptor) for descriptor in sys.argv[2:]])
"""
"""Code that a Python is started with to be the server: arguments are the program's folder and descriptors of connections."""


@dataclass(frozen=True, slots=True)
class Program:
    """A command of Python's."""

    command: tuple[str, ...]
    """``("/usr/bin/python", "train.py", "--batch", "8")`` or ``("python", "-m", "train")``."""
    imported: tuple[str, ...]
    """The modules to import before it is forked."""

    @property
    def folder(self) -> str:
        """The first of the folders in which it looks for modules."""
        return str(Path.cwd() if self.command[1] == "-m" else Path(self.command[1]).resolve().parent)


@dataclass(frozen=True, slots=True)
class Fork:
    """A process of the program that is asked for."""

    gpu: Gpu
    environment: dict[str, str]
    """Variables beside the server's own."""
    output: str
    """The file that standard output is added to."""
    errors: str


def serve(descriptors: Sequence[int]) -> None:
    """Import a program's packages, and fork its process as often as is asked; in each of them, be the program.

    To the `Program` that it is sent the server answers with the reason why it cannot fork, as a clause, or ``None``; to each
    `Fork` with the process's id, then with its exit status, which is negative where a signal ended it.

    Args:
        descriptors: Those of connections, each served by a process of its own once packages are imported: the first by this.
    """
    connections = [Connection(descriptor) for descriptor in descriptors]
    connection = connections[0]
    program: Program = connection.recv()
    _import(program.imported)
    connection.send(_why_not())
    connection, servers = _share(connections)
    asked = _wait_for_work(connection)
    if asked is None:
        for server in servers:
            os.waitpid(server, 0)
        os._exit(0)
    connection.close()
    _begin(asked)
    _run(program.command)


def _import(modules: Sequence[str]) -> None:
    given = os.environ.get(BY_NVML)
    os.environ[BY_NVML] = "1"
    for name in modules:
        # The program may have changed something before that, and imports it by itself then.
        with suppress(Exception):
            importlib.import_module(name)
    if given is None:
        del os.environ[BY_NVML]
    else:
        os.environ[BY_NVML] = given


def _share(connections: Sequence[Connection]) -> tuple[Connection, list[int]]:
    """Fork a server for each connection but the first; return the connection of this one, and the servers that it forked."""
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
            other.close()  # whoever holds it would hide that its server has ended
    return own, servers


def _wait_for_work(connection: Connection) -> Fork | None:
    """Fork a process for each run that is asked for, and return that in it; ``None`` here, when nothing more will be."""
    while True:
        try:
            asked: Fork = connection.recv()
        except EOFError:
            return None
        process = _forked()
        if not process:
            return asked
        connection.send(process)
        connection.send(os.waitstatus_to_exitcode(os.waitpid(process, 0)[1]))


def _forked() -> int:
    """Fork this process, and return the other one's id; 0 in that. It leads a process group, with what it starts itself."""
    sys.stdout.flush()
    sys.stderr.flush()
    with warnings.catch_warnings():
        # Python's, of threads: those of libraries (OpenBLAS) stop before a fork.
        warnings.simplefilter("ignore", DeprecationWarning)
        process = os.fork()
    if not process:
        end_with_parent()
    # In both: neither can go on before it is so. The other may have ended, or be another program by now.
    with suppress(ProcessLookupError, PermissionError):
        os.setpgid(process, 0)
    return process


def _why_not() -> str | None:
    emulation = current_emulation()
    if emulation is None:
        return "torch was not imported"
    if emulation.was_told():
        return "an import asks what the GPU is"
    return "an import starts threads" if threading.active_count() > 1 else None


def _begin(asked: Fork) -> None:
    """Be as if all that was imported were imported only now, on the GPU that is asked for."""
    for number, path in ((1, asked.output), (2, asked.errors)):
        file = os.open(path, os.O_WRONLY | os.O_APPEND)
        os.dup2(file, number)
        os.close(file)
    os.environ.update(asked.environment)
    become(asked.gpu)
    record_if_told_to()
    importlib.invalidate_caches()
    if numpy := sys.modules.get("numpy"):
        numpy.random.seed()  # Python's own generator is seeded anew in each fork


def _run(command: tuple[str, ...]) -> NoReturn:
    """Run the program as ``__main__``, and end as the interpreter does."""
    leave, loaded, files = os._exit, set(sys.modules), _open_files()  # the recorder replaces the first
    sys.orig_argv = list(command)
    given = vars(sys.modules["__main__"])
    sys.modules["__main__"] = ModuleType("__main__")
    vars(sys.modules["__main__"]).update(
        {"__builtins__": builtins}, **{name: {} for name in given if name == "__annotations__"}
    )
    status = _status_of(_run_module if command[1] == "-m" else _run_file, command)
    threading._shutdown()  # type: ignore[attr-defined] # noqa: SLF001 -- the interpreter's own way
    atexit._run_exitfuncs()  # noqa: SLF001 -- likewise
    # To end all objects, as the interpreter does, would take longer than most runs: only files are written to their end.
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
    """Let go of a module's values one by one, as the interpreter does: collected together, a file would lose its buffer."""
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
    """Run ``run`` and return the exit status, negative for Ctrl-C. An error is shown without the frames here."""
    try:
        run(command)
    except SystemExit as end:
        if end.code is None or isinstance(end.code, int):
            return (end.code or 0) & 0xFF
        print(end.code, file=sys.stderr)  # noqa: T201 -- as the interpreter does
        return 1
    except BaseException as error:  # noqa: BLE001
        own = 2
        shown = error.__traceback__
        while shown is not None and own:
            shown, own = shown.tb_next, own - 1
        sys.excepthook(type(error), error.with_traceback(shown), shown)
        return -signal.SIGINT if isinstance(error, KeyboardInterrupt) else 1
    return 0
