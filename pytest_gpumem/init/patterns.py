"""As few patterns of node ids as name certain tests and no others. Pure."""

from __future__ import annotations

from collections import defaultdict
from pathlib import PurePosixPath
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from collections.abc import Iterator, Sequence

    from pytest_gpumem.init.found_tests import FoundTest


def patterns_of(tests: Sequence[FoundTest]) -> tuple[str, ...]:
    """Return patterns, as `matches_test` reads them, of the tests that run models; none of those that do not.

    A folder, a file or a class is named whole where all of its tests do, or are measured anyway. Beginnings of names stand for
    several tests of a file or class.
    """
    wanted = [one for one in tests if one.runs_model and not one.is_measured]
    others = [one for one in tests if not one.runs_model and not one.is_measured]
    found: list[str] = []
    left = list(wanted)
    for folder in _folders(wanted):
        inside = [one for one in left if _is_below(one.file, folder)]
        if len({one.file for one in inside}) > 1 and not any(_is_below(one.file, folder) for one in others):
            found.append(f"{folder}/*")
            left = [one for one in left if one not in inside]
    by_file: dict[str, list[FoundTest]] = defaultdict(list)
    for one in left:
        by_file[one.file].append(one)
    for file, inside in by_file.items():
        if any(one.file == file for one in others):
            found += _below(file, inside, [one for one in others if one.file == file])
        else:
            found.append(file)
    return tuple(sorted(found))


def _folders(tests: Sequence[FoundTest]) -> list[str]:
    """Return the folders that these tests are in or below, the outer ones first; not the root directory."""
    folders = {folder.as_posix() for one in tests for folder in PurePosixPath(one.file).parents}
    return sorted(folders - {"."}, key=lambda folder: (folder.count("/"), folder))


def _is_below(file: str, folder: str) -> bool:
    return file.startswith(f"{folder}/")


def _below(prefix: str, tests: Sequence[FoundTest], others: Sequence[FoundTest]) -> Iterator[str]:
    """Yield patterns of these tests of a file or class: whole classes, then names."""
    names: dict[str, list[FoundTest]] = defaultdict(list)
    for one in tests:
        names[one.nodeid.removeprefix(f"{prefix}::").partition("::")[0]].append(one)
    plain: list[FoundTest] = []
    for name, inside in names.items():
        path = f"{prefix}::{name}"
        if inside[0].nodeid == path:
            plain += inside
        elif any(one.nodeid.startswith(f"{path}::") for one in others):
            yield from _below(path, inside, [one for one in others if one.nodeid.startswith(f"{path}::")])
        else:
            yield path
    yield from _of_names(plain, [one.nodeid for one in (*others, *tests) if one not in plain])


def _of_names(tests: list[FoundTest], others: Sequence[str]) -> Iterator[str]:
    while tests:
        first = tests[0]
        together = max(
            (_with_beginning(beginning, tests, others) for beginning in _beginnings(first.nodeid)),
            key=lambda found: len(found[1]),
        )
        if len(together[1]) > 1:
            yield f"{together[0]}*"
            tests = [one for one in tests if one not in together[1]]
            continue
        if first.has_parameters is not True:
            yield first.nodeid
        if first.has_parameters is not False:
            # A bracket in a pattern is one.
            yield f"{first.nodeid}[*"
        tests = tests[1:]


def _beginnings(nodeid: str) -> list[str]:
    """Return the beginnings of a test's node id that end with a word of its name: of ``f::test_a_b`` ``f::test_a``."""
    path, _, name = nodeid.rpartition("::")
    words = name.split("_")
    return [f"{path}::{'_'.join(words[:count])}" for count in range(len(words), 1, -1)]


def _with_beginning(beginning: str, tests: Sequence[FoundTest], others: Sequence[str]) -> tuple[str, list[FoundTest]]:
    """Return the tests whose node ids begin so; none where another one does, too."""
    if any(one.startswith(beginning) for one in others):
        return beginning, []
    return beginning, [one for one in tests if one.nodeid.startswith(beginning)]
