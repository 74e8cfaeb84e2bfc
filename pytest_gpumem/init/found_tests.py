"""The tests of a project by their source: node id, whether each runs a model, and whether it is measured already."""

from __future__ import annotations

import ast
import fnmatch
from dataclasses import dataclass
from pathlib import PurePosixPath
from typing import TYPE_CHECKING

from pytest_gpumem.config.options import CONFIG_FIXTURE, FIXTURE, MARKER
from pytest_gpumem.init.running import Models, Runs, mentions_gpu, parameters
from pytest_gpumem.init.sources import Function

if TYPE_CHECKING:
    from collections.abc import Iterator, Mapping, Sequence

    from pytest_gpumem.init.sources import SourceFile, Sources


@dataclass(frozen=True, slots=True)
class Names:
    """The names that pytest collects, as its settings say: patterns of files, prefixes or patterns of classes and functions."""

    files: Sequence[str] = ("test_*.py", "*_test.py")
    classes: Sequence[str] = ("Test",)
    functions: Sequence[str] = ("test",)
    folders: Sequence[str] = ()
    """The folders that tests are looked for in, from the root directory; empty for everywhere."""

    def has_file(self, path: str) -> bool:
        """Return whether tests are collected from the file at ``path``."""
        below = not self.folders or any(PurePosixPath(path).is_relative_to(folder) for folder in self.folders)
        name = path.rpartition("/")[2]
        return below and any(fnmatch.fnmatch(path if "/" in one else name, one) for one in self.files)

    @staticmethod
    def matches(name: str, patterns: Sequence[str]) -> bool:
        """Return whether a name has one of these prefixes, or matches one as a pattern."""
        return any(name.startswith(one) or fnmatch.fnmatch(name, one) for one in patterns)


@dataclass(frozen=True, slots=True)
class FoundTest:
    """A test function, or a method of a class: several items where it is parametrized."""

    nodeid: str
    runs_model: bool
    is_measured: bool = False
    """True if it has the marker or the fixture."""
    has_parameters: bool | None = False
    """``None`` where a hook may give it some."""

    @property
    def file(self) -> str:
        """The file that it is in."""
        return self.nodeid.partition("::")[0]


@dataclass(frozen=True, slots=True)
class FoundTests:
    """All tests of a project. ``on_gpu`` is True if those that run models, or what they share, put something on a GPU."""

    tests: tuple[FoundTest, ...]
    on_gpu: bool = False


def find_tests(sources: Sources, names: Names) -> FoundTests:
    """Return the tests of a project, in the order of files and lines."""
    runs = Runs(sources, Models(sources))
    found: list[FoundTest] = []
    for path in sorted(sources.files):
        if names.has_file(path):
            found += _of_file(sources.files[path], sources, names, runs)
    concerned = {one.file for one in found if one.runs_model}
    shared = {conftest.path for path in concerned for conftest in sources.conftests_of(path)}
    trees = [sources.files[path].tree for path in sorted(concerned | shared)]
    uses_fixture = any(one.is_measured for one in found)
    return FoundTests(tuple(found), on_gpu=uses_fixture or mentions_gpu(trees))


def _of_file(file: SourceFile, sources: Sources, names: Names, runs: Runs) -> Iterator[FoundTest]:
    fixtures: dict[str, tuple[Function, SourceFile]] = {}
    conftests = sources.conftests_of(file.path)
    for where in (*reversed(conftests), file):
        fixtures.update((name, (one, where)) for name, one in _fixtures(where.tree.body))
    may_get_parameters = any("pytest_generate_tests" in where.functions for where in (file, *conftests))
    marks = list(_pytestmarks(file.tree.body))
    yield from _of_body(file.tree.body, file.path, marks, fixtures, file, names, runs, may_get_parameters)


