"""Find a few node id patterns for all tests that run models. The patterns match no other test. Pure functions.

For example, let the first four of these six tests run models::

    tests/models/test_gpt.py::test_forward
    tests/models/test_vit.py::test_forward
    tests/test_train.py::test_step_fp32
    tests/test_train.py::test_step_bf16
    tests/test_train.py::test_arguments         (no model)
    tests/test_cli.py::test_help                (no model)

Two patterns match the four tests: ``tests/models/*`` and ``tests/test_train.py::test_step*``.
"""

from __future__ import annotations

from collections import defaultdict
from pathlib import PurePosixPath
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from collections.abc import Iterator, Sequence

    from pytest_gpumem.tools.init.project_tests import ProjectTest


def patterns_of(tests: Sequence[ProjectTest]) -> tuple[str, ...]:
    """Return node id patterns for `matches_test`. They match all proposed tests, and no other test.

    A folder, file or class becomes a single pattern if each of its tests is proposed or is measured already. Otherwise, tests
    in a file or class share a pattern if their names have the same beginning: ``test_step*``.
    """
    model_tests = [test for test in tests if test.is_proposed]
    other_tests = [test for test in tests if not test.is_proposed and not test.is_measured]
    patterns: list[str] = []
    remaining = list(model_tests)
    for folder in _folders(model_tests):
        inside = [test for test in remaining if _is_below(test.file, folder)]
        if len({test.file for test in inside}) > 1 and not any(_is_below(test.file, folder) for test in other_tests):
            patterns.append(f"{folder}/*")
            remaining = [test for test in remaining if test not in inside]
    by_file: dict[str, list[ProjectTest]] = defaultdict(list)
    for test in remaining:
        by_file[test.file].append(test)
    for file, inside in by_file.items():
        if any(test.file == file for test in other_tests):
            patterns += _patterns_below(file, inside, [test for test in other_tests if test.file == file])
        else:
            patterns.append(file)
    return tuple(sorted(patterns))


def _folders(tests: Sequence[ProjectTest]) -> list[str]:
    """Return all folders above the tests, the outermost first, except the root directory."""
    folders = {folder.as_posix() for test in tests for folder in PurePosixPath(test.file).parents}
    return sorted(folders - {"."}, key=lambda folder: (folder.count("/"), folder))


def _is_below(file: str, folder: str) -> bool:
    return file.startswith(f"{folder}/")


def _patterns_below(prefix: str, tests: Sequence[ProjectTest], other_tests: Sequence[ProjectTest]) -> Iterator[str]:
    """Yield patterns for ``tests``, but not for ``other_tests``, in a file or class: first for complete classes, then for test
    names.
    """
    names: dict[str, list[ProjectTest]] = defaultdict(list)
    for test in tests:
        names[test.nodeid.removeprefix(f"{prefix}::").partition("::")[0]].append(test)
    plain: list[ProjectTest] = []
    for name, inside in names.items():
        path = f"{prefix}::{name}"
        if inside[0].nodeid == path:
            plain += inside
        elif any(test.nodeid.startswith(f"{path}::") for test in other_tests):
            yield from _patterns_below(
                path, inside, [test for test in other_tests if test.nodeid.startswith(f"{path}::")]
            )
        else:
            yield path
    yield from _name_patterns(plain, [test.nodeid for test in (*other_tests, *tests) if test not in plain])


def _name_patterns(tests: list[ProjectTest], excluded: Sequence[str]) -> Iterator[str]:
    while tests:
        first = tests[0]
        longest_match = max(
            (_with_beginning(beginning, tests, excluded) for beginning in _beginnings(first.nodeid)),
            key=lambda match: len(match[1]),
        )
        if len(longest_match[1]) > 1:
            yield f"{longest_match[0]}*"
            tests = [test for test in tests if test not in longest_match[1]]
            continue
        # `matches_test` does not treat the bracket as a wildcard, so this pattern matches a parametrized test's items.
        yield f"{first.nodeid}[*" if first.has_parameters else first.nodeid
        tests = tests[1:]


def _beginnings(nodeid: str) -> list[str]:
    """Return the beginnings of a node id up to the end of each word, the longest first.

    For example, ``f::test_a_b`` has the beginnings ``f::test_a_b`` and ``f::test_a``.
    """
    path, _, name = nodeid.rpartition("::")
    words = name.split("_")
    return [f"{path}::{'_'.join(words[:count])}" for count in range(len(words), 1, -1)]


def _with_beginning(
    beginning: str, tests: Sequence[ProjectTest], excluded: Sequence[str]
) -> tuple[str, list[ProjectTest]]:
    """Return the beginning, and the tests whose node ids start with the beginning. Return no tests if an excluded node id
    starts with the beginning as well.
    """
    if any(nodeid.startswith(beginning) for nodeid in excluded):
        return beginning, []
    return beginning, [test for test in tests if test.nodeid.startswith(beginning)]
