"""Processes that begin with torch loaded: children of `multiprocessing`'s forkserver, which imports it once.

An interpreter of its own needs 3 to 6 seconds until it has measured a first step. `run` and `start` take what would follow
``python`` on a command line, and are otherwise as those of `subprocess`. What such a process starts is real: workers of
pytest-xdist, ranks of torchrun, programs. So must be whatever depends on how torch is loaded.
"""

from __future__ import annotations

import atexit
import functools
import multiprocessing
import multiprocessing.forkserver
import os
import pkgutil
import runpy
import subprocess
import sys
import tempfile
import time
import weakref
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING
from unittest import mock

import pytest

import pytest_gpumem

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator, Mapping

_CONTEXT = multiprocessing.get_context("forkserver")
# Those of CUDA are read when it is first used, which the forkserver does not.
_READ_WHEN_LOADED = ("MKL_", "OMP_", "PYTORCH_")
_ALLOCATOR = "PYTORCH_CUDA_ALLOC_CONF"
_PRELOADED = (
    "_hypothesis_pytestplugin",
    "anyio.pytest_plugin",
    "hypothesis.internal.observability",  # its plugin loads it at the end of a session
    "jinja2",
    "platformdirs.pytest_plugin",
    "pytest",
    "pytest_benchmark.plugin",
    "pytest_benchmark.storage.file",
    "pytest_memray",
    "torch._inductor",  # optimizers load it
    "torch.distributed.fsdp",
    "torch.distributed.optim",
    "torch.distributed.pipelining",
    "torch.distributed.run",
    "torch.distributed.tensor.parallel",
)
"""Beside the package. Not pytest-xdist: what is on the path when it is imported is what its workers get."""
_REWRITTEN = (
    "_hypothesis_globals",
    "_hypothesis_pytestplugin",
    "anyio",
    "hypothesis",
    "platformdirs",
    "pytest_benchmark",
    "pytest_gpumem",
    "pytest_gpumem.plugin",
    "pytest_memray",
)
"""Packages and modules of plugins among these."""
ALONE = {"PYTEST_DISABLE_PLUGIN_AUTOLOAD": "1", "PYTEST_PLUGINS": "pytest_gpumem.plugin"}
"""Variables with which a session has this plugin and no other: to look for them takes a quarter of a short one."""
_environment: dict[str, str] = {}
_more: list[str] = []


def load_as_well(module: str) -> None:
    """Have the forkserver import this module, too, where a file is collected whose processes would need seconds for it."""
    if module not in _more:
        _more.append(module)


def begin_with(environment: Mapping[str, str]) -> None:
    """Note the environment that the forkserver is to have, the suite's. The test that starts it first may have another."""
    _environment.update(environment)


@functools.cache
def begin() -> None:
    """Start the forkserver, once, and do not wait until it has imported everything."""
    package = [module.name for module in pkgutil.walk_packages(pytest_gpumem.__path__, "pytest_gpumem.")]
    _CONTEXT.set_forkserver_preload([*_PRELOADED, *package, *_more])
    with _as_the_suite():
        multiprocessing.forkserver.ensure_running()


@functools.cache
def load() -> list[str]:
    """Start the forkserver, and return the path of modules that an interpreter has here without ``PYTHONPATH``."""
    begin()
    with _as_the_suite():
        first = _CONTEXT.Process(target=int)
        first.start()
        first.join()
        os.environ.pop("PYTHONPATH", None)
        code = "import sys; print(*sys.path[1:], sep='\\n')"
        done = subprocess.run([sys.executable, "-c", code], stdout=subprocess.PIPE, text=True, check=True)
    return done.stdout.splitlines()


@contextmanager
def _as_the_suite() -> Iterator[None]:
    with mock.patch.dict(os.environ, _environment, clear=True), pytest.MonkeyPatch.context() as patch:
        patch.chdir(Path(__file__).parents[1])  # where the forkserver stays, and not in a test's folder
        yield


class Process:
    """A process that runs, as `subprocess.Popen` has it; see `start`."""

    def __init__(self, *arguments: str, cwd: Path, env: Mapping[str, str], before: Callable[[], None] | None) -> None:
        assert is_loaded_for(env), "torch is loaded with other variables"
        path = load()
        self._arguments = arguments
        self._folder = tempfile.TemporaryDirectory(prefix="gpumem-process-")
        self._out, self._err = (Path(self._folder.name, name) for name in ("stdout", "stderr"))
        told = (arguments, str(cwd), dict(env), (str(self._out), str(self._err)), path, before)
        self._process = _CONTEXT.Process(target=_be, args=told)
        self._process.start()
        assert self._process.pid is not None
        self.pid: int = self._process.pid

    @property
    def returncode(self) -> int | None:
        return self._process.exitcode

    def poll(self) -> int | None:
        return self._process.exitcode

    def kill(self) -> None:
        self._process.kill()

    def wait(self, timeout: float) -> None:
        """Wait until it ends, ``timeout`` seconds at most."""
        self._process.join(timeout)

    def communicate(self, timeout: float | None = None) -> tuple[str, str]:
        """Wait until it ends, and return what it wrote. It is killed if that takes longer than ``timeout`` seconds."""
        self._process.join(timeout)
        if self._process.exitcode is None:
            self.kill()
            self._process.join()
            raise subprocess.TimeoutExpired(
                list(self._arguments), timeout or 0, self._text(self._out), self._text(self._err)
            )
        said = self._text(self._out), self._text(self._err)
        self._folder.cleanup()
        return said

    def _text(self, file: Path) -> str:
        return file.read_text(encoding="utf-8", errors="replace") if file.exists() else ""


