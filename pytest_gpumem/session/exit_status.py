"""The exit status of a session in which a gate was asked for: 0 only if its report passed."""

from __future__ import annotations

import sys
from typing import TYPE_CHECKING

import pytest

if TYPE_CHECKING:
    from pytest_gpumem.session.process import GpumemSession

_TYPED = "--gpumem-baseline"
_TELLS_OF_PYTEST = ("help", "version", "markers")
"""Options under which pytest shows information about itself and runs no test."""
_SHOWS = {
    "collectonly": "--collect-only",
    "showfixtures": "--fixtures",
    "show_fixtures_per_test": "--fixtures-per-test",
    "cacheshow": "--cache-show",
}
"""Options under which pytest lists something in place of running tests."""


def final_status(config: pytest.Config, session: GpumemSession | None, status: int) -> int:
    """Return the exit status of a pytest process that is about to end with ``status``.

    It is not 0 where a gate was asked for and the session's report did not pass; standard error says why. A report that
    passed is written again where another plugin makes the session red after it.
    """
    if session is not None and not session.reports:
        # Every rank fails the tests that another one does, and rank 0 has the report.
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


def _why_red(config: pytest.Config, session: GpumemSession | None) -> str | None:
    typed = _TYPED in config.invocation_params.args
    gates = typed or (session is not None and session.settings.gates)
    if not gates or _given(config, _TELLS_OF_PYTEST):
        return None
    shows = _given(config, _SHOWS)
    if shows is not None:
        # Editors find tests so, in projects whose settings ask for a gate in every run.
        return f"{_TYPED} gates nothing under {_SHOWS[shows]}" if typed else None
    report = session.report if session is not None else None
    return "pytest ended before any test was run" if report is None else report.why_red


def _given(config: pytest.Config, options: tuple[str, ...] | dict[str, str]) -> str | None:
    return next((option for option in options if getattr(config.option, option, None)), None)
