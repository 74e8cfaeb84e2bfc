"""Tests with baselines left out by settings, in a run without a typed selection: each file is named, with the setting."""

from __future__ import annotations

import fnmatch
from collections import Counter
from dataclasses import dataclass
from pathlib import Path, PurePosixPath
from typing import TYPE_CHECKING

from pytest_gpumem.baselines.selecting import is_of_script, unused, unused_line
from pytest_gpumem.baselines.store import path_of

if TYPE_CHECKING:
    from collections.abc import Collection

    import pytest

    from pytest_gpumem.session.store_here import StoreHere

Test = tuple[str, str]
"""A test as (file, test)."""

_SETTINGS_FILE = "pyproject.toml"
"""The file of models by name. A typed model has baselines, and other runs do not collect it."""
_MOST_NAMED = 3


@dataclass(frozen=True, slots=True)
class CollectedFiles:
    """The test files of a collection, by path from the root directory."""

    collected: Collection[str]
    skipped: Collection[str]
    """The files skipped by themselves, for example by ``pytest.importorskip``."""
    failed: Collection[str]


def tests_in(files: Collection[str], stored: StoreHere) -> frozenset[Test]:
    """Return the tests in ``files`` with baselines for this session."""
    return frozenset((key.file, key.test) for _, key in stored.keys(files))


def files_left_out(config: pytest.Config, files: CollectedFiles, stored: StoreHere) -> tuple[str, ...]:
    """Return a sentence for each existing test file with baselines, if pytest did not collect the file.

    Args:
        config: The config of a run without a typed selection.
        files: The files of the collection.
        stored: The baselines for this session.
    """
    looked_at = {*files.collected, *files.skipped, *files.failed, _SETTINGS_FILE}
    absent = {file for file in stored.files() - looked_at if (config.rootpath / file).is_file()}
    functions = config.getini("python_functions")
    tests: dict[tuple[str, str], set[str]] = {}
    for slug, key in stored.keys(absent):
        if not is_of_script(key, functions):
            tests.setdefault((key.file, slug), set()).add(key.test)
    sentences = []
    for (file, slug), names in sorted(tests.items()):
        have = "1 test in it has" if len(names) == 1 else f"{len(names)} tests in it have"
        why = _clause(setting_that_leaves_out(config, file))
        mend = f"let pytest collect the file, or delete {path_of(slug, file)} from the store"
        sentences.append(f"{file} was not collected{why}, and {have} baselines on {slug}: {mend}")
    return tuple(sentences)


def tests_gone(files: CollectedFiles, tests: Collection[Test], stored: StoreHere, root: Path) -> tuple[str, ...]:
    """Return a sentence on the baselines of deleted tests, for a run without any measured test.

    Args:
        files: The files of the collection.
        tests: The tests of the collection.
        stored: The baselines for this session.
        root: The root directory.
    """
    baselines = unused(
        stored.keys(stored.files()),
        measured=tests,
        whole_files=files.collected,
        exists=lambda file: (root / file).exists(),
    )
    return (unused_line(baselines),) if baselines else ()


def skipped_files(tests: Collection[Test]) -> tuple[str, ...]:
    """Return a sentence for each file that skipped itself, which strict mode takes for an error.

    Args:
        tests: The tests with baselines in such files.
    """
    numbers = Counter(file for file, _ in tests)
    return tuple(
        f"{file} skipped itself, and {'1 test in it has' if number == 1 else f'{number} tests in it have'} baselines here: let "
        "it run, or delete its file from the store"
        for file, number in sorted(numbers.items())
    )


def deselected(config: pytest.Config, tests: Collection[Test], stored: StoreHere) -> str | None:
    """Return a sentence on deselected tests with baselines; ``None`` if there are no such baselines.

    Args:
        config: The config of a run without a typed selection.
        tests: The deselected tests.
        stored: The baselines for this session.
    """
    idle = sorted(tests_in({file for file, _ in tests}, stored) & {*tests})
    if not idle:
        return None
    have = (
        "1 test that has baselines here was" if len(idle) == 1 else f"{len(idle)} tests that have baselines here were"
    )
    named = ", ".join([f"{file}::{test}" for file, test in idle[:_MOST_NAMED]] + ["..."] * (len(idle) > _MOST_NAMED))
    options = selecting_options(config)
    return f"{have} deselected, by {options or 'a conftest.py or a plugin'}: {named}"


def selecting_options(config: pytest.Config) -> str | None:
    """Return the deselecting options in the settings: ``"-k of addopts"``; ``None`` without such options."""
    options = [
        word
        for word, name in (
            ("-k", "keyword"),
            ("-m", "markexpr"),
            ("--deselect", "deselect"),
            ("--lf", "lf"),
            ("--sw", "stepwise"),
        )
        if getattr(config.option, name, None)
    ]
    return f"{', '.join(options)} of addopts" if options else None


def setting_that_leaves_out(config: pytest.Config, file: str) -> str | None:
    """Return the pytest setting by which a test file is left out: ``"testpaths"``; ``None`` if it is not clear."""
    root, path = config.rootpath, config.rootpath / file
    starts = [(config.invocation_params.dir / word.partition("::")[0]).resolve() for word in config.args]
    if not any(path.resolve().is_relative_to(start) for start in starts):
        testpaths = config.getini("testpaths")
        if config.args_source is type(config.args_source).TESTPATHS or config.args == testpaths:
            return "testpaths"
        # A worker of pytest-xdist is given the paths without their source.
        return "testpaths or paths of addopts" if testpaths and hasattr(config, "workerinput") else "paths of addopts"
    for name in ("ignore", "ignore_glob"):
        patterns = [str(config.invocation_params.dir / word) for word in getattr(config.option, name, None) or ()]
        if any(fnmatch.fnmatch(str(parent), pattern) for parent in (path, *path.parents) for pattern in patterns):
            return f"--{name.replace('_', '-')} of addopts"
    folders = PurePosixPath(file).parent.parts
    for pattern in config.getini("norecursedirs"):
        if any(_matches(pattern, root.joinpath(*folders[:count])) for count in range(1, len(folders) + 1)):
            return "norecursedirs"
    if not any(_matches(pattern, path) for pattern in config.getini("python_files")):
        return "python_files"
    return None


def _matches(pattern: str, path: Path) -> bool:
    """Return whether a pattern of pytest's settings matches a name, or, if it has a slash, the end of a path."""
    return fnmatch.fnmatch(str(path), f"*/{pattern}") if "/" in pattern else fnmatch.fnmatch(path.name, pattern)


def _clause(setting: str | None) -> str:
    return (
        f" (left out by {setting})" if setting is not None else " (perhaps left out by a conftest.py: collect_ignore)"
    )
