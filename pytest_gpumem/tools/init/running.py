"""Find out from source whether a test runs a model: in its body, in its fixtures, or in called functions."""

from __future__ import annotations

import ast
from dataclasses import dataclass, field, replace
from typing import TYPE_CHECKING

from pytest_gpumem.tools.init.module_names import View, assignments
from pytest_gpumem.tools.init.sources import Function, nodes_in

if TYPE_CHECKING:
    from collections.abc import Iterable, Iterator, Mapping, Sequence
    from typing import TypeGuard

    from pytest_gpumem.tools.init.module_names import Models
    from pytest_gpumem.tools.init.sources import SourceFile, Sources

_RECEIVERS = ("self.", "cls.", "request.cls.")
"""Prefixes with which methods and fixtures access an attribute of a test's class."""
_DEEPEST_FIXTURE = 5
"""If fixtures request other fixtures, such a chain is followed through at most this many fixtures."""


@dataclass(frozen=True)
class Scope:
    """The fixtures, methods and models available to a test from its file and its class."""

    fixtures: Mapping[str, tuple[Function, SourceFile]]
    """Fixtures by the parameter name with which a test requests the fixture."""
    methods: Mapping[str, tuple[Function, SourceFile]] = field(default_factory=dict)
    """Methods of the test's class, including inherited methods."""
    modules: frozenset[str] = frozenset()
    """Names of modules. Names of callables that return a module have the suffix `module_names.MAKES`."""
    functions: Mapping[str, Sequence[tuple[Function, SourceFile]]] = field(default_factory=dict)
    """Functions passed to an argument by ``parametrize``, by the argument's name."""


class Runs:
    """Decides whether a project's functions run a model. Each function is examined only once."""

    def __init__(self, sources: Sources, models: Models) -> None:
        self._sources = sources
        self._models = models
        self._decided: dict[tuple[object, ...], bool] = {}
        self._globals: dict[str, frozenset[str]] = {}
        self._attributes: dict[ast.ClassDef, frozenset[str]] = {}

    def does(self, function: Function, file: SourceFile, scope: Scope) -> bool:
        """Return whether a function runs a model: in its own body, in a requested fixture or in a called function.

        Args:
            function: A test, a fixture or another function of the project.
            file: The file that defines the function.
            scope: The fixtures, methods and models available to the function.
        """
        methods = tuple(sorted((name, origin.path, method.lineno) for name, (method, origin) in scope.methods.items()))
        key = file.path, function.lineno, methods, scope.modules, tuple(sorted(scope.functions))
        if key not in self._decided:
            self._decided[key] = False  # with this entry, the search ends if functions call each other
            self._decided[key] = self._does(function, file, scope)
        return self._decided[key]

    def parametrized(self, decorators: Iterable[ast.expr], file: SourceFile, scope: Scope) -> Scope:
        """Return a scope with the models and functions that ``parametrize`` or a fixture's ``params`` pass to arguments."""
        view = View(file, self._models, scope.modules)
        modules, functions = set(scope.modules), dict(scope.functions)
        for names, value in (pair for decorator in decorators for pair in _parameter_values(decorator)):
            modules.update(view.names(names, value))
            definition = self._sources.definition(file.dotted(value) or "", file)
            if definition is not None and isinstance(definition[0], Function):
                for name in names:
                    functions[name] = [*functions.get(name, ()), (definition[0], definition[1])]
        return replace(scope, modules=frozenset(modules), functions=functions)

    def attributes(self, owner: ast.ClassDef, file: SourceFile) -> frozenset[str]:
        """Return the names of modules among a class's attributes, written as in the class's methods: ``self.net``,
        ``cls.net``.
        """
        if owner not in self._attributes:
            view = View(file, self._models)
            set_in_methods = view.inside(owner).modules
            names = {
                name.removeprefix(receiver)
                for name in set_in_methods
                for receiver in _RECEIVERS
                if name.startswith(receiver)
            }
            names |= view.inside(assignments(owner.body)).modules
            self._attributes[owner] = frozenset(f"{receiver}{name}" for name in names for receiver in _RECEIVERS)
        return self._attributes[owner]

    def _does(self, function: Function, file: SourceFile, scope: Scope) -> bool:
        known_modules = self._modules_of_fixtures(function, scope) | scope.modules | self._outer_modules(function, file)
        view = View(file, self._models, known_modules).inside(function)
        if any(view.runs_model(node) for node in nodes_in(function)):
            return True
        for name in parameters(function):
            if name not in scope.fixtures or scope.fixtures[name][0] is function:
                continue
            fixture, origin = scope.fixtures[name]
            if self.does(fixture, origin, self.parametrized(fixture.decorator_list, origin, scope)):
                return True
        return any(
            self.does(callee, origin, inner_scope)
            for callee, origin, inner_scope in self._callees(function, view, scope)
            if callee is not function
        )

    def _modules_of_fixtures(self, function: Function, scope: Scope, depth: int = _DEEPEST_FIXTURE) -> frozenset[str]:
        """Return the parameters of a function whose fixtures return modules or module classes."""
        modules: frozenset[str] = frozenset()
        for name in parameters(function):
            if depth and name in scope.fixtures:
                fixture, file = scope.fixtures[name]
                parameters_of_fixture = self.parametrized(fixture.decorator_list, file, Scope({})).modules
                inner_modules = parameters_of_fixture | self._modules_of_fixtures(fixture, scope, depth - 1)
                modules |= View(file, self._models, inner_modules).returned(name, fixture)
        return modules

    def _outer_modules(self, function: Function, file: SourceFile) -> frozenset[str]:
        """Return the names of modules available to a function from outside its body: globals, and attributes of its class."""
        if file.path not in self._globals:
            self._globals[file.path] = self._global_modules(file)
        owner = file.owners.get(function)
        return self._globals[file.path] | (frozenset() if owner is None else self.attributes(owner, file))

    def _global_modules(self, file: SourceFile) -> frozenset[str]:
        """Return the names of modules among a file's global variables, including variables set in a function after
        ``global net``.
        """
        view = View(file, self._models)
        modules = view.inside(assignments(file.tree.body)).modules
        for function in file.functions.values():
            declared = {name for node in nodes_in(function) if isinstance(node, ast.Global) for name in node.names}
            if declared:
                modules |= declared & view.inside(function).modules
        return modules

    def _callees(self, function: Function, view: View, scope: Scope) -> Iterator[tuple[Function, SourceFile, Scope]]:
        """Yield the project's functions called by a function, each with its file and with the modules passed in the call.

        A called function may be defined in the same file or class, imported, passed by ``parametrize``, or be a method of a
        model.
        """
        for node in nodes_in(function):
            if not isinstance(node, ast.Call):
                continue
            for callee, origin in self._definitions(node.func, function, view, scope):
                passed = view.passed(node, callee)
                if origin.owners.get(callee) is None:
                    yield callee, origin, Scope({}, modules=passed)
                elif isinstance(node.func, ast.Attribute) and view.is_module(node.func.value):
                    yield callee, origin, Scope({}, modules=passed | {"self"})
                else:
                    attributes = frozenset(name for name in scope.modules if name.startswith(_RECEIVERS))
                    yield callee, origin, replace(scope, modules=attributes | passed)

    def _definitions(
        self, callee: ast.expr, function: Function, view: View, scope: Scope
    ) -> Iterator[tuple[Function, SourceFile]]:
        """Yield the function definitions to which a call's ``callee`` may refer."""
        if isinstance(callee, ast.Attribute) and ast.unparse(callee.value) in ("self", "cls"):
            owner = view.file.owners.get(function)
            if callee.attr in scope.methods:
                yield scope.methods[callee.attr]
            elif owner is not None:
                for definition, origin in self._sources.lineage(owner, view.file):
                    for statement in definition.body:
                        if is_function(statement, callee.attr):
                            yield statement, origin
        elif isinstance(callee, ast.Attribute) and view.is_module(callee.value):
            yield from self._models.methods(callee.attr)
        else:
            yield from scope.functions.get(ast.unparse(callee), ())
            imported = self._sources.definition(view.file.dotted(callee) or "", view.file)
            if imported is not None and isinstance(imported[0], Function):
                yield imported[0], imported[1]


