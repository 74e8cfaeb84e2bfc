"""Tests with baselines left out by settings, in a run without a typed selection: each file is named, with the setting."""

from __future__ import annotations

import fnmatch
import inspect
import sys
import unittest
from collections import Counter
from dataclasses import dataclass
from pathlib import Path, PurePosixPath
from types import ModuleType
from typing import TYPE_CHECKING

from pytest_gpumem.baselines.selecting import is_name_of_test, is_of_script, unused, unused_line
from pytest_gpumem.baselines.store import path_of
from pytest_gpumem.units import counted

if TYPE_CHECKING:
    from collections.abc import Collection, Iterable, Mapping

    import pytest

    from pytest_gpumem.gate.baseline import Key
    from pytest_gpumem.session.store_here import StoreHere
    from pytest_gpumem.values.selection import Test

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
        have = counted(len(names), "test in it has", "tests in it have")
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
        f"{file} skipped itself, and {counted(number, 'test in it has', 'tests in it have')} baselines here: let "
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
    return _tests_were(f"deselected, by {selecting_options(config) or 'a conftest.py or a plugin'}", idle)


def left_out_by_name(
    config: pytest.Config, stored: Iterable[tuple[str, Key]], tests: Collection[Test], files: Collection[str]
) -> dict[Test, str]:
    """Return the uncollected tests that are in the modules of collected files, each with the setting that leaves it out.

    For example, ``python_functions = check_*`` leaves out ``test_it``. A deleted test is not among them.

    Args:
        config: pytest's.
        stored: The baselines, as (slug, key).
        tests: The tests of the collection.
        files: The collected files.
    """
    settings = {}
    for key in {key for _, key in stored if key.file in files and (key.file, key.test) not in tests}:
        *classes, function = key.test.partition("[")[0].split("::")
        names = [*((name, "python_classes") for name in classes), (function, "python_functions")]
        wrong = [setting for name, setting in names if not is_name_of_test(name, config.getini(setting))]
        if wrong:
            settings[key.file, key.test] = ([*classes, function], wrong[0])
    if not settings:
        return {}
    modules = _modules(config.rootpath / file for file, _ in settings)
    return {
        (file, test): setting
        for (file, test), (names, setting) in settings.items()
        if _is_in(modules.get((config.rootpath / file).resolve()), names)
    }


def uncollected(settings: Mapping[Test, str], stored: StoreHere) -> tuple[str, ...]:
    """Return a sentence for each setting of names that leaves out tests with baselines.

    Args:
        settings: The tests, each with the setting that leaves it out.
        stored: The baselines for this session.
    """
    idle = sorted(tests_in({file for file, _ in settings}, stored) & settings.keys())
    return tuple(
        _tests_were(f"not collected (left out by {setting})", [test for test in idle if settings[test] == setting])
        for setting in sorted({settings[test] for test in idle})
    )


def _modules(paths: Iterable[Path]) -> dict[Path, ModuleType]:
    """Return the imported modules of files, by the resolved path."""
    wanted = {path.resolve() for path in paths}
    names = {path.name for path in wanted}
    modules: dict[Path, ModuleType] = {}
    for module in list(sys.modules.values()):
        file = vars(module).get("__file__") if isinstance(module, ModuleType) else None
        if isinstance(file, str) and Path(file).name in names and (path := Path(file).resolve()) in wanted:
            modules[path] = module
    return modules


def _is_in(module: ModuleType | None, names: Iterable[str]) -> bool:
    """Return whether a module has a test, whose names of classes and function are ``names``."""
    place: object = module
    for name in names:
        # A unittest.TestCase is collected whatever these settings are, so its uncollected test is gone.
        if place is None or (isinstance(place, type) and issubclass(place, unittest.TestCase)):
            return False
        place = inspect.getattr_static(place, name, None)
    return place is not None


def _tests_were(what: str, tests: Collection[Test]) -> str:
    """Return ``"1 test that has baselines here was deselected, by -k of addopts: test_it.py::test_it"``."""
    have = counted(len(tests), "test that has baselines here was", "tests that have baselines here were")
    named = [f"{file}::{test}" for file, test in sorted(tests)]
    return f"{have} {what}: {', '.join(named[:_MOST_NAMED] + ['...'] * (len(named) > _MOST_NAMED))}"


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
