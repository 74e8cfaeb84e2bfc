"""`python`, `pytest` and `gpumem` for scripts, without the seconds that torch takes to load: forks of one process that has it.

`Commands` puts them into a folder for ``PATH``. `python` stands for sessions of pytest, commands of `gpumem`, workers of
pytest-xdist and, where one says so (``-X forked``, then ``-c``, ``-m`` or a file), any code, and is the interpreter for everything
else. A fork that is killed takes its command with it, and a command that is killed its fork. `pip install` is written down
and not run, and what `python -m venv` makes has them, too. Where a GPU is emulated, a fork may have another one of the same
capability: the environment names it. Run as a script, this is the process that is forked.
"""

from __future__ import annotations

import atexit
import contextlib
import ctypes
import dataclasses
import fcntl
import gc
import importlib
import importlib.metadata
import json
import marshal
import os
import pkgutil
import runpy
import select
import signal
import socket
import subprocess
import sys
import tempfile
import traceback
from pathlib import Path
from typing import TYPE_CHECKING, NoReturn

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping
    from contextlib import AbstractContextManager

_CLIENT = """\
#!{python} -SE
# With built-in modules only: it begins in half the time.
import array, marshal, os, _signal, _socket, sys
name, arguments = os.path.basename(sys.argv[0]), sys.argv[1:]
if name.startswith("python"):
    words = list(arguments)
    while words[:1] in (["-I"], ["-u"]):
        del words[0]
    if words[:1] == ["-mpytest"]:
        words[:1] = ["-m", "pytest"]
    if words[:2] == ["-m", "venv"]:
        # One in which all that is here is installed: these commands.
        import shutil
        shutil.copytree(os.path.dirname(os.path.abspath(sys.argv[0])), os.path.join(words[-1], "bin"))
        sys.exit(0)
    if words[:3] == ["-m", "pip", "install"]:
        name, arguments = "pip", words[2:]
    elif words[:2] in (["-m", "pytest"], ["-m", "pytest_gpumem.cli.main"]):
        name, arguments = {{"pytest": "-m pytest"}}.get(words[1], "gpumem"), words[2:]
    elif words[:3] == ["-X", "forked", "-c"]:
        name, arguments = "-c", words[3:]
    elif words[:2] == ["-X", "forked"]:
        name, arguments = "forked", words[2:]
    elif words[:1] == ["-c"] and "sys.stdin.readline" in words[1]:
        name, arguments = "-c", words[1:]  # a worker of pytest-xdist
    else:
        os.execv({python!r}, [{python!r}, *arguments])
loaded = {{key: value for key, value in os.environ.items() if key.startswith({read_when_loaded!r})}}
if "backend:" not in loaded.get("PYTORCH_CUDA_ALLOC_CONF", ""):
    loaded.pop("PYTORCH_CUDA_ALLOC_CONF", None)
if loaded != {loaded!r} and name != "pip":
    own = {{"pytest": ["-m", "pytest"], "gpumem": ["-m", "pytest_gpumem.cli.main"]}}
    words = own.get(os.path.basename(sys.argv[0]), [])
    os.execv({python!r}, [{python!r}, *words, *sys.argv[1:]])
if name == "pip":
    import json
    with open({log!r}, "a") as log:
        print(json.dumps(arguments), file=log)
    sys.exit(0)
server = _socket.socket(_socket.AF_UNIX)
server.connect({address!r})
told = marshal.dumps([name, arguments, os.getcwd(), dict(os.environ), sys.argv[0]])
closed_with_this, _ = os.pipe()
streams = [(_socket.SOL_SOCKET, _socket.SCM_RIGHTS, array.array("i", [0, 1, 2, closed_with_this]))]
server.sendmsg([len(told).to_bytes(8, "big")], streams)
server.sendall(told)
for number in (0, 1, 2):
    os.close(number)  # who reads them waits for the command to close them, not for this
process = int(server.recv(8, _socket.MSG_WAITALL))
for number in (_signal.SIGINT, _signal.SIGTERM):
    _signal.signal(number, lambda number, frame: os.kill(process, number))
code = server.recv(8, _socket.MSG_WAITALL)
if not code:
    os.kill(os.getpid(), 9)
os._exit(int(code))
"""
_READ_WHEN_LOADED = ("MKL_", "OMP_", "PYTORCH_")
"""Variables that begin so are read when torch is loaded: with others a command is a process of its own.

Those of CUDA are read when it is first used, which is never in the process that is forked, and so are settings of its allocator
but for which one it is.
"""
LOADED_OUT_OF_SIGHT = "GPUMEM_SUITE_LOADED_OUT_OF_SIGHT"
"""The variable with which a command does not see what was loaded before, as in `tests.heap`.

The two collections with which each session of pytest ends would otherwise write to every object, and take most of its time.
"""
_PLUGINS = ("anyio",)
"""Not pytest-xdist, nor what loads it (pytest-rerunfailures): what is on the path then is what its workers get."""
_LOADED_BY_PYTEST = (
    "_pytest.faulthandler",
    "_pytest.junitxml",
    "anyio.pytest_plugin",
    "anyio._backends._asyncio",
    "execnet",
)
_NAMES = ("python", "python3", "pytest", "gpumem", "pip")


