"""Exceptions of a step that is run once more, and the release of what their tracebacks keep alive."""

from __future__ import annotations

import traceback

import pytest

RAISED_BY_A_STEP: tuple[type[BaseException], ...] = (Exception, pytest.skip.Exception, pytest.fail.Exception)
"""Exceptions that a run for counts or an explanation does not raise: the step has been measured, or failed, before."""


def clear_frames(error: BaseException) -> None:
    """Clear the frames of ``error``, its cause and context, and the members of an exception group."""
    chain: list[BaseException] = []
    stack: list[BaseException | None] = [error]
    while stack:
        one = stack.pop()
        if one is not None and not any(one is seen for seen in chain):
            chain.append(one)
            stack += [one.__cause__, one.__context__, *getattr(one, "exceptions", ())]
            traceback.clear_frames(one.__traceback__)
            for frame, _ in traceback.walk_tb(one.__traceback__):
                # Until Python 3.12 a frame keeps the last dict that f_locals gave; reading it again brings it up to date.
                _ = frame.f_locals
