"""Find the tests in a project's source: their node ids, whether they run a model, and whether they are measured already."""

from __future__ import annotations

import ast
import fnmatch
from dataclasses import dataclass, replace
from pathlib import PurePosixPath
from typing import TYPE_CHECKING

from pytest_gpumem.plugin.config.options import CONFIG_FIXTURE, CONFIG_MARKER, FIXTURE, MARKER
from pytest_gpumem.tools.init.module_names import Models, mentions_gpu
from pytest_gpumem.tools.init.running import Runs, Scope, parameters
from pytest_gpumem.tools.init.sources import Function, statements

if TYPE_CHECKING:
    from collections.abc import Iterable, Iterator, Mapping, Sequence

    from pytest_gpumem.tools.init.sources import SourceFile, Sources


@dataclass(frozen=True, slots=True)
class Names:
    """The names of tests in pytest's settings. A name of a class or a function is a prefix or a pattern."""

    files: Sequence[str] = ("test_*.py", "*_test.py")
    classes: Sequence[str] = ("Test",)
    functions: Sequence[str] = ("test",)
    folders: Sequence[str] = ()
    """Patterns for the files and folders in which to search tests (``testpaths``), relative to the root directory. If empty,
    all folders are searched."""
    not_entered: Sequence[str] = ()
    """Patterns for the names of folders to skip (``norecursedirs``)."""
    ignored: Sequence[str] = ()
    """Patterns for files and folders to ignore, relative to the root directory."""

    def has_file(self, path: str) -> bool:
        """Return whether pytest collects tests from the file at ``path``."""
        file = PurePosixPath(path)
        paths = [path_above.as_posix() for path_above in (file, *file.parents)]
        is_in_folders = not self.folders or any(
            fnmatch.filter(paths, PurePosixPath(folder).as_posix()) for folder in self.folders
        )
        is_entered = not any(fnmatch.filter(file.parts[:-1], pattern) for pattern in self.not_entered)
        if not is_in_folders or not is_entered or any(fnmatch.filter(paths, pattern) for pattern in self.ignored):
            return False
        return any(fnmatch.fnmatch(path if "/" in pattern else file.name, pattern) for pattern in self.files)

    @staticmethod
    def matches(name: str, patterns: Sequence[str]) -> bool:
        """Return whether a name matches one of the patterns, or has one of them as a prefix."""
        return any(name.startswith(pattern) or fnmatch.fnmatch(name, pattern) for pattern in patterns)


@dataclass(frozen=True, slots=True)
class ProjectTest:
    """A test function or method. If it is parametrized, pytest runs it as several items.

    Example:
        ``tests/test_net.py::TestNet::test_forward`` runs a model, and ``tests/test_cli.py::test_help`` does not.
    """

    nodeid: str
    runs_model: bool
    is_measured: bool = False
    """True if the test already has pytest-gpumem's marker, or requests its fixture."""
    has_parameters: bool | None = False
    """True if the test is parametrized. ``None`` if a ``pytest_generate_tests`` hook may add parameters."""

    @property
    def file(self) -> str:
        """The test file's path."""
        return self.nodeid.partition("::")[0]


@dataclass(frozen=True, slots=True)
class ProjectTests:
    """All tests in a project."""

    tests: tuple[ProjectTest, ...]
    on_gpu: bool = False
    """True if a test already has pytest-gpumem's marker or fixture, or if a file with tests of models, or its conftest.py,
    mentions a GPU."""
    perhaps_ignored: tuple[str, ...] = ()
    """Files with tests of models that a conftest.py ignores under a condition."""


def find_tests(sources: Sources, names: Names) -> ProjectTests:
    """Return the tests in a project, ordered by file and line."""
    runs = Runs(sources, Models(sources))
    tests: list[ProjectTest] = []
    for path in sorted(sources.files):
        if names.has_file(path) and not is_ignored(path, sources):
            tests += _tests_in_file(sources.files[path], sources, names, runs)
    model_files = {test.file for test in tests if test.runs_model}
    conftests = {conftest.path for path in model_files for conftest in sources.conftests_of(path)}
    trees = [sources.files[path].tree for path in sorted(model_files | conftests)]
    uses_fixture = any(test.is_measured for test in tests)
    perhaps_ignored = (path for path in sorted(model_files) if is_ignored(path, sources, under_condition=True))
    return ProjectTests(tuple(tests), uses_fixture or mentions_gpu(trees), tuple(perhaps_ignored))


def is_ignored(path: str, sources: Sources, *, under_condition: bool = False) -> bool:
    """Return whether a conftest.py excludes a file, or a folder above the file, from collection.

    Args:
        path: The file.
        sources: The project's files.
        under_condition: Whether to look at statements inside ``if`` and ``try`` as well. Conditions are never evaluated.

    Example:
        ``collect_ignore = ["test_slow.py"]`` in ``tests/conftest.py`` ignores ``tests/test_slow.py``.
    """
    file = PurePosixPath(path)
    for conftest in sources.conftests_of(path):
        folder = PurePosixPath(conftest.path).parent
        paths = [path_above.as_posix() for path_above in (file, *file.parents) if path_above.is_relative_to(folder)]
        for name, matches in (("collect_ignore", _equal), ("collect_ignore_glob", fnmatch.filter)):
            body = [*statements(conftest.tree.body)] if under_condition else conftest.tree.body
            if any(matches(paths, (folder / ignored).as_posix()) for ignored in _texts_in(name, body)):
                return True
    return False


