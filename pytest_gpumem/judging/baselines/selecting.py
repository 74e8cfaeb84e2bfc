"""Find baselines by test id or pattern, and baselines whose tests no longer exist. Pure."""

from __future__ import annotations

import difflib
import fnmatch
from typing import TYPE_CHECKING

from pytest_gpumem.base.command_name import command_name
from pytest_gpumem.base.units import counted, word_form
from pytest_gpumem.facts.values.rank import without_rank

if TYPE_CHECKING:
    from collections.abc import Callable, Collection, Iterable, Sequence

    from pytest_gpumem.judging.gate.baseline import Key

_OF_SCRIPTS = "loop"
"""The measurement's name in the key of a script's baseline. A script has only this measurement."""
_FUNCTIONS = ("test",)
"""pytest's default value for the setting ``python_functions``."""


def matches(key: Key, pattern: str) -> bool:
    """Return whether a key as text contains ``pattern``, or matches the glob ``pattern``.

    Example: ``test_train[fp32]`` and ``tests/*::test_train*`` match ``tests/test_gpt.py::test_train[fp32] (train_step)``.
    """
    text = str(key)
    # A bracket belongs to the id of a parametrized test and does not begin a character set, so quote it.
    glob = pattern.replace("[", "[[]")
    return pattern in text or any(fnmatch.fnmatchcase(name, glob) for name in (text, f"{key.file}::{key.test}"))


def selected_keys(keys: Iterable[Key], pattern: str) -> list[Key]:
    """Return the sorted keys whose test has the id ``pattern``. If there are none, return all keys that `matches` accepts."""
    everything = sorted(set(keys))
    exact = [key for key in everything if pattern in (str(key), f"{key.file}::{key.test}")]
    return exact or [key for key in everything if matches(key, pattern)]


def nearest_tests(keys: Iterable[Key], pattern: str) -> list[str]:
    """Return up to three test ids or file names that are spelled like ``pattern``, the most similar first."""
    tests = sorted({f"{key.file}::{key.test}" for key in keys})
    files = sorted({test.partition("::")[0] for test in tests})
    # The pattern may lack the folders or the file, or misspell them. So compare the pattern with shorter names as well.
    targets = {name: name for name in (*tests, *(file.rpartition("/")[2] for file in files))}
    targets |= {test.rpartition("::")[2]: test for test in reversed(tests)}
    close = difflib.get_close_matches(pattern, list(targets), n=3, cutoff=0.6)
    close += difflib.get_close_matches(pattern.rpartition("::")[2], list(targets), n=3, cutoff=0.6)
    return list(dict.fromkeys(targets[name] for name in close))[:3]


def is_of_script(key: Key, python_functions: Sequence[str] = _FUNCTIONS) -> bool:
    """Return whether a baseline comes from a script (`gpumem run`), and not from a test that pytest collects.

    A script is measured as a loop, and the name in its key has no brackets: ``train.py::run (loop)``. The key of a test with
    ``gpumem.loop()`` may look the same, but it has the name of a test function: ``test_gpt.py::test_train (loop)``.

    Args:
        key: The key of the baseline.
        python_functions: The value of pytest's setting ``python_functions``.
    """
    is_loop = without_rank(key.name) == _OF_SCRIPTS and not {*"[:"} & {*key.test}
    return is_loop and not is_name_of_test(key.test, python_functions)


def is_name_of_test(name: str, patterns: Iterable[str]) -> bool:
    """Return whether a name matches a pattern from pytest's settings ``python_functions`` or ``python_classes``."""
    # As in pytest, a pattern is a prefix of the name, or a glob if it contains a glob character.
    return any(
        name.startswith(pattern) or ({*"*?["} & {*pattern} and fnmatch.fnmatch(name, pattern)) for pattern in patterns
    )


def unused_baselines(
    stored: Iterable[tuple[str, Key]],
    *,
    measured: Collection[tuple[str, str]],
    whole_files: Collection[str],
    exists: Callable[[str], bool],
) -> list[tuple[str, Key]]:
    """Return the stored baselines whose test no longer exists.

    A test that pytest did not collect counts as deleted if pytest collected all tests in the test's file, or if this file no
    longer exists.

    Args:
        stored: The stored baselines as (slug, key).
        measured: The collected tests as (file, test).
        whole_files: The test files in which all tests were collected.
        exists: Returns whether a test file exists.
    """
    return [
        (slug, key)
        for slug, key in stored
        if (key.file in whole_files or not exists(key.file)) and (key.file, key.test) not in measured
    ]


def unused_line(baselines: Sequence[tuple[str, Key]]) -> str:
    """Return a line on unused baselines for the output: their number, the first three, and the command that removes them."""
    shown = ", ".join(str(key) for _, key in baselines[:3]) + (", ..." if len(baselines) > 3 else "")
    pronoun = word_form(len(baselines), "it", "them")
    return f"store: {counted(len(baselines), 'unused baseline')}: {shown}; `{command_name()} prune` removes {pronoun}"
