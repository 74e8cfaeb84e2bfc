"""Selection of baselines by a test's id, a part of it or a pattern, and of those whose tests are gone. Pure."""

from __future__ import annotations

import difflib
import fnmatch
from typing import TYPE_CHECKING

from pytest_gpumem.command_name import command_name
from pytest_gpumem.units import agreeing, counted
from pytest_gpumem.values.rank import without_rank

if TYPE_CHECKING:
    from collections.abc import Callable, Collection, Iterable, Sequence

    from pytest_gpumem.gate.baseline import Key

_OF_SCRIPTS = "loop"
"""The only measurement of a script, as it is called in the store."""
_FUNCTIONS = ("test",)
"""pytest's default of ``python_functions``."""


def matches(key: Key, pattern: str) -> bool:
    """Return whether ``pattern`` is a part of ``tests/test_gpt.py::test_train[fp32] (train_step)``, or matches it whole."""
    text = str(key)
    # Brackets in a test's id are a parametrisation and not a set of characters.
    glob = pattern.replace("[", "[[]")
    return pattern in text or any(fnmatch.fnmatchcase(whole, glob) for whole in (text, f"{key.file}::{key.test}"))


def selected(keys: Iterable[Key], pattern: str) -> list[Key]:
    """Return the keys that ``pattern`` selects, sorted: of the test with just this id, or else of all that it matches."""
    everything = sorted(set(keys))
    exact = [key for key in everything if pattern in (str(key), f"{key.file}::{key.test}")]
    return exact or [key for key in everything if matches(key, pattern)]


def nearest_tests(keys: Iterable[Key], pattern: str) -> list[str]:
    """Return up to three ids of tests, or names of their files, that are spelled like ``pattern``, the nearest first."""
    tests = sorted({f"{key.file}::{key.test}" for key in keys})
    files = sorted({test.partition("::")[0] for test in tests})
    # A test may be named without its folders or file, or with a misspelt one.
    named = {name: name for name in (*tests, *(file.rpartition("/")[2] for file in files))}
    named |= {test.rpartition("::")[2]: test for test in reversed(tests)}
    close = difflib.get_close_matches(pattern, list(named), n=3, cutoff=0.6)
    close += difflib.get_close_matches(pattern.rpartition("::")[2], list(named), n=3, cutoff=0.6)
    return list(dict.fromkeys(named[name] for name in close))[:3]


def is_of_script(key: Key, python_functions: Sequence[str] = _FUNCTIONS) -> bool:
    """Return whether a baseline is of `gpumem run`, and not of a test that pytest collects: ``train.py::run (loop)``.

    A script is measured as a loop, and its name has no brackets. A test may be so, too, by ``gpumem.loop()``: it has the
    name of a function of tests.

    Args:
        key: The key of the baseline.
        python_functions: pytest's setting of that name.
    """
    is_loop = without_rank(key.name) == _OF_SCRIPTS and not {*"[:"} & {*key.test}
    return is_loop and not is_name_of_test(key.test, python_functions)


def is_name_of_test(name: str, patterns: Iterable[str]) -> bool:
    """Return whether a name has a prefix or a pattern of pytest's ``python_functions`` or ``python_classes``."""
    # As pytest's own: a pattern only if it has a character of one.
    return any(
        name.startswith(pattern) or ({*"*?["} & {*pattern} and fnmatch.fnmatch(name, pattern)) for pattern in patterns
    )


def unused(
    stored: Iterable[tuple[str, Key]],
    *,
    measured: Collection[tuple[str, str]],
    whole_files: Collection[str],
    exists: Callable[[str], bool],
) -> list[tuple[str, Key]]:
    """Return the baselines among ``stored``, given as (slug, key), that belong to no test.

    ``measured`` are the (file, test) that were collected and are measured. Only files that were collected whole
    (``whole_files``) show that a test is gone; those that do not exist any more have no tests.
    """
    return [
        (slug, key)
        for slug, key in stored
        if (key.file in whole_files or not exists(key.file)) and (key.file, key.test) not in measured
    ]


def unused_line(gone: Sequence[tuple[str, Key]]) -> str:
    """Return the sentence on unused baselines, given as (slug, key)."""
    shown = ", ".join(str(key) for _, key in gone[:3]) + (", ..." if len(gone) > 3 else "")
    them = agreeing(len(gone), "it", "them")
    return f"store: {counted(len(gone), 'unused baseline')}: {shown}; `{command_name()} prune` removes {them}"
