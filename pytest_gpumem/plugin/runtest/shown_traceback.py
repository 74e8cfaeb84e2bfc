"""Shorten the traceback of a wrong call to this package, so it ends at the line with the call in the test."""

from __future__ import annotations

import contextlib
from pathlib import Path
from types import TracebackType
from typing import TYPE_CHECKING

import pytest_gpumem
from pytest_gpumem.base.errors import MeasuringError

if TYPE_CHECKING:
    import pytest
    from _pytest._code.code import TracebackEntry

_PACKAGE = Path(pytest_gpumem.__file__).parent
_REFUSALS = (TypeError, ValueError, AttributeError, AssertionError, MeasuringError)
"""The types of errors that the fixture raises for a wrong call. ``ConfigError`` and ``NotAStep`` are subclasses of
``ValueError``."""


def end_at_call(excinfo: pytest.ExceptionInfo[BaseException]) -> None:
    """If this package raised the error by a ``raise`` statement, remove this package's frames from the end of the
    traceback.

    For example, ``gpumem.train_step(model, batch, config="fp17")`` raises ``ConfigError`` three frames below the test.
    These three frames are removed. The traceback of an error in a model keeps all frames.
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
    # Remove contextlib's frames as well, because contextlib enters the fixture's context managers.
    return Path(entry.path).is_relative_to(_PACKAGE) or Path(entry.path) == Path(contextlib.__file__)
