"""The tests of a project by their source: node id, whether each runs a model, and whether it is measured already."""

from __future__ import annotations

import ast
import fnmatch
from dataclasses import dataclass, replace
from pathlib import PurePosixPath
from typing import TYPE_CHECKING

from pytest_gpumem.config.options import CONFIG_FIXTURE, CONFIG_MARKER, FIXTURE, MARKER
from pytest_gpumem.init.module_names import Models, mentions_gpu
from pytest_gpumem.init.running import Runs, Scope, parameters
from pytest_gpumem.init.sources import Function, statements

if TYPE_CHECKING:
    from collections.abc import Iterable, Iterator, Mapping, Sequence

    from pytest_gpumem.init.sources import SourceFile, Sources


@dataclass(frozen=True, slots=True)
class Names:
    """The names that pytest collects, as its settings say: patterns of files, prefixes or patterns of classes and functions."""

    files: Sequence[str] = ("test_*.py", "*_test.py")
    classes: Sequence[str] = ("Test",)
    functions: Sequence[str] = ("test",)
    folders: Sequence[str] = ()
    """Patterns of the files and folders that tests are looked for in, from the root directory; empty for everywhere."""
    not_entered: Sequence[str] = ()
    """Patterns of names of folders that are not entered."""
    ignored: Sequence[str] = ()
    """Patterns of files and folders that are not collected, from the root directory."""

    def has_file(self, path: str) -> bool:
        """Return whether tests are collected from the file at ``path``."""
        file = PurePosixPath(path)
        above = [one.as_posix() for one in (file, *file.parents)]
        below = not self.folders or any(fnmatch.filter(above, PurePosixPath(one).as_posix()) for one in self.folders)
        entered = not any(fnmatch.filter(file.parts[:-1], one) for one in self.not_entered)
        if not below or not entered or any(fnmatch.filter(above, one) for one in self.ignored):
            return False
        return any(fnmatch.fnmatch(path if "/" in one else file.name, one) for one in self.files)

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
    perhaps_ignored: tuple[str, ...] = ()
    """Files with tests that run models which a conftest.py ignores under a condition."""


def find_tests(sources: Sources, names: Names) -> FoundTests:
    """Return the tests of a project, in the order of files and lines."""
    runs = Runs(sources, Models(sources))
    found: list[FoundTest] = []
    for path in sorted(sources.files):
        if names.has_file(path) and not is_ignored(path, sources):
            found += _of_file(sources.files[path], sources, names, runs)
    concerned = {one.file for one in found if one.runs_model}
    shared = {conftest.path for path in concerned for conftest in sources.conftests_of(path)}
    trees = [sources.files[path].tree for path in sorted(concerned | shared)]
    uses_fixture = any(one.is_measured for one in found)
    perhaps = (path for path in sorted(concerned) if is_ignored(path, sources, under_condition=True))
    return FoundTests(tuple(found), uses_fixture or mentions_gpu(trees), tuple(perhaps))


def is_ignored(path: str, sources: Sources, *, under_condition: bool = False) -> bool:
    """Return whether a conftest.py says that pytest is not to collect a file, or a folder that it is in.

    A condition is not evaluated: what stands behind an ``if`` or ``try`` counts only if that is asked for.
    """
    file = PurePosixPath(path)
    for conftest in sources.conftests_of(path):
        folder = PurePosixPath(conftest.path).parent
        above = [one.as_posix() for one in (file, *file.parents) if one.is_relative_to(folder)]
        for name, matches in (("collect_ignore", _equal), ("collect_ignore_glob", fnmatch.filter)):
            body = [*statements(conftest.tree.body)] if under_condition else conftest.tree.body
            if any(matches(above, (folder / one).as_posix()) for one in _texts_in(name, body)):
                return True
    return False


def _equal(paths: Sequence[str], path: str) -> list[str]:
    return [one for one in paths if one == path]


def _texts_in(name: str, body: Sequence[ast.stmt]) -> Iterator[str]:
    """Yield the texts that statements give a list of this name, whatever else is in it."""
    for one in body:
        targets: Sequence[ast.expr] = ()
        if isinstance(one, ast.Assign):
            targets, value = one.targets, one.value
        elif isinstance(one, ast.AugAssign | ast.AnnAssign) and one.value is not None:
            targets, value = [one.target], one.value
        elif (
            isinstance(one, ast.Expr) and isinstance(one.value, ast.Call) and isinstance(one.value.func, ast.Attribute)
        ):
            targets, value = [one.value.func.value], ast.List(one.value.args)
        if any(ast.unparse(target) == name for target in targets):
            yield from (
                node.value for node in ast.walk(value) if isinstance(node, ast.Constant) and isinstance(node.value, str)
            )


@dataclass(frozen=True, slots=True)
class _Around:
    """Markers, fixtures and set-up that a module or class gives each test in it."""

    sources: Sources
    names: Names
    runs: Runs
    marks: Sequence[tuple[ast.expr, SourceFile]]
    scope: Scope
    set_up: Sequence[tuple[Function, SourceFile]]
    """Set-up functions that are run before each of its tests, or before the first."""
    may_get_parameters: bool
    is_test_case: bool = False

    def has_function(self, name: str) -> bool:
        """Return whether a function of this name is a test: of a `unittest.TestCase` whatever the settings say."""
        return name.startswith("test") if self.is_test_case else self.names.matches(name, self.names.functions)

    def runs_model(self, test: Function, file: SourceFile) -> bool:
        """Return whether a test runs a model, or what is run before it without its asking."""
        fixtures = self.scope.fixtures
        before = [*(fixtures[name] for name in self.unasked if name in fixtures), *self.set_up]
        scope = self.scope
        for mark, where in self.marks:
            scope = self.runs.parametrized([mark], where, scope)
        if self.runs.does(test, file, self.runs.parametrized(test.decorator_list, file, scope)):
            return True
        return any(
            self.runs.does(one, where, self.runs.parametrized(one.decorator_list, where, self.scope))
            for one, where in before
        )

    @property
    def unasked(self) -> list[str]:
        """The names of fixtures that each test has without a parameter of that name."""
        fixtures = self.scope.fixtures.items()
        automatic = [name for name, (one, _) in fixtures if any(map(_is_autouse, one.decorator_list))]
        return [*automatic, *_used([mark for mark, _ in self.marks])]