class Commands:
    """The commands in ``folder``, until `close`."""

    def __init__(self, folder: Path, environment: Mapping[str, str] = os.environ) -> None:
        """``environment`` is that of the process that is forked."""
        self.folder = folder
        self._log = folder / "pip.log"
        # The path of a socket may have about 100 characters, and that of a test's folder may have more.
        self._place = tempfile.TemporaryDirectory(prefix="gpumem-", dir="/tmp")
        address = f"{self._place.name}/commands"
        loaded = {name: value for name, value in environment.items() if name.startswith(_READ_WHEN_LOADED)}
        if "backend:" not in loaded.get("PYTORCH_CUDA_ALLOC_CONF", ""):
            loaded.pop("PYTORCH_CUDA_ALLOC_CONF", None)
        text = _CLIENT.format(
            python=sys.executable,
            log=str(self._log),
            address=address,
            loaded=loaded,
            read_when_loaded=_READ_WHEN_LOADED,
        )
        for name in _NAMES:
            (folder / name).write_text(text, encoding="utf-8")
            (folder / name).chmod(0o755)
        self._process = subprocess.Popen(
            [sys.executable, __file__, address],
            cwd=self._place.name,  # and not a test's folder, in which nothing may be left
            env=environment,
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            text=True,
        )
        assert self._process.stdout is not None
        assert self._process.stdout.readline() == "ready\n"

    @property
    def python(self) -> str:
        return str(self.folder / "python")

    def installed(self) -> list[list[str]]:
        """The arguments of each ``pip`` so far, without ``install``."""
        lines = self._log.read_text(encoding="utf-8").splitlines() if self._log.exists() else []
        return [json.loads(line)[1:] for line in lines]

    def close(self) -> None:
        self._process.communicate()
        self._place.cleanup()


def _serve(address: str) -> None:
    """Fork for every command that is asked for, until standard input ends."""
    import heap
    import jinja2  # noqa: F401
    import plotly.offline  # noqa: F401
    import pytest  # noqa: F401
    import torch._inductor  # optimizers load it
    import torch.distributed.fsdp
    import torch.distributed.optim
    import torch.distributed.pipelining
    import torch.distributed.run
    import torch.distributed.tensor.parallel  # noqa: F401
    from installed import read_installed_packages_once

    import pytest_gpumem

    for module in pkgutil.walk_packages(pytest_gpumem.__path__, "pytest_gpumem."):
        importlib.import_module(module.name)
    for name in _LOADED_BY_PYTEST:
        with contextlib.suppress(ModuleNotFoundError):
            importlib.import_module(name)
    for name in {"pytest_gpumem", *_PLUGINS}.intersection(sys.modules):
        # Or pytest would warn that assertions in it are not rewritten.
        sys.modules[name].__doc__ = "PYTEST_DONT_REWRITE"
    read_installed_packages_once()
    list(importlib.metadata.entry_points())
    assert "xdist" not in sys.modules
    # A collection would write to every object, and each fork have all of them for its own.
    gc.collect()
    gc.freeze()
    # The commands do not find this file's neighbours, of whose names a test may have files.
    sys.path.pop(0)
    del sys.modules["heap"], sys.modules["installed"]
    signal.signal(signal.SIGCHLD, signal.SIG_IGN)
    with socket.socket(socket.AF_UNIX) as server:
        server.bind(address)
        server.listen()
        sys.stdout.write("ready\n")
        sys.stdout.flush()
        while server in select.select([server, sys.stdin], [], [])[0]:
            client, _ = server.accept()
            with client:
                if os.fork() == 0:
                    server.close()
                    _run(client, heap.own_objects_out_of_sight)


