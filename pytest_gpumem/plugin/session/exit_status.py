"""A session with ``--gpumem-baseline`` or ``--gpumem-strict`` has the exit code 0 only if its report passed.

A report passes if all selected measured tests ran to their end, no test failed, and no other error made the session red. If
pytest would end with 0 although the report did not pass, the exit code is 1, and a line on standard error gives the reason.
Examples of such sessions are a call of ``pytest.exit(..., returncode=0)``, a plugin that resets the exit code or the number
of failures, ``--setup-only``, ``--setup-plan``, and a session without any collected test.

With ``--collect-only``, ``--fixtures``, ``--fixtures-per-test`` or ``--cache-show``, the exit code is 1 if
``--gpumem-baseline`` was typed as well. If only the settings or ``addopts`` switch the gate on, the exit code is 0, so an
editor can list tests.

If code calls ``os._exit(0)`` before the report has passed, the exit code is 1 and the report is red. A test that calls
``os.exec*`` fails. Two cases cannot be detected: C code that calls ``exit``, and an ``os._exit`` imported before pytest was
configured, for example by ``from os import _exit`` in a ``conftest.py``. In these cases the exit code may be 0, but the
[report](reports.md) is not green, so a job can check the report as well.
"""

from __future__ import annotations

import atexit
import os
import sys
from functools import wraps
from pathlib import Path
from types import MappingProxyType
from typing import TYPE_CHECKING, Any, Protocol

import pytest

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping
    from types import ModuleType
    from typing import NoReturn

    from pytest_gpumem.plugin.config.settings import Settings
    from pytest_gpumem.reporting.reports.session_report import SessionReport


EXIT_CODES: Mapping[pytest.ExitCode, str] = MappingProxyType(
    {
        pytest.ExitCode.OK: "All tests passed.",
        pytest.ExitCode.TESTS_FAILED: "A test failed, by itself or by its verdict, or [the session is red](#red-sessions).",
        pytest.ExitCode.INTERRUPTED: (
            "The session was interrupted. With `--gpumem-update`, the measurements of the tests that had passed are written."
        ),
        pytest.ExitCode.INTERNAL_ERROR: "pytest or a plugin raised an error outside of the tests.",
        pytest.ExitCode.USAGE_ERROR: (
            "An option, a setting or a marker is wrong, or the store cannot be read. No test ran."
        ),
        pytest.ExitCode.NO_TESTS_COLLECTED: "No test was collected.",
    }
)
"""The meaning of pytest's exit codes in a session with this plugin, as Markdown for the reference page."""
_TYPED = "--gpumem-baseline"
_SHOWS_PYTEST = ("help", "version", "markers")
"""pytest's options for showing information about itself. With these options, no test runs."""
_LISTS = {
    "collectonly": "--collect-only",
    "showfixtures": "--fixtures",
    "show_fixtures_per_test": "--fixtures-per-test",
    "cacheshow": "--cache-show",
}
"""pytest's options for listing tests, fixtures or the cache. With these options, no test runs."""


class Reporting(Protocol):
    """The attributes and methods of a session that its exit status depends on."""

    settings: Settings

    @property
    def reports(self) -> bool:
        """Return whether this process writes the session's report."""

    @property
    def report(self) -> SessionReport | None:
        """Return the report, or ``None`` before all tests have run."""

    def ended_red(self, status: int) -> None:
        """Write the report again as red, because the process ends with ``status`` although the report passed."""

    def lost(self, why: str) -> None:
        """Report that the process ends before the session's end. ``why`` is the reason, as a clause."""


def final_status(config: pytest.Config, session: Reporting | None, status: int) -> int:
    """Return the exit status for a process in which pytest itself would end with ``status``.

    In a gate, the status becomes 1 if the session's report did not pass, and a line on standard error gives the reason. If
    the report passed, but another plugin changed the status later, the report is written again.
    """
    if session is not None and not session.reports:
        # Only rank 0 has the report. A test that fails on one rank fails on all ranks, so the status is already right.
        return status
    if status:
        if session is not None:
            session.ended_red(status)
        return status
    why = _why_red(config, session)
    if why is None:
        return status
    sys.stderr.write(f"gpumem: the exit status is 1: {why}\n")
    return pytest.ExitCode.TESTS_FAILED


