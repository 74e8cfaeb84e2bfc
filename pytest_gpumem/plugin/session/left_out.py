"""Warn if settings exclude tests with baselines from a run, although the user selected no tests on the command line.

Example: ``tests/test_gpt.py was not collected (left out by testpaths), and 2 tests in it have baselines on cpu-x86_64: let
pytest collect the file, or delete cpu-x86_64/tests/test_gpt.py.toml from the store``.
"""

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

from pytest_gpumem.base.units import counted
from pytest_gpumem.judging.baselines.selecting import is_name_of_test, is_of_script, unused_baselines, unused_line
from pytest_gpumem.judging.baselines.store import path_of

if TYPE_CHECKING:
    from collections.abc import Collection, Iterable, Mapping

    import pytest

    from pytest_gpumem.facts.values.selection import Test
    from pytest_gpumem.judging.gate.baseline import Key
    from pytest_gpumem.plugin.session.session_baselines import SessionBaselines

_SETTINGS_FILE = "pyproject.toml"
"""The file with the tests for named models. It is never reported as excluded, because pytest collects a model from
``--gpumem-model`` only with this option."""
_MOST_NAMED = 3


@dataclass(frozen=True, slots=True)
class CollectedFiles:
    """The test files in pytest's collection, as paths from the root directory."""

    collected: Collection[str]
    skipped: Collection[str]
    """The files which skipped themselves during their import, for example by ``pytest.importorskip``."""
    failed: Collection[str]


def tests_in(files: Collection[str], stored: SessionBaselines) -> frozenset[Test]:
    """Return the tests in ``files`` that have baselines for this session."""
    return frozenset((key.file, key.test) for _, key in stored.keys(files))


def files_left_out(config: pytest.Config, files: CollectedFiles, stored: SessionBaselines) -> tuple[str, ...]:
    """Return a sentence for each existing but uncollected test file with baselines.

    Args:
        config: pytest's configuration, in a run without a typed selection of tests.
        files: The collected files.
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


def tests_gone(files: CollectedFiles, tests: Collection[Test], stored: SessionBaselines, root: Path) -> tuple[str, ...]:
    """Return a sentence about the baselines of deleted tests, for a run without any measured test.

    Args:
        files: The collected files.
        tests: The collected tests.
        stored: The baselines for this session.
        root: The root directory.
    """
    baselines = unused_baselines(
        stored.keys(stored.files()),
        measured=tests,
        whole_files=files.collected,
        exists=lambda file: (root / file).exists(),
    )
    return (unused_line(baselines),) if baselines else ()


def skipped_files(tests: Collection[Test]) -> tuple[str, ...]:
    """Return a sentence for each file that skipped itself. These sentences are errors in strict mode.

    Args:
        tests: The tests with baselines in such files.
    """
    numbers = Counter(file for file, _ in tests)
    return tuple(
        f"{file} skipped itself, and {counted(number, 'test in it has', 'tests in it have')} baselines here: let "
        "it run, or delete its file from the store"
        for file, number in sorted(numbers.items())
    )


def deselected(config: pytest.Config, tests: Collection[Test], stored: SessionBaselines) -> str | None:
    """Return a sentence on deselected tests with baselines; ``None`` if the deselected tests have no baselines.

    Args:
        config: pytest's configuration, in a run without a typed selection of tests.
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
    """Return the tests that have baselines, but whose names a setting excludes, each with the name of the setting.

    For example, ``python_functions = check_*`` excludes ``test_it``. Only existing tests in collected files are returned,
    and not deleted tests.

    Args:
        config: pytest's configuration.
        stored: The baselines, as (slug, key).
        tests: The collected tests.
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


def uncollected(settings: Mapping[Test, str], stored: SessionBaselines) -> tuple[str, ...]:
    """Return a sentence for ``python_functions`` and for ``python_classes``, if the setting excludes tests with baselines.

    Args:
        settings: The excluded tests, each with the name of the setting.
        stored: The baselines for this session.
    """
    idle = sorted(tests_in({file for file, _ in settings}, stored) & settings.keys())
    return tuple(
        _tests_were(f"not collected (left out by {setting})", [test for test in idle if settings[test] == setting])
        for setting in sorted({settings[test] for test in idle})
    )


def _modules(paths: Iterable[Path]) -> dict[Path, ModuleType]:
    """Return the modules imported from the files in ``paths``, by resolved path."""
    resolved_paths = {path.resolve() for path in paths}
    names = {path.name for path in resolved_paths}
    modules: dict[Path, ModuleType] = {}
    for module in list(sys.modules.values()):
        file = vars(module).get("__file__") if isinstance(module, ModuleType) else None
        if isinstance(file, str) and Path(file).name in names and (path := Path(file).resolve()) in resolved_paths:
            modules[path] = module
    return modules


def _is_in(module: ModuleType | None, names: Iterable[str]) -> bool:
    """Return whether a module contains a test.

    ``names`` are the names of the test's classes, the outermost first, and of its function.
    """
    scope: object = module
    for name in names:
        # pytest collects a unittest.TestCase regardless of these settings. So an uncollected test in such a class was
        # deleted.
        if scope is None or (isinstance(scope, type) and issubclass(scope, unittest.TestCase)):
            return False
        scope = inspect.getattr_static(scope, name, None)
    return scope is not None


def _tests_were(participle: str, tests: Collection[Test]) -> str:
    """Return ``"1 test that has baselines here was deselected, by -k of addopts: test_it.py::test_it"``."""
    counted_tests = counted(len(tests), "test that has baselines here was", "tests that have baselines here were")
    nodeids = [f"{file}::{test}" for file, test in sorted(tests)]
    return f"{counted_tests} {participle}: {', '.join(nodeids[:_MOST_NAMED] + ['...'] * (len(nodeids) > _MOST_NAMED))}"


def selecting_options(config: pytest.Config) -> str | None:
    """Name the options in ``addopts`` which deselect tests: ``"-k of addopts"``. Return ``None`` if there are none."""
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
    """Return the pytest setting that excludes a test file, for example ``"testpaths"``; ``None`` if the setting is not
    known.
    """
    root, path = config.rootpath, config.rootpath / file
    starts = [(config.invocation_params.dir / word.partition("::")[0]).resolve() for word in config.args]
    if not any(path.resolve().is_relative_to(start) for start in starts):
        testpaths = config.getini("testpaths")
        if config.args_source is type(config.args_source).TESTPATHS or config.args == testpaths:
            return "testpaths"
        # A pytest-xdist worker does not know whether the paths come from testpaths.
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
    """Return whether a pattern matches the name of a file.

    A pattern with a slash is compared with the end of the path.
    """
    return fnmatch.fnmatch(str(path), f"*/{pattern}") if "/" in pattern else fnmatch.fnmatch(path.name, pattern)


def _clause(setting: str | None) -> str:
    return (
        f" (left out by {setting})" if setting is not None else " (perhaps left out by a conftest.py: collect_ignore)"
    )
