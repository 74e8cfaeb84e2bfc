"""Shorten the traceback of a wrong call in a test's report, so it ends in the line that made the call."""

from __future__ import annotations

import contextlib
from pathlib import Path
from types import TracebackType
from typing import TYPE_CHECKING

import pytest_gpumem
from pytest_gpumem.facts.measurement import MeasuringError

if TYPE_CHECKING:
    import pytest
    from _pytest._code.code import TracebackEntry

_PACKAGE = Path(pytest_gpumem.__file__).parent
_REFUSALS = (TypeError, ValueError, AttributeError, AssertionError, MeasuringError)
"""Errors by which the fixture refuses a call. ``ConfigError`` and ``NotAStep`` are kinds of ``ValueError``."""


def end_at_call(excinfo: pytest.ExceptionInfo[BaseException]) -> None:
    """Leave out this package's frames at the traceback's end, if this package raised the error.

    For example, ``gpumem.train_step(model, batch, config="fp17")`` raises ``ConfigError`` three frames below the test. Errors
    in a model, and errors that this package does not raise itself, keep all their frames.
    """
    entries = list(excinfo.traceback)
    if not isinstance(excinfo.value, _REFUSALS) or not entries or not _is_refusal(entries[-1]):
        return
    while entries and _is_ours(entries[-1]):
        entries.pop()
    shown: TracebackType | None = None
    for entry in reversed(entries):
        raw = entry._rawentry  # noqa: SLF001 - a copy is shown, because debuggers need all frames
        shown = TracebackType(shown, raw.tb_frame, raw.tb_lasti, raw.tb_lineno)
    if shown is not None:
        excinfo.traceback = type(excinfo.traceback)(shown)


def _is_refusal(entry: TracebackEntry) -> bool:
    return Path(entry.path).is_relative_to(_PACKAGE) and str(entry.statement).lstrip().startswith("raise ")


def _is_ours(entry: TracebackEntry) -> bool:
    # contextlib enters the fixture's context managers, so its frames are left out as well.
    return Path(entry.path).is_relative_to(_PACKAGE) or Path(entry.path) == Path(contextlib.__file__)