def _of_file(file: SourceFile, sources: Sources, names: Names, runs: Runs) -> Iterator[FoundTest]:
    fixtures: dict[str, tuple[Function, SourceFile]] = {}
    conftests = sources.conftests_of(file.path)
    for where in (*reversed(conftests), file):
        fixtures.update((name, (one, where)) for name, one in _fixtures(where.tree.body))
    around = _Around(
        sources,
        names,
        runs,
        [(mark, file) for mark in _pytestmarks(file.tree.body)],
        Scope(fixtures),
        [(one, file) for name, one in file.functions.items() if name in _SET_UP_OF_MODULE],
        any("pytest_generate_tests" in where.functions for where in (file, *conftests)),
    )
    of_functions = [(one, file) for name, one in file.functions.items() if name in _SET_UP_OF_FUNCTION]
    yield from _of_body([(one, file) for one in file.tree.body], file.path, around, of_functions)


def _of_body(
    body: Sequence[tuple[ast.stmt, SourceFile]],
    prefix: str,
    around: _Around,
    of_functions: Sequence[tuple[Function, SourceFile]] = (),
) -> Iterator[FoundTest]:
    """Yield the tests of a file or class: each statement is with the file that it is in, which may be that of a base."""
    for one, file in body:
        if isinstance(one, ast.ClassDef) and _is_collected(one, file, around):
            yield from _of_class(one, file, prefix, around)
        elif isinstance(one, Function) and around.has_function(one.name):
            if "::" not in prefix and _is_fixture(one):
                continue
            own = replace(
                around,
                marks=[*around.marks, *((mark, file) for mark in one.decorator_list)],
                set_up=[*around.set_up, *of_functions],
            )
            marks = [mark for mark, _ in own.marks]
            taken = _all_fixtures([*parameters(one), *own.unasked], around.scope.fixtures)
            of_fixtures = [mark for marks_of_one in taken for mark in marks_of_one]
            with_parameters = any(map(_has_parameters, (*marks, *of_fixtures)))
            yield FoundTest(
                f"{prefix}::{one.name}",
                runs_model=own.runs_model(one, file),
                is_measured=not {FIXTURE, CONFIG_FIXTURE}.isdisjoint(parameters(one)) or any(map(_is_marker, marks)),
                has_parameters=True if with_parameters else None if around.may_get_parameters else False,
            )


def _of_class(definition: ast.ClassDef, file: SourceFile, prefix: str, around: _Around) -> Iterator[FoundTest]:
    lineage = around.sources.lineage(definition, file)
    whole: dict[str, tuple[ast.stmt, SourceFile]] = {}
    for one, where in lineage:
        for each in one.body:
            if isinstance(each, Function | ast.ClassDef):
                whole.setdefault(each.name, (each, where))
    methods = {name: (one, where) for name, (one, where) in whole.items() if isinstance(one, Function)}
    fixtures = {name: (method, where) for one, where in methods.values() for name, method in _fixtures([one])}
    marks = [(mark, where) for one, where in lineage for mark in (*one.decorator_list, *_pytestmarks(one.body))]
    inside = replace(
        around,
        marks=[*around.marks, *marks],
        scope=replace(
            around.scope,
            fixtures={**around.scope.fixtures, **fixtures},
            methods=methods,
            modules=frozenset[str]().union(*(around.runs.attributes(one, where) for one, where in lineage)),
        ),
        set_up=[*around.set_up, *(one for name, one in methods.items() if name in _SET_UP_OF_CLASS)],
        is_test_case=_is_test_case(definition, file, around.sources),
    )
    yield from _of_body(list(whole.values()), f"{prefix}::{definition.name}", inside)


_SET_UP_OF_MODULE = ("setup_module", "setUpModule")
_SET_UP_OF_FUNCTION = ("setup_function",)
_SET_UP_OF_CLASS = ("setUp", "asyncSetUp", "setUpClass", "setup_method", "setup_class")


def _is_collected(definition: ast.ClassDef, file: SourceFile, around: _Around) -> bool:
    has_constructor = any(isinstance(one, Function) and one.name == "__init__" for one in definition.body)
    of_settings = around.names.matches(definition.name, around.names.classes) and not has_constructor
    return of_settings or _is_test_case(definition, file, around.sources)


def _is_test_case(definition: ast.ClassDef, file: SourceFile, sources: Sources) -> bool:
    """Return whether a class is a `unittest.TestCase`, by the names of its bases: those of the project are followed."""
    return any(
        (where.dotted(base) or "").endswith("TestCase")
        for one, where in sources.lineage(definition, file)
        for base in one.bases
    )


def _used(marks: Iterable[ast.expr]) -> Iterator[str]:
    """Yield the names of fixtures that ``usefixtures`` takes."""
    for mark in marks:
        if isinstance(mark, ast.List | ast.Tuple):
            yield from _used(mark.elts)
        elif isinstance(mark, ast.Call) and _last_name(mark) == "usefixtures":
            yield from (str(one.value) for one in mark.args if isinstance(one, ast.Constant))


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
