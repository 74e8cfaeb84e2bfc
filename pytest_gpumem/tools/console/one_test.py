"""Find the test for an argument TEST, and explain the error if no test or several tests match."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING

from pytest_gpumem.judging.baselines.selecting import nearest_tests, selected_keys
from pytest_gpumem.reporting.reports.file_kinds import kind_of_file
from pytest_gpumem.tools.console.streams import InputError

if TYPE_CHECKING:
    from collections.abc import Iterable, Sequence

    from pytest_gpumem.judging.gate.baseline import Key

_MOST_LISTED = 20


def check_is_no_file(name: str) -> None:
    """Raise `InputError` if a user named a file from pytest-gpumem, for example a report, instead of a test."""
    kind = kind_of_file(Path(name))
    if kind is not None:
        raise InputError(f"{name} is {kind}, expected a test")


def no_such_test(name: str, sentence: str, keys: Iterable[Key], otherwise: str = "") -> InputError:
    """Return the error for an unknown test. The error suggests tests with similar names, or lists all tests.

    Args:
        name: The test as the user typed it.
        sentence: The beginning of the error, for example ``"there is no baseline of 'test_gpt'"``.
        keys: The keys of all measurements. They contain the tests to suggest.
        otherwise: The end of the error if no test has a similar name. By default, the error ends by listing all tests.
    """
    all_keys = list(keys)
    near = nearest_tests(all_keys, name)
    if near:
        return InputError(f"{sentence}; there is {' and '.join(near)}")
    if otherwise or not all_keys:
        return InputError(f"{sentence}; {otherwise}" if otherwise else sentence)
    return InputError(f"{sentence}; there is:", *_listed(sorted({f"{key.file}::{key.test}" for key in all_keys})))


def _listed(tests: Sequence[str]) -> list[str]:
    more = [f"... and {len(tests) - _MOST_LISTED} more"] if len(tests) > _MOST_LISTED else []
    return [f"  {test}" for test in [*tests[:_MOST_LISTED], *more]]


def keys_of_one_test(name: str, keys: Iterable[Key]) -> list[Key]:
    """Return the keys of all measurements in the test matching ``name``. The list is empty if no test matches.

    Raises:
        InputError: Several tests match. The message lists up to 20 of them.
    """
    matching = selected_keys(keys, name)
    tests = sorted({f"{key.file}::{key.test}" for key in matching})
    if len(tests) > 1:
        raise InputError(f"{name!r} matches {len(tests)} tests; choose one of them:", *_listed(tests))
    return matching
