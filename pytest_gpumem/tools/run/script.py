"""Run a script as the only item in a pytest session. Settings, devices, store, verdict and reports work as for a test.

For example, ``gpumem run train.py --epochs 1`` measures the steps of ``train.py`` as `Gpumem.loop` does in a test.
"""

from __future__ import annotations

import json
import os
import sys
import traceback
from dataclasses import dataclass
from importlib.machinery import SourceFileLoader
from types import ModuleType
from typing import TYPE_CHECKING, Any

import pytest

from pytest_gpumem.base.errors import MeasuringError, ScriptFailed
from pytest_gpumem.measuring.measure.loop import EndOfLoop
from pytest_gpumem.plugin.config.command_line import COMMAND, Command
from pytest_gpumem.plugin.config.options import FIXTURE
from pytest_gpumem.plugin.runtest.hooks import refuse, run_of
from pytest_gpumem.plugin.runtest.stepping import MeasuredLoop
from pytest_gpumem.plugin.session import SESSION
from pytest_gpumem.plugin.session.exit_status import EndOfProcess, is_lost
from pytest_gpumem.reporting.reports.results import PROPERTY

if TYPE_CHECKING:
    from collections.abc import Generator, Iterator, Sequence
    from pathlib import Path
    from typing import NoReturn


_NOT_FOR_A_SCRIPT: dict[str, Any] = {
    "numprocesses": None,
    "maxprocesses": None,
    "tx": [],
    "dist": "no",
    "keyword": "",
    "markexpr": "",
    "deselect": None,
    "doctestmodules": False,
    "lf": False,
    "cacheshow": None,
    "stepwise": False,
}
"""Options that distribute or select tests in pytest and pytest-xdist, each with the value that switches the option off.

They are switched off for a script, because a project may have these options in ``addopts``.
"""
_PLUGINS_NOT_FOR_A_SCRIPT = ("cacheprovider", "stepwise", "randomly", "gpumem-models")
"""Plugins that cache the project's test results, seed random numbers or add tests. They are unregistered for a script,
because ``addopts`` may contain their options."""


@dataclass(frozen=True, slots=True)
class Script:
    """A script with its arguments, and the number of steps to measure."""

    path: Path
    arguments: tuple[str, ...]
    steps: int
    name: str
    """The part of the item's id after ``train.py::``."""
    command: Command
    """The command that runs the script again, for messages."""


class ScriptSession:
    """A plugin for ``gpumem run`` that collects only the script."""

    def __init__(self, script: Script) -> None:
        self._script = script
        self.unmeasured = False
        """True if nothing was measured, for example because this machine does not have the script's device."""
        self._end: EndOfProcess | None = None
        self._has_ended = False

    def has_ended(self, *, passed: bool) -> None:
        """Record that the command has ended.

        If it failed, the script's ``atexit`` functions cannot change the exit status to 0.
        """
        self._has_ended = True
        if self._end is not None:
            self._end.has_come(passed=passed)

    @pytest.hookimpl(wrapper=True, tryfirst=True)
    def pytest_cmdline_main(self, config: pytest.Config) -> Generator[None, Any, Any]:
        self._end = EndOfProcess(lambda: self._has_ended or is_lost(config.stash.get(SESSION, None)))
        for name, value in _NOT_FOR_A_SCRIPT.items():
            if hasattr(config.option, name):
                setattr(config.option, name, value)
        # With `-p no:NAME`, pytest would not know the plugin's command-line options. So unregister the plugin here.
        for name in _PLUGINS_NOT_FOR_A_SCRIPT:
            if config.pluginmanager.has_plugin(name):
                config.pluginmanager.unregister(name=name)
        return (yield)

    @pytest.hookimpl(tryfirst=True)
    def pytest_ignore_collect(self, collection_path: Path) -> bool | None:
        return False if collection_path == self._script.path else None

    def pytest_pycollect_makemodule(self, module_path: Path, parent: pytest.Collector) -> pytest.Collector | None:
        # Without this hook, pytest would import the script as a module.
        return self._file(module_path, parent)

    def pytest_collect_file(self, file_path: Path, parent: pytest.Collector) -> pytest.Collector | None:
        return self._file(file_path, parent) if file_path.suffix != ".py" else None

    def _file(self, path: Path, parent: pytest.Collector) -> pytest.Collector | None:
        if path != self._script.path:
            return None
        return ScriptFile.from_parent(parent, path=path, script=self._script)

    def pytest_runtest_logreport(self, report: pytest.TestReport) -> None:
        verdict = dict(report.user_properties).get(PROPERTY)
        has_figures = verdict is None or json.loads(str(verdict))["unmeasured"] is None
        self.unmeasured = self.unmeasured or report.skipped or not has_figures