def _equal(paths: Sequence[str], path: str) -> list[str]:
    return [candidate for candidate in paths if candidate == path]


def _texts_in(name: str, body: Sequence[ast.stmt]) -> Iterator[str]:
    """Yield the strings in statements that assign or extend the list ``name``."""
    for statement in body:
        targets: Sequence[ast.expr] = ()
        if isinstance(statement, ast.Assign):
            targets, value = statement.targets, statement.value
        elif isinstance(statement, ast.AugAssign | ast.AnnAssign) and statement.value is not None:
            targets, value = [statement.target], statement.value
        elif (
            isinstance(statement, ast.Expr)
            and isinstance(statement.value, ast.Call)
            and isinstance(statement.value.func, ast.Attribute)
        ):
            targets, value = [statement.value.func.value], ast.List(statement.value.args)
        if any(ast.unparse(target) == name for target in targets):
            yield from (
                node.value for node in ast.walk(value) if isinstance(node, ast.Constant) and isinstance(node.value, str)
            )


@dataclass(frozen=True, slots=True)
class _Surroundings:
    """The markers, fixtures and set-up functions for a test from its file and its class."""

    sources: Sources
    names: Names
    runs: Runs
    marks: Sequence[tuple[ast.expr, SourceFile]]
    scope: Scope
    set_up: Sequence[tuple[Function, SourceFile]]
    """Set-up functions that run before each test or before the first test."""
    may_get_parameters: bool
    is_test_case: bool = False

    def has_function(self, name: str) -> bool:
        """Return whether a function with this name is a test. In a `unittest.TestCase`, the name must start with ``test``."""
        return name.startswith("test") if self.is_test_case else self.names.matches(name, self.names.functions)

    def runs_model(self, test: Function, file: SourceFile) -> bool:
        """Return whether a test runs a model: in its body, in a set-up function, or in a fixture."""
        fixtures = self.scope.fixtures
        set_up = [*(fixtures[name] for name in self.implicit_fixtures if name in fixtures), *self.set_up]
        scope = self.scope
        for mark, mark_file in self.marks:
            scope = self.runs.parametrized([mark], mark_file, scope)
        if self.runs.does(test, file, self.runs.parametrized(test.decorator_list, file, scope)):
            return True
        return any(
            self.runs.does(
                function, set_up_file, self.runs.parametrized(function.decorator_list, set_up_file, self.scope)
            )
            for function, set_up_file in set_up
        )

    @property
    def implicit_fixtures(self) -> list[str]:
        """The names of fixtures that apply without a parameter: autouse fixtures, and fixtures named in ``usefixtures``
        markers.
        """
        fixtures = self.scope.fixtures.items()
        automatic = [name for name, (fixture, _) in fixtures if any(map(_is_autouse, fixture.decorator_list))]
        return [*automatic, *_fixtures_in_use([mark for mark, _ in self.marks])]


def _tests_in_file(file: SourceFile, sources: Sources, names: Names, runs: Runs) -> Iterator[ProjectTest]:
    fixtures: dict[str, tuple[Function, SourceFile]] = {}
    conftests = sources.conftests_of(file.path)
    for source in (*reversed(conftests), file):
        fixtures.update((name, (fixture, source)) for name, fixture in _fixtures(source.tree.body))
    around = _Surroundings(
        sources,
        names,
        runs,
        [(mark, file) for mark in _pytestmarks(file.tree.body)],
        Scope(fixtures),
        [(function, file) for name, function in file.functions.items() if name in _MODULE_SET_UP],
        any("pytest_generate_tests" in source.functions for source in (file, *conftests)),
    )
    function_set_up = [(function, file) for name, function in file.functions.items() if name in _FUNCTION_SET_UP]
    yield from _tests_in_body([(statement, file) for statement in file.tree.body], file.path, around, function_set_up)


