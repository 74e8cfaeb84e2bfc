"""Finds the test that a command's argument names."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING

from pytest_gpumem.baselines.selecting import nearest_tests, selected
from pytest_gpumem.cli.streams import InputError
from pytest_gpumem.reports.file_kinds import kind_of_file

if TYPE_CHECKING:
    from collections.abc import Iterable, Sequence

    from pytest_gpumem.gate.baseline import Key

_MOST_LISTED = 20


def check_is_no_file(name: str) -> None:
    """Raise `InputError` for a file of this package in the place of a test."""
    kind = kind_of_file(Path(name))
    if kind is not None:
        raise InputError(f"{name} is {kind}, expected a test")


def no_such_test(name: str, sentence: str, keys: Iterable[Key], otherwise: str = "") -> InputError:
    """Return the error for a name that no test has: it names near tests, or lists those there are.

    Args:
        name: The test as it was typed.
        sentence: What is wrong, for example ``"there is no baseline of 'test_gpt'"``.
        keys: The measurements of all tests.
        otherwise: A clause for the case that no test comes near. Without it the tests are listed.
    """
    known = list(keys)
    near = nearest_tests(known, name)
    if near:
        return InputError(f"{sentence}; there is {' and '.join(near)}")
    if otherwise or not known:
        return InputError(f"{sentence}; {otherwise}" if otherwise else sentence)
    return InputError(f"{sentence}; there is:", *_listed(sorted({f"{key.file}::{key.test}" for key in known})))


def _listed(tests: Sequence[str]) -> list[str]:
    more = [f"... and {len(tests) - _MOST_LISTED} more"] if len(tests) > _MOST_LISTED else []
    return [f"  {test}" for test in [*tests[:_MOST_LISTED], *more]]


def keys_of_one_test(name: str, keys: Iterable[Key]) -> list[Key]:
    """Return those of ``keys`` that are of the one test that ``name`` means, none if there is no such test.

    Raises `InputError`, which lists them, where there are several tests.
    """
    found = selected(keys, name)
    tests = sorted({f"{key.file}::{key.test}" for key in found})
    if len(tests) > 1:
        raise InputError(f"{name!r} matches {len(tests)} tests; name one of them:", *_listed(tests))
    return found