def start(
    *arguments: str,
    cwd: Path | None = None,
    env: Mapping[str, str] | None = None,
    before: Callable[[], None] | None = None,
) -> Process:
    """Start ``python`` with these arguments: ``-m module``, ``-c code`` or a file, and its arguments.

    ``before``, a function of a module, is called in it first.
    """
    return Process(*arguments, cwd=cwd or Path.cwd(), env=os.environ if env is None else env, before=before)


def run(
    *arguments: str,
    cwd: Path | None = None,
    env: Mapping[str, str] | None = None,
    before: Callable[[], None] | None = None,
    timeout: float = 300,
) -> subprocess.CompletedProcess[str]:
    """Run ``python`` with these arguments, as `start` does, until it ends."""
    process = start(*arguments, cwd=cwd, env=env, before=before)
    out, err = process.communicate(timeout)
    assert process.returncode is not None
    return subprocess.CompletedProcess(list(arguments), process.returncode, out, err)


def run_pytest(
    folder: Path,
    *arguments: str,
    env: Mapping[str, str] | None = None,
    before: Callable[[], None] | None = None,
) -> pytest.RunResult:
    """Run pytest in a folder until it ends, as `pytest.Pytester.runpytest_subprocess` does in its own."""
    began = time.monotonic()
    done = run("-m", "pytest", *arguments, cwd=folder, env=env, before=before)
    sys.stdout.write(done.stdout)  # shown where the test fails
    sys.stderr.write(done.stderr)
    return pytest.RunResult(
        done.returncode, done.stdout.splitlines(), done.stderr.splitlines(), time.monotonic() - began
    )


def is_loaded_for(environment: Mapping[str, str]) -> bool:
    """Return whether torch is loaded as with this environment. Otherwise a process has to load it itself."""
    return _of_loading(environment) == _of_loading(_environment)


def _of_loading(environment: Mapping[str, str]) -> dict[str, str]:
    read = {name: value for name, value in environment.items() if name.startswith(_READ_WHEN_LOADED)}
    if "backend:" not in read.get(_ALLOCATOR, ""):
        read.pop(_ALLOCATOR, None)  # all else is read when CUDA is first used
    return read


def _be(
    arguments: tuple[str, ...],
    folder: str,
    environment: dict[str, str],
    streams: tuple[str, str],
    path: list[str],
    before: Callable[[], None] | None,
) -> None:
    """Be a Python that was started so. What it ends with, `multiprocessing` turns into the exit status."""
    for number, stream in enumerate(streams, start=1):
        file = os.open(stream, os.O_WRONLY | os.O_CREAT | os.O_APPEND)
        os.dup2(file, number)
        os.close(file)
    os.chdir(folder)
    os.environ.clear()
    os.environ.update(environment)
    tempfile.tempdir = None
    sys.dont_write_bytecode = bool(environment.get("PYTHONDONTWRITEBYTECODE"))
    if before is not None:
        before()
    for name in [name for name in sys.modules if name.partition(".")[0] == "tests"]:
        del sys.modules[name]  # the project may have one of that name
    for name in _REWRITTEN:
        if name in sys.modules:  # or pytest warns that it comes too late to rewrite its assertions
            sys.modules[name].__doc__ = "PYTEST_DONT_REWRITE"
    # What was loaded needs none at the end: torch's, one for each library of operators, take a tenth of a short run.
    for finalizer in weakref.finalize._registry:
        finalizer.atexit = False
    first = {"-m": folder, "-c": ""}.get(arguments[0], str(Path(arguments[0]).resolve().parent))
    sys.path[:] = [first, *filter(None, environment.get("PYTHONPATH", "").split(os.pathsep)), *path]
    try:
        if arguments[0] == "-m":
            sys.argv = list(arguments[1:])
            runpy.run_module(arguments[1], run_name="__main__", alter_sys=True)
        elif arguments[0] == "-c":
            sys.argv = ["-c", *arguments[2:]]
            exec(arguments[1], {"__name__": "__main__"})
        else:
            sys.argv = list(arguments)
            runpy.run_path(arguments[0], run_name="__main__")
    finally:
        atexit._run_exitfuncs()