def _run(client: socket.socket, out_of_sight: Callable[[], AbstractContextManager[None]]) -> NoReturn:
    """Be the command that ``client`` asks for, with its streams, folder and environment, and tell it the exit code."""
    signal.signal(signal.SIGCHLD, signal.SIG_DFL)
    size, (*streams, closed_with_command), _, _ = socket.recv_fds(client, 8, 4)
    with client.makefile("rb") as sent:
        name, arguments, folder, environment, executable = marshal.loads(sent.read(int.from_bytes(size, "big")))
    for number, stream in enumerate(streams):
        os.dup2(stream, number)
        os.close(stream)
    hidden = out_of_sight()
    if LOADED_OUT_OF_SIGHT in environment:
        hidden.__enter__()
    else:
        gc.unfreeze()  # a session freezes objects itself, and sees whether others did
    process = os.getpid()
    if hasattr(fcntl, "F_SETSIG"):  # on Linux: nothing is ever written there
        fcntl.fcntl(closed_with_command, fcntl.F_SETOWN, process)
        fcntl.fcntl(closed_with_command, fcntl.F_SETSIG, signal.SIGKILL)
        fcntl.fcntl(closed_with_command, fcntl.F_SETFL, os.O_ASYNC)
    client.sendall(b"%8d" % process)
    os.chdir(folder)
    os.environ.clear()
    os.environ.update(environment)
    sys.executable = executable
    sys.dont_write_bytecode = "PYTHONDONTWRITEBYTECODE" in environment
    sys.argv = [name, *arguments]
    sys.path[:0] = [path for path in environment.get("PYTHONPATH", "").split(os.pathsep) if path]
    if name == "-m pytest":
        sys.path.insert(0, folder)
    _emulate(environment.get("GPUMEM_EMULATED"))
    leave = os._exit

    def tell_and_leave(code: int) -> NoReturn:
        if os.getpid() == process:  # and not a child of its own
            client.sendall(b"%8d" % code)
        leave(code)

    os._exit = tell_and_leave
    code = _status_of(name, arguments)
    atexit._run_exitfuncs()
    for stream in (sys.stdout, sys.stderr):
        with contextlib.suppress(OSError, ValueError):
            stream.flush()
    for number in (0, 1, 2):
        os.close(number)
    tell_and_leave(int(code) if isinstance(code, int) else 1)


def _emulate(word: str | None) -> None:
    """Be as if torch were only loaded now, where a GPU is emulated: on that which ``word`` names, and recorded if need be."""
    from pytest_gpumem.emulation import before_torch, load

    there = load.current_emulation()
    if there is None or word is None:
        return
    gpu = load.emulated_gpu(word)
    assert gpu.capability == there.gpu.capability, "which kernels it runs was chosen when torch was loaded"
    there.runtime.gpumem_configure(ctypes.byref(load._configuration(gpu)))
    load._loaded[:] = [dataclasses.replace(there, gpu=gpu)]
    before_torch.record_if_told_to()


def _status_of(name: str, arguments: list[str]) -> object:
    """Run the command, and return what it exits with."""
    try:
        if name == "forked":
            if arguments[0] == "-m":
                sys.argv = arguments[1:]
                runpy.run_module(arguments[1], run_name="__main__", alter_sys=True)
            else:
                sys.argv = arguments
                sys.path.insert(0, str(Path(arguments[0]).resolve().parent))
                runpy.run_path(arguments[0], run_name="__main__")
            return 0
        if name == "-c":
            sys.argv = ["-c", *arguments[1:]]
            sys.path.insert(0, "")
            exec(arguments[0], {"__name__": "__main__"})
            return 0
        if "pytest" in name:
            import pytest

            return pytest.main()
        from pytest_gpumem.cli.main import main

        main()
    except SystemExit as end:
        return end.code or 0
    except BaseException:  # noqa: BLE001 -- as the interpreter would
        traceback.print_exc()
    return 1


if __name__ == "__main__":
    _serve(sys.argv[1])
