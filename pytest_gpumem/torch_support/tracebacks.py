"""Exceptions from a repeated step, and the release of objects in tracebacks."""

from __future__ import annotations

import traceback

import pytest

from pytest_gpumem.torch_support.static_access import instance_dict

RAISED_BY_A_STEP: tuple[type[BaseException], ...] = (Exception, pytest.skip.Exception, pytest.fail.Exception)
"""Exceptions ignored in a further run of a step, for counts or an explanation, because the first run was measured or failed."""


def clear_frames(error: BaseException) -> None:
    """Clear the frames of ``error``, its cause, its context, and its collected errors.

    Collected errors are, for example, an exception group's members or a doctest's failed examples.
    """
    chain: list[BaseException] = []
    stack: list[BaseException | None] = [error]
    while stack:
        current = stack.pop()
        if current is not None and not any(current is seen for seen in chain):
            chain.append(current)
            stack += [
                current.__cause__,
                current.__context__,
                *getattr(current, "exceptions", ()),
                *_of_doctest(current),
            ]
            traceback.clear_frames(current.__traceback__)
            for frame, _ in traceback.walk_tb(current.__traceback__):
                # Until Python 3.12 a frame keeps the last dict from f_locals. Reading it again removes cleared variables.
                _ = frame.f_locals


def _of_doctest(error: BaseException) -> list[BaseException]:
    """Return the errors of a doctest's examples. pytest's error stores them in ``failures``, and each in ``exc_info``."""
    attributes = instance_dict(error) or {}
    collected = [attributes.get("failures"), attributes.get("exc_info")]
    lists = [values for values in collected if isinstance(values, (list, tuple))]
    return [value for values in lists for value in values if isinstance(value, BaseException)]