class ScriptFile(pytest.File):
    """The file of a script, which contains one item."""

    def __init__(self, *, script: Script, **more: Any) -> None:
        super().__init__(**more)
        self._script = script

    def collect(self) -> Iterator[pytest.Item]:
        yield ScriptItem.from_parent(self, name=self._script.name, script=self._script)


class ScriptItem(pytest.Item):
    """A run of a script, whose steps are measured."""

    def __init__(self, *, script: Script, **more: Any) -> None:
        super().__init__(**more)
        self._script = script
        self.fixturenames = [FIXTURE]
        """Because of this name, the session measures the item. pytest does not set up the fixture for this item."""
        self.stash[COMMAND] = script.command

    def runtest(self) -> None:
        script, run = self._script, run_of(self)
        if run is None:
            refuse(self)
        with run.alone("loop"), MeasuredLoop(run, script.steps, is_script=True).within():
            run_script(script.path, script.arguments)

    def repr_failure(self, excinfo: pytest.ExceptionInfo[BaseException], style: Any = None) -> Any:
        error = excinfo.value
        if isinstance(error, (MeasuringError, ScriptFailed)):
            return f"{self._script.path.name}: {error}" if isinstance(error, MeasuringError) else str(error)
        if isinstance(error, pytest.fail.Exception):
            return super().repr_failure(excinfo, style)
        return failure_of_script(self._script.path, error)

    def reportinfo(self) -> tuple[Path, int, str]:
        return self.path, 0, self.name


def run_script(path: Path, arguments: Sequence[str]) -> None:
    """Run a script to its end as ``__main__``, with its folder first on ``sys.path``.

    If the script forks, the child process exits at the end of the script and does not return from this function.

    Args:
        path: The script.
        arguments: The script's arguments, ``sys.argv[1:]``.

    Raises:
        ScriptFailed: The script called ``sys.exit`` with a status other than 0.
        BaseException: Any other exception of the script.
    """
    process = os.getpid()
    try:
        _run_as_main(path, arguments)
    except BaseException as error:
        if os.getpid() != process:
            _leave_fork(path, error)
        if not isinstance(error, SystemExit):
            raise
        if error.code not in (None, 0):
            raise ScriptFailed(f"{path.name} ended with sys.exit({error.code!r})") from error
    if os.getpid() != process:
        _leave_fork(path, None)


def failure_of_script(path: Path, error: BaseException) -> str:
    """Return the traceback of a script's uncaught exception, beginning with the script's own frame."""
    formatted = traceback.TracebackException.from_exception(error)
    begin = next((index for index, frame in enumerate(formatted.stack) if frame.filename == str(path)), 0)
    formatted.stack = traceback.StackSummary.from_list(formatted.stack[begin:])
    return "".join(formatted.format()).rstrip()


def _leave_fork(path: Path, error: BaseException | None) -> NoReturn:
    """End a forked child process as the interpreter would: with its traceback and exit status.

    Only the parent process may end the session.
    """
    code = error.code if isinstance(error, SystemExit) else None
    if error is not None and not isinstance(error, (SystemExit, EndOfLoop)):
        sys.stderr.write(f"{failure_of_script(path, error)}\n")
        code = 1
    elif code is not None and not isinstance(code, int):
        sys.stderr.write(f"{code}\n")
        code = 1
    sys.stdout.flush()
    sys.stderr.flush()
    os._exit((code or 0) & 0xFF)


def _run_as_main(path: Path, arguments: Sequence[str]) -> None:
    # runpy is not used here, because it raises an IndexError if a script has cleared sys.argv.
    loader = SourceFileLoader("__main__", str(path))
    main = ModuleType("__main__")
    vars(main).update(__file__=str(path), __loader__=loader, __builtins__=__builtins__)
    code = loader.source_to_code(loader.get_data(str(path)), str(path))
    argv, folders, main_of_command = list(sys.argv), list(sys.path), sys.modules["__main__"]
    sys.argv[:] = [str(path), *arguments]
    sys.path.insert(0, str(path.parent))
    sys.modules["__main__"] = main
    try:
        exec(code, vars(main))  # noqa: S102 - what the command is for
    finally:
        sys.argv[:], sys.path[:], sys.modules["__main__"] = argv, folders, main_of_command