def _tests_in_body(
    body: Sequence[tuple[ast.stmt, SourceFile]],
    prefix: str,
    around: _Surroundings,
    function_set_up: Sequence[tuple[Function, SourceFile]] = (),
) -> Iterator[ProjectTest]:
    """Yield the tests in a file or class.

    Each statement is paired with its file, because a base class may come from another file.
    """
    for statement, file in body:
        if isinstance(statement, ast.ClassDef) and _is_collected(statement, file, around):
            yield from _tests_in_class(statement, file, prefix, around)
        elif isinstance(statement, Function) and around.has_function(statement.name):
            if "::" not in prefix and _is_fixture(statement):
                continue
            test_around = replace(
                around,
                marks=[*around.marks, *((mark, file) for mark in statement.decorator_list)],
                set_up=[*around.set_up, *function_set_up],
            )
            marks = [mark for mark, _ in test_around.marks]
            decorators = _all_fixtures([*parameters(statement), *test_around.implicit_fixtures], around.scope.fixtures)
            fixture_marks = [mark for decorator_list in decorators for mark in decorator_list]
            with_parameters = any(map(_has_parameters, (*marks, *fixture_marks)))
            yield ProjectTest(
                f"{prefix}::{statement.name}",
                runs_model=test_around.runs_model(statement, file),
                is_measured=not {FIXTURE, CONFIG_FIXTURE}.isdisjoint(parameters(statement))
                or any(map(_is_marker, marks)),
                has_parameters=True if with_parameters else None if around.may_get_parameters else False,
            )


def _tests_in_class(
    definition: ast.ClassDef, file: SourceFile, prefix: str, around: _Surroundings
) -> Iterator[ProjectTest]:
    lineage = around.sources.lineage(definition, file)
    members: dict[str, tuple[ast.stmt, SourceFile]] = {}
    for owner, owner_file in lineage:
        for member in owner.body:
            if isinstance(member, Function | ast.ClassDef):
                members.setdefault(member.name, (member, owner_file))
    methods = {
        name: (method, method_file) for name, (method, method_file) in members.items() if isinstance(method, Function)
    }
    fixtures = {
        name: (fixture, method_file)
        for method, method_file in methods.values()
        for name, fixture in _fixtures([method])
    }
    marks = [
        (mark, base_file) for base, base_file in lineage for mark in (*base.decorator_list, *_pytestmarks(base.body))
    ]
    inside = replace(
        around,
        marks=[*around.marks, *marks],
        scope=replace(
            around.scope,
            fixtures={**around.scope.fixtures, **fixtures},
            methods=methods,
            modules=frozenset[str]().union(*(around.runs.attributes(base, base_file) for base, base_file in lineage)),
        ),
        set_up=[*around.set_up, *(method for name, method in methods.items() if name in _CLASS_SET_UP)],
        is_test_case=_is_test_case(definition, file, around.sources),
    )
    yield from _tests_in_body(list(members.values()), f"{prefix}::{definition.name}", inside)


_MODULE_SET_UP = ("setup_module", "setUpModule")
_FUNCTION_SET_UP = ("setup_function",)
_CLASS_SET_UP = ("setUp", "asyncSetUp", "setUpClass", "setup_method", "setup_class")


def _is_collected(definition: ast.ClassDef, file: SourceFile, around: _Surroundings) -> bool:
    has_constructor = any(
        isinstance(statement, Function) and statement.name == "__init__" for statement in definition.body
    )
    has_name = around.names.matches(definition.name, around.names.classes) and not has_constructor
    return has_name or _is_test_case(definition, file, around.sources)


def _is_test_case(definition: ast.ClassDef, file: SourceFile, sources: Sources) -> bool:
    """Return whether a class inherits from ``*TestCase``, directly or through base classes in the project."""
    return any(
        (base_file.dotted(base) or "").endswith("TestCase")
        for base_class, base_file in sources.lineage(definition, file)
        for base in base_class.bases
    )


def _fixtures_in_use(marks: Iterable[ast.expr]) -> Iterator[str]:
    """Yield the fixture names in ``usefixtures`` markers."""
    for mark in marks:
        if isinstance(mark, ast.List | ast.Tuple):
            yield from _fixtures_in_use(mark.elts)
        elif isinstance(mark, ast.Call) and _last_name(mark) == "usefixtures":
            yield from (str(argument.value) for argument in mark.args if isinstance(argument, ast.Constant))


def _fixtures(body: Sequence[ast.stmt]) -> Iterator[tuple[str, Function]]:
    """Yield the fixtures among statements, each with the parameter name by which tests request the fixture."""
    for statement in body:
        decorators = statement.decorator_list if isinstance(statement, Function) else []
        for decorator in decorators:
            if isinstance(statement, Function) and _last_name(decorator) == "fixture":
                yield _explicit_name(decorator) or statement.name, statement


def _explicit_name(decorator: ast.expr) -> str | None:
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
    return any(_last_name(decorator) == "fixture" for decorator in function.decorator_list)


def _all_fixtures(
    fixture_names: Sequence[str], fixtures: Mapping[str, tuple[Function, SourceFile]]
) -> Iterator[list[ast.expr]]:
    """Yield the decorators of each named fixture, and of all fixtures requested by these fixtures."""
    seen: set[str] = set()
    waiting = list(fixture_names)
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
    for statement in body:
        if isinstance(statement, ast.Assign) and any(
            ast.unparse(target) == "pytestmark" for target in statement.targets
        ):
            yield statement.value


def _last_name(node: ast.expr) -> str:
    target = node.func if isinstance(node, ast.Call) else node
    return ast.unparse(target).rpartition(".")[2]
