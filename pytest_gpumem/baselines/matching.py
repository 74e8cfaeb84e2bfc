"""Selection of baselines by a test's id, a part of it, or a pattern. Pure."""

from __future__ import annotations

import difflib
import fnmatch
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from collections.abc import Iterable

    from pytest_gpumem.gate.baseline import Key


def matches(key: Key, pattern: str) -> bool:
    """Return whether ``pattern`` is a part of ``tests/test_gpt.py::test_train[fp32] (train_step)``, or matches it whole."""
    text = str(key)
    # Brackets in a test's id are a parametrisation and not a set of characters.
    glob = pattern.replace("[", "[[]")
    return pattern in text or any(fnmatch.fnmatchcase(whole, glob) for whole in (text, f"{key.file}::{key.test}"))


def meant(keys: Iterable[Key], said: str) -> list[Key]:
    """Return the keys that ``said`` selects, sorted: of the test with just this id, or else of all that it matches."""
    everything = sorted(set(keys))
    exact = [key for key in everything if said in (str(key), f"{key.file}::{key.test}")]
    return exact or [key for key in everything if matches(key, said)]


def nearest_tests(keys: Iterable[Key], said: str) -> list[str]:
    """Return up to three ids of tests, or names of their files, that are spelled like ``said``, the nearest first."""
    tests = sorted({f"{key.file}::{key.test}" for key in keys})
    files = sorted({test.partition("::")[0] for test in tests})
    # Whoever leaves folders or the file out, or mistypes them, has named the test all the same.
    named = {name: name for name in (*tests, *(file.rpartition("/")[2] for file in files))}
    named |= {test.rpartition("::")[2]: test for test in reversed(tests)}
    close = difflib.get_close_matches(said, list(named), n=3, cutoff=0.6)
    close += difflib.get_close_matches(said.rpartition("::")[2], list(named), n=3, cutoff=0.6)
    return list(dict.fromkeys(named[name] for name in close))[:3]
