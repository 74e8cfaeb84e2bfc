"""Exceptions of a step that is run once more, and the release of what their tracebacks keep alive."""

from __future__ import annotations

import traceback
from typing import TYPE_CHECKING

import pytest

if TYPE_CHECKING:
    import types

RAISED_BY_A_STEP: tuple[type[BaseException], ...] = (Exception, pytest.skip.Exception, pytest.fail.Exception)
"""Not raised further by a run for counts or an explanation: the step has been measured, or has failed, and that counts."""


def clear_frames(error: BaseException) -> None:
    """Clear the frames of ``error``, its cause and context, and the members of an exception group."""
    for one in _chain(error):
        _clear(one.__traceback__)


def _chain(error: BaseException) -> list[BaseException]:
    """Yield ``error``, its cause and context, and the members of an exception group."""
    chain: list[BaseException] = []
    stack: list[BaseException | None] = [error]
    while stack:
        one = stack.pop()
        if one is not None and not any(one is seen for seen in chain):
            chain.append(one)
            stack += [one.__cause__, one.__context__, *getattr(one, "exceptions", ())]
    return chain


def _clear(trace: types.TracebackType | None) -> None:
    """Drop the locals of a traceback's frames, and the copies of them that looking at a frame leaves in it."""
    traceback.clear_frames(trace)
    while trace is not None:
        # Until Python 3.12 a frame keeps the last dict that f_locals gave; reading it again brings it up to date.
        _ = trace.tb_frame.f_locals
        trace = trace.tb_next