class EndOfProcess:
    """Prevents code from ending this process with 0 by `os._exit` or `os.exec*` before its report has passed.

    Until then, `os._exit(0)` exits with 1. `os.exec*` fails the test, or raises ``OSError`` if the program does not exist.
    Forked processes are not affected.

    Args:
        is_lost: Returns whether ending with 0 would be wrong at this moment. If it would, the function also reports that the
            process ends.
    """

    def __init__(self, is_lost: Callable[[], bool]) -> None:
        self._is_lost = is_lost
        self._process: int | None = os.getpid()
        self._leave = os._exit
        self._ours: dict[str, Any] = {
            "_exit": self._exit,
            "execv": self._refusing(os.execv),
            "execve": self._refusing(os.execve),
        }
        # Replace the functions in `os` and in the module from which `os` imports them (`posix` or `nt`).
        places = [(module, name) for module in (os, sys.modules[os.name]) for name in self._ours]
        self._originals: list[tuple[ModuleType, str, Any]] = [(*place, getattr(*place)) for place in places]
        for module, name in places:
            setattr(module, name, self._ours[name])

    def has_come(self, *, passed: bool) -> None:
        """Restore the original functions if the session has ``passed``.

        Otherwise the replacements stay, because a function for `atexit` may call `os._exit(0)`. If the original `os._exit`
        itself was registered with `atexit`, it is unregistered.
        """
        if passed:
            self._process = None
        for module, name, original in self._originals:
            if not passed:
                atexit.unregister(original)
            elif getattr(module, name) is self._ours[name]:  # Another library may have wrapped the replacement.
                setattr(module, name, original)

    def _exit(self, status: int) -> NoReturn:
        if os.getpid() == self._process and not status and self._is_lost():
            status = 1
        self._leave(status)

    def _refusing(self, execute: Callable[..., NoReturn]) -> Callable[..., NoReturn]:
        @wraps(execute)
        def refuse(*arguments: Any) -> NoReturn:
            if os.getpid() == self._process:
                _stat(arguments[0])
                pytest.fail(
                    f"os.{execute.__name__} would replace this process with another program, which is not measured; start "
                    "the program with subprocess, or gate it in its own session",
                    pytrace=False,
                )
            execute(*arguments)

        return refuse


def is_lost(session: Reporting | None) -> bool:
    """Return whether a session's report has not passed, so the process must not end with 0.

    In that case, make the report red, or print a line.
    """
    report = None if session is None else session.report
    if report is not None and report.passed:
        return False
    why = "os._exit(0)"
    test = os.environ.get("PYTEST_CURRENT_TEST")
    why += f" in {test}" if test else ""
    why += " ended the process" + (" before the session's end" if report is None else "")
    why += ", and the exit status is 1"
    if session is not None and report is None:
        session.lost(why)
    else:
        sys.stderr.write(f"gpumem: {why}\n")
    sys.stdout.flush()
    sys.stderr.flush()
    return True


def _stat(program: Any) -> None:
    # Raise the OSError for a missing program, because the original function would also raise it.
    if not isinstance(program, int):  # An int is a file descriptor.
        Path(os.fsdecode(program)).stat()


def _why_red(config: pytest.Config, session: Reporting | None) -> str | None:
    typed = _TYPED in config.invocation_params.args
    gates = typed or (session is not None and session.settings.gates)
    if not gates or _first_set(config, _SHOWS_PYTEST):
        return None
    listing = _first_set(config, _LISTS)
    if listing is not None:
        # Editors list tests with these options, even if a project's settings switch the gate on.
        return f"{_TYPED} has no effect with {_LISTS[listing]}" if typed else None
    report = session.report if session is not None else None
    return "pytest ended before any test was run" if report is None else report.why_red


def _first_set(config: pytest.Config, options: tuple[str, ...] | dict[str, str]) -> str | None:
    return next((option for option in options if getattr(config.option, option, None)), None)