def is_function(statement: ast.stmt, name: str) -> TypeGuard[Function]:
    """Return whether a statement defines a function with this name."""
    return isinstance(statement, Function) and statement.name == name


def parameters(function: Function) -> list[str]:
    """Return the parameters that pytest may fill with fixtures: all but ``self``."""
    arguments = function.args
    every = (*arguments.posonlyargs, *arguments.args, *arguments.kwonlyargs)
    return [parameter.arg for parameter in every if parameter.arg != "self"]


def _parameter_values(decorator: ast.expr) -> Iterator[tuple[list[str], ast.expr]]:
    """Yield each value in a ``parametrize`` decorator, after a list with the name of its argument.

    For a fixture with ``params``, the argument is ``request.param``.
    """
    if isinstance(decorator, ast.List | ast.Tuple):
        for inner in decorator.elts:
            yield from _parameter_values(inner)
    if not isinstance(decorator, ast.Call):
        return
    keywords = {keyword.arg: keyword.value for keyword in decorator.keywords}
    kind = ast.unparse(decorator.func).rpartition(".")[2]
    if kind == "parametrize":
        argnames = decorator.args[0] if decorator.args else keywords.get("argnames")
        values = decorator.args[1] if len(decorator.args) > 1 else keywords.get("argvalues")
        if isinstance(argnames, ast.Constant) and isinstance(argnames.value, str):
            names = [name.strip() for name in argnames.value.split(",") if name.strip()]
        else:
            parts = argnames.elts if isinstance(argnames, ast.List | ast.Tuple) else []
            names = [str(part.value) for part in parts if isinstance(part, ast.Constant)]
    else:
        names, values = ["request.param"], keywords.get("params") if kind == "fixture" else None
    for value in values.elts if isinstance(values, ast.List | ast.Tuple) else []:
        if isinstance(value, ast.Call) and ast.unparse(value.func).rpartition(".")[2] == "param":
            row = value.args
        elif len(names) > 1:
            row = value.elts if isinstance(value, ast.List | ast.Tuple) else []
        else:
            row = [value]
        for name, cell in zip(names, row, strict=False):
            yield [name], cell
