"""Exceptions that are ignored if a step runs again, and a function that frees the objects in an exception's traceback."""

from __future__ import annotations

import traceback

import pytest

from pytest_gpumem.torch_support.static_access import instance_dict

RAISED_BY_A_STEP: tuple[type[BaseException], ...] = (Exception, pytest.skip.Exception, pytest.fail.Exception)
"""Exceptions that are ignored if the plugin runs a step again for counts or an explanation.

The first run of the step has already decided whether the test passes."""


def clear_frames(error: BaseException) -> None:
    """Clear the local variables in the tracebacks of an exception and all related exceptions.

    Related exceptions are the cause, the context, an exception group's members, and a doctest's failed examples.
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
                # Until Python 3.12, a frame stores the last dict from `f_locals`, which still refers to the old values. Reading
                # `f_locals` again updates this dict.
                _ = frame.f_locals


def _of_doctest(error: BaseException) -> list[BaseException]:
    """Return the exceptions from a doctest's failed examples, as stored in attributes of pytest's or doctest's exception."""
    attributes = instance_dict(error) or {}
    collected = [attributes.get("failures"), attributes.get("exc_info")]
    lists = [values for values in collected if isinstance(values, (list, tuple))]
    return [value for values in lists for value in values if isinstance(value, BaseException)]
