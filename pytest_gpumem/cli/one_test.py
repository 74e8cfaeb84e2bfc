"""The one test that an argument of a command means."""

from __future__ import annotations

from typing import TYPE_CHECKING

from pytest_gpumem.baselines.selecting import selected
from pytest_gpumem.cli.streams import InputError

if TYPE_CHECKING:
    from collections.abc import Iterable

    from pytest_gpumem.gate.baseline import Key

_MOST_LISTED = 20


def keys_of_one_test(name: str, keys: Iterable[Key]) -> list[Key]:
    """Return those of ``keys`` that are of the one test that ``name`` means, none if there is no such test.

    Raises `InputError`, which lists them, where there are several tests.
    """
    found = selected(keys, name)
    tests = sorted({f"{key.file}::{key.test}" for key in found})
    if len(tests) > 1:
        more = [f"... and {len(tests) - _MOST_LISTED} more"] if len(tests) > _MOST_LISTED else []
        listed = [f"  {test}" for test in [*tests[:_MOST_LISTED], *more]]
        raise InputError(f"{name!r} is in the ids of {len(tests)} tests; say which one:", *listed)
    return found
