"""Exceptions of a step that is run once more, and the release of what their tracebacks keep alive."""

from __future__ import annotations

import traceback

import pytest

from pytest_gpumem.torch_support.static_access import instance_dict

RAISED_BY_A_STEP: tuple[type[BaseException], ...] = (Exception, pytest.skip.Exception, pytest.fail.Exception)
"""Exceptions that a run for counts or an explanation does not raise: the step has been measured, or failed, before."""


def clear_frames(error: BaseException) -> None:
    """Clear the frames of ``error``, its cause and context, and the errors that it collects.

    For example the members of an exception group, and the failed examples of a doctest.
    """
    chain: list[BaseException] = []
    stack: list[BaseException | None] = [error]
    while stack:
        one = stack.pop()
        if one is not None and not any(one is seen for seen in chain):
            chain.append(one)
            stack += [one.__cause__, one.__context__, *getattr(one, "exceptions", ()), *_of_doctest(one)]
            traceback.clear_frames(one.__traceback__)
            for frame, _ in traceback.walk_tb(one.__traceback__):
                # Until Python 3.12 a frame keeps the last dict that f_locals gave; reading it again brings it up to date.
                _ = frame.f_locals


def _of_doctest(error: BaseException) -> list[BaseException]:
    """Return the errors of a doctest's examples: pytest's error has ``failures``, and each of them ``exc_info``."""
    attributes = instance_dict(error) or {}
    collected = [attributes.get("failures"), attributes.get("exc_info")]
    lists = [values for values in collected if isinstance(values, (list, tuple))]
    return [value for values in lists for value in values if isinstance(value, BaseException)]