def _of_body(
    body: Sequence[ast.stmt],
    prefix: str,
    marks: Sequence[ast.expr],
    fixtures: Mapping[str, tuple[Function, SourceFile]],
    file: SourceFile,
    names: Names,
    runs: Runs,
    may_get_parameters: bool,
) -> Iterator[FoundTest]:
    is_class = "::" in prefix
    for one in body:
        if isinstance(one, ast.ClassDef) and _is_collected(one, file, names):
            own = {**fixtures, **{name: (method, file) for name, method in _fixtures(one.body)}}
            more = [*marks, *one.decorator_list, *_pytestmarks(one.body)]
            whole = _with_bases(one, file)
            yield from _of_body(whole, f"{prefix}::{one.name}", more, own, file, names, runs, may_get_parameters)
        elif isinstance(one, Function) and names.matches(one.name, names.functions):
            if not is_class and _is_fixture(one):
                continue
            all_marks = [*marks, *one.decorator_list]
            set_up = [each for each in body if is_class and isinstance(each, Function) and each.name in _SET_UP]
            of_fixtures = [mark for marks_of_one in _all_fixtures(one, fixtures) for mark in marks_of_one]
            with_parameters = any(map(_has_parameters, (*all_marks, *of_fixtures)))
            yield FoundTest(
                f"{prefix}::{one.name}",
                runs_model=any(runs.does(each, file, fixtures) for each in (one, *set_up)),
                is_measured=not {FIXTURE, CONFIG_FIXTURE}.isdisjoint(parameters(one))
                or any(map(_is_marker, all_marks)),
                has_parameters=True if with_parameters else None if may_get_parameters else False,
            )


_SET_UP = ("setUp", "setup_method")


def _with_bases(definition: ast.ClassDef, file: SourceFile) -> list[ast.stmt]:
    """Return what a class has, with what it inherits from classes of the same file."""
    found = {one.name: one for one in definition.body if isinstance(one, Function | ast.ClassDef)}
    for base in definition.bases:
        inherited = file.classes.get(ast.unparse(base))
        if inherited is not None and inherited is not definition:
            for one in _with_bases(inherited, file):
                if isinstance(one, Function | ast.ClassDef):
                    found.setdefault(one.name, one)
    return list(found.values())


def _is_collected(definition: ast.ClassDef, file: SourceFile, names: Names) -> bool:
    bases = {(file.dotted(base) or "").rpartition(".")[2] for base in definition.bases}
    has_constructor = any(isinstance(one, Function) and one.name == "__init__" for one in definition.body)
    return "TestCase" in bases or (names.matches(definition.name, names.classes) and not has_constructor)


def _fixtures(body: Sequence[ast.stmt]) -> Iterator[tuple[str, Function]]:
    """Yield the fixtures among statements, by the name that tests take them by."""
    for one in body:
        decorators = one.decorator_list if isinstance(one, Function) else []
        for decorator in decorators:
            if isinstance(one, Function) and _last_name(decorator) == "fixture":
                yield _given_name(decorator) or one.name, one


def _given_name(decorator: ast.expr) -> str | None:
    for word in decorator.keywords if isinstance(decorator, ast.Call) else []:
        if word.arg == "name" and isinstance(word.value, ast.Constant):
            return str(word.value.value)
    return None


def _is_fixture(function: Function) -> bool:
    return any(_last_name(one) == "fixture" for one in function.decorator_list)


def _all_fixtures(function: Function, fixtures: Mapping[str, tuple[Function, SourceFile]]) -> Iterator[list[ast.expr]]:
    """Yield the decorators of each fixture that a test takes, directly or not."""
    seen: set[str] = set()
    waiting = parameters(function)
    while waiting:
        name = waiting.pop()
        if name in fixtures and name not in seen:
            seen.add(name)
            yield fixtures[name][0].decorator_list
            waiting += parameters(fixtures[name][0])


def _has_parameters(decorator: ast.expr) -> bool:
    if not isinstance(decorator, ast.Call):
        return isinstance(decorator, ast.List | ast.Tuple) and any(map(_has_parameters, decorator.elts))
    name = _last_name(decorator)
    return name in ("parametrize", f"{MARKER}_configs") or (
        name == "fixture" and any(word.arg == "params" for word in decorator.keywords)
    )


def _is_marker(decorator: ast.expr) -> bool:
    if isinstance(decorator, ast.List | ast.Tuple):
        return any(map(_is_marker, decorator.elts))
    target = decorator.func if isinstance(decorator, ast.Call) else decorator
    return ast.unparse(target).endswith(f"mark.{MARKER}")


def _pytestmarks(body: Sequence[ast.stmt]) -> Iterator[ast.expr]:
    for one in body:
        if isinstance(one, ast.Assign) and any(ast.unparse(target) == "pytestmark" for target in one.targets):
            yield one.value


def _last_name(node: ast.expr) -> str:
    target = node.func if isinstance(node, ast.Call) else node
    return ast.unparse(target).rpartition(".")[2]
