"""The tests of a project by their source: node id, whether each runs a model, and whether it is measured already."""

from __future__ import annotations

import ast
import fnmatch
from dataclasses import dataclass, replace
from pathlib import PurePosixPath
from typing import TYPE_CHECKING

from pytest_gpumem.config.options import CONFIG_FIXTURE, CONFIG_MARKER, FIXTURE, MARKER
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


@dataclass(frozen=True, slots=True)
class _Around:
    """Markers, fixtures and set-up that a module or class gives each test in it."""

    file: SourceFile
    names: Names
    runs: Runs
    marks: Sequence[ast.expr]
    fixtures: Mapping[str, tuple[Function, SourceFile]]
    set_up: Sequence[Function]
    """Set-up functions of the file that are run before each of its tests, or before the first."""
    may_get_parameters: bool
    is_test_case: bool = False

    def has_function(self, name: str) -> bool:
        """Return whether a function of this name is a test: of a `unittest.TestCase` whatever the settings say."""
        return name.startswith("test") if self.is_test_case else self.names.matches(name, self.names.functions)

    def runs_model(self, test: Function) -> bool:
        """Return whether a test runs a model, or what is run before it without its asking."""
        automatic = [self.fixtures[name] for name in self.automatic]
        before = [*automatic, *((one, self.file) for one in self.set_up)]
        return any(self.runs.does(one, where, self.fixtures) for one, where in [(test, self.file), *before])

    @property
    def automatic(self) -> list[str]:
        """The names of fixtures that each test has without taking them."""
        return [name for name, (one, _) in self.fixtures.items() if any(map(_is_autouse, one.decorator_list))]


def _of_file(file: SourceFile, sources: Sources, names: Names, runs: Runs) -> Iterator[FoundTest]:
    fixtures: dict[str, tuple[Function, SourceFile]] = {}
    conftests = sources.conftests_of(file.path)
    for where in (*reversed(conftests), file):
        fixtures.update((name, (one, where)) for name, one in _fixtures(where.tree.body))
    around = _Around(
        file,
        names,
        runs,
        list(_pytestmarks(file.tree.body)),
        fixtures,
        [one for name, one in file.functions.items() if name in _SET_UP_OF_MODULE],
        any("pytest_generate_tests" in where.functions for where in (file, *conftests)),
    )
    yield from _of_body(file.tree.body, file.path, around)


def _of_body(body: Sequence[ast.stmt], prefix: str, around: _Around) -> Iterator[FoundTest]:
    is_class = "::" in prefix
    file = around.file
    of_functions = [] if is_class else [one for name, one in file.functions.items() if name in _SET_UP_OF_FUNCTION]
    for one in body:
        if isinstance(one, ast.ClassDef) and _is_collected(one, file, around.names):
            whole = _with_bases(one, file)
            inside = replace(
                around,
                marks=[*around.marks, *one.decorator_list, *_pytestmarks(one.body)],
                fixtures={**around.fixtures, **{name: (method, file) for name, method in _fixtures(whole)}},
                set_up=[
                    *around.set_up,
                    *(each for each in whole if isinstance(each, Function) and each.name in _SET_UP_OF_CLASS),
                ],
                is_test_case=_is_test_case(one, file),
            )
            yield from _of_body(whole, f"{prefix}::{one.name}", inside)
        elif isinstance(one, Function) and around.has_function(one.name):
            if not is_class and _is_fixture(one):
                continue
            all_marks = [*around.marks, *one.decorator_list]
            taken = _all_fixtures([*parameters(one), *around.automatic], around.fixtures)
            of_fixtures = [mark for marks_of_one in taken for mark in marks_of_one]
            with_parameters = any(map(_has_parameters, (*all_marks, *of_fixtures)))
            yield FoundTest(
                f"{prefix}::{one.name}",
                runs_model=replace(around, set_up=[*around.set_up, *of_functions]).runs_model(one),
                is_measured=not {FIXTURE, CONFIG_FIXTURE}.isdisjoint(parameters(one))
                or any(map(_is_marker, all_marks)),
                has_parameters=True if with_parameters else None if around.may_get_parameters else False,
            )


_SET_UP_OF_MODULE = ("setup_module", "setUpModule")
_SET_UP_OF_FUNCTION = ("setup_function",)
_SET_UP_OF_CLASS = ("setUp", "asyncSetUp", "setUpClass", "setup_method", "setup_class")


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
    has_constructor = any(isinstance(one, Function) and one.name == "__init__" for one in definition.body)
    of_settings = names.matches(definition.name, names.classes) and not has_constructor
    return of_settings or _is_test_case(definition, file)


def _is_test_case(definition: ast.ClassDef, file: SourceFile) -> bool:
    """Return whether a class is a `unittest.TestCase`, by the names of its bases: those in the same file are followed."""
    for base in definition.bases:
        inherited = file.classes.get(ast.unparse(base))
        if (file.dotted(base) or "").endswith("TestCase"):
            return True
        if inherited is not None and inherited is not definition and _is_test_case(inherited, file):
            return True
    return False


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


def _is_autouse(decorator: ast.expr) -> bool:
    return (
        isinstance(decorator, ast.Call)
        and _last_name(decorator) == "fixture"
        and any(
            word.arg == "autouse" and isinstance(word.value, ast.Constant) and bool(word.value.value)
            for word in decorator.keywords
        )
    )


def _is_fixture(function: Function) -> bool:
    return any(_last_name(one) == "fixture" for one in function.decorator_list)


def _all_fixtures(
    taken: Sequence[str], fixtures: Mapping[str, tuple[Function, SourceFile]]
) -> Iterator[list[ast.expr]]:
    """Yield the decorators of each of these fixtures, and of those that they take."""
    seen: set[str] = set()
    waiting = list(taken)
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
    return name in ("parametrize", CONFIG_MARKER) or (
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
