"""Finding out by its source whether a test runs a model: itself, its fixtures and helpers of the project."""

from __future__ import annotations

import ast
from dataclasses import dataclass, field, replace
from typing import TYPE_CHECKING

from pytest_gpumem.init.sources import Function, nodes_in

if TYPE_CHECKING:
    from collections.abc import Iterable, Iterator, Mapping, Sequence
    from typing import TypeGuard

    from pytest_gpumem.init.sources import SourceFile, Sources

_STEPS = {"backward", "generate", "forward"}
_OF_TRAINERS = {"fit", "train", "validate", "test", "predict", "evaluate"}
"""Methods that run a model, of Lightning's ``Trainer`` and that of transformers."""
_KEEPS_A_MODULE = {
    "to",
    "cuda",
    "cpu",
    "eval",
    "train",
    "half",
    "float",
    "double",
    "bfloat16",
    "requires_grad_",
    "compile",
}
_NO_MODULES = {"Parameter", "Buffer", "UninitializedParameter", "UninitializedBuffer", "ParameterList", "ParameterDict"}
_NO_MODELS = (
    "Tokenizer",
    "TokenizerFast",
    "Config",
    "Processor",
    "FeatureExtractor",
    "Scheduler",
    "logging",
    "set_seed",
)
_BASES = {"LightningModule", "PreTrainedModel", "ModelMixin"}
_ZOOS = ("transformers.", "diffusers.", "timm.", "torchvision.models.")
_AUTOGRAD_SETTINGS = {"detect_anomaly", "set_detect_anomaly", "set_grad_enabled", "set_multithreading_enabled"}
_YIELDING = {"Iterator", "Generator"}
"""Annotations of functions that yield what their brackets say: fixtures, and context managers."""
_Assignment = ast.Assign | ast.AnnAssign
_OWN = ("self.", "cls.", "request.cls.")
"""Objects on which an attribute of a test's class is set."""
_MAKES = "()"
"""Suffix of a name of which a call is a module, among names of modules: ``Net()`` of ``for Net in (Small, Large)``."""


class Models:
    """The names by which a project makes models: classes that are modules, and functions that return one.

    By their names alone, wherever they are defined: a project that calls two things alike has both.
    """

    def __init__(self, sources: Sources) -> None:
        self._makers: set[str] = set()
        files = list(sources.files.values())
        self._methods: dict[str, list[tuple[Function, SourceFile]]] = {}
        for file in files:
            for method in file.owners:
                self._methods.setdefault(method.name, []).append((method, file))
        before = -1
        while before != len(self._makers):
            before = len(self._makers)
            for file in files:
                self._add(file)

    def _add(self, file: SourceFile) -> None:
        for name, definition in file.classes.items():
            bases = [file.dotted(base) or "" for base in definition.bases]
            if any(self.makes(base) or base.rpartition(".")[2] in _BASES for base in bases):
                self._makers.add(name)
        for name, function in file.functions.items():
            if not name.startswith("test") and name in returned(name, function, file, self, frozenset()):
                self._makers.add(name)
        other_names = modules_in(assignments(file.tree.body), file, self, frozenset())
        self._makers.update(name.removesuffix(_MAKES) for name in other_names if name.endswith(_MAKES))

    def methods(self, name: str) -> Sequence[tuple[Function, SourceFile]]:
        """Return the methods of the project's classes that are called so."""
        return self._methods.get(name, ())

    def makes(self, dotted: str) -> bool:
        """Return whether a call of this name makes a module."""
        last = dotted.rpartition(".")[2]
        if dotted.startswith("torch.nn."):
            return last[:1].isupper() and last not in _NO_MODULES
        if is_of_a_zoo(dotted):
            return True
        return last in self._makers and not dotted.startswith("torch.")


def is_of_a_zoo(dotted: str) -> bool:
    """Return whether a name is of a library of models, and not a tokenizer or the like."""
    return dotted.startswith(_ZOOS) and not any(part.endswith(_NO_MODELS) for part in dotted.split("."))


def returned(name: str, function: Function, file: SourceFile, models: Models, given: frozenset[str]) -> frozenset[str]:
    """Return what a name is of which a function returns or yields the value, alone or in a tuple.

    The name itself for a module, with `_MAKES` for a class of modules; ``given`` are such names in the function.
    """
    if _is_of_models(function.returns, file, models):
        return frozenset([name])
    values = [
        node.value for node in nodes_in(function) if isinstance(node, ast.Return | ast.Yield) and node.value is not None
    ]
    if not values:
        return frozenset()
    modules = modules_in(function, file, models, given)
    parts = [part for value in values for part in (value.elts if isinstance(value, ast.Tuple) else [value])]
    return frozenset(one for part in parts for one in _named([name], part, file, models, modules))


def modules_in(within: ast.AST, file: SourceFile, models: Models, given: frozenset[str]) -> frozenset[str]:
    """Return the variables that are modules, ``self.x`` included: of a function, a class or a statement."""
    pairs = [pair for node in nodes_in(within) for pair in _assigned(node)]
    found = given.union(*(_annotated(node, file, models) for node in nodes_in(within) if isinstance(node, Function)))
    while more := {one for names, value in pairs for one in _named(names, value, file, models, found)} - found:
        found |= more
    return found


def _annotated(function: Function, file: SourceFile, models: Models) -> Iterator[str]:
    """Yield the parameters of a function that are modules by their annotations."""
    arguments = function.args
    for one in (*arguments.posonlyargs, *arguments.args, *arguments.kwonlyargs):
        if _is_of_models(one.annotation, file, models):
            yield one.arg


def _is_of_models(annotation: ast.expr | None, file: SourceFile, models: Models) -> bool:
    """Return whether an annotation is a class of modules: ``Net``, ``"Net"``, ``Net | None``, ``Iterator[Net]``."""
    if isinstance(annotation, ast.Constant) and isinstance(annotation.value, str):
        try:
            annotation = ast.parse(annotation.value, mode="eval").body
        except (SyntaxError, ValueError):
            return False
    if isinstance(annotation, ast.BinOp):
        return any(_is_of_models(one, file, models) for one in (annotation.left, annotation.right))
    if isinstance(annotation, ast.Subscript) and ast.unparse(annotation.value).rpartition(".")[2] in _YIELDING:
        yielded = annotation.slice
        return _is_of_models(yielded.elts[0] if isinstance(yielded, ast.Tuple) else yielded, file, models)
    return isinstance(annotation, ast.Name | ast.Attribute) and models.makes(file.dotted(annotation) or "")


def _named(
    names: Iterable[str], value: ast.expr, file: SourceFile, models: Models, modules: frozenset[str]
) -> Iterator[str]:
    """Yield these names of a value where it is a module, or where a call of it makes one."""
    if is_module(value, file, models, modules):
        yield from names
    elif _makes_modules(value, file, models, modules):
        yield from (f"{name}{_MAKES}" for name in names)


def _assigned(node: ast.AST) -> Iterator[tuple[list[str], ast.expr]]:
    """Yield the names that a statement gives a value, with the value: ``a, b = f(), 3`` has two, ``a, b = f()`` has one."""
    if isinstance(node, ast.For | ast.comprehension) and isinstance(node.iter, ast.Tuple | ast.List):
        for value in node.iter.elts:
            yield from _pairs(node.target, value)
    elif isinstance(node, ast.withitem) and node.optional_vars is not None:
        yield list(_names(node.optional_vars)), node.context_expr
    elif isinstance(node, _Assignment) and node.value is not None:
        for target in node.targets if isinstance(node, ast.Assign) else [node.target]:
            yield from _pairs(target, node.value)


def _pairs(target: ast.expr, value: ast.expr) -> Iterator[tuple[list[str], ast.expr]]:
    if isinstance(target, ast.Tuple) and isinstance(value, ast.Tuple):
        yield from ((list(_names(one)), part) for one, part in zip(target.elts, value.elts, strict=False))
    else:
        yield list(_names(target)), value


def _names(target: ast.expr) -> Iterator[str]:
    if isinstance(target, ast.Tuple | ast.List):
        for one in target.elts:
            yield from _names(one)
    elif isinstance(target, ast.Name | ast.Attribute):
        yield ast.unparse(target)


def is_module(node: ast.expr, file: SourceFile, models: Models, modules: frozenset[str]) -> bool:
    """Return whether an expression is a module."""
    if isinstance(node, ast.Name | ast.Attribute):
        return ast.unparse(node) in modules
    if isinstance(node, ast.Await):
        return is_module(node.value, file, models, modules)
    if not isinstance(node, ast.Call):
        return False
    by_method = isinstance(node.func, ast.Attribute) and _gives_module(node, node.func, file, models, modules)
    return by_method or _makes_modules(node.func, file, models, modules)


def _gives_module(
    call: ast.Call, method: ast.Attribute, file: SourceFile, models: Models, modules: frozenset[str]
) -> bool:
    """Return whether a call of a method gives a module: ``net.eval()``, ``torch.compile(net)``, ``Net.from_pretrained(x)``."""
    if method.attr == "from_pretrained":
        return _is_pretrained(method.value, file)
    if method.attr == "compile" and call.args and is_module(call.args[0], file, models, modules):
        return True
    annotated = any(_is_of_models(one.returns, where, models) for one, where in models.methods(method.attr))
    return (annotated or method.attr in _KEEPS_A_MODULE) and is_module(method.value, file, models, modules)


def _is_pretrained(owner: ast.expr, file: SourceFile) -> bool:
    """Return whether a class with ``from_pretrained`` has weights: not a tokenizer or the like."""
    name = (file.dotted(owner) or "").rpartition(".")[2]
    return name[:1].isupper() and not name.endswith(_NO_MODELS)


def _makes_modules(node: ast.expr, file: SourceFile, models: Models, modules: frozenset[str]) -> bool:
    """Return whether a call of an expression makes a module: ``Net``, ``partial(Net, 3)``, ``scaled(Net)``."""
    if isinstance(node, ast.Call):
        values = [*node.args, *(word.value for word in node.keywords)]
        return any(_makes_modules(one, file, models, modules) for one in values if not isinstance(one, ast.Call))
    if not isinstance(node, ast.Name | ast.Attribute):
        return False
    dotted = file.dotted(node)
    return f"{ast.unparse(node)}{_MAKES}" in modules or (dotted is not None and models.makes(dotted))


@dataclass(frozen=True)
class Scope:
    """The surroundings of a test, beside its file: fixtures, methods, models."""

    fixtures: Mapping[str, tuple[Function, SourceFile]]
    """Those that its parameters may name, by name."""
    methods: Mapping[str, tuple[Function, SourceFile]] = field(default_factory=dict)
    """Those of its class, inherited ones included."""
    modules: frozenset[str] = frozenset()
    """Names that are modules, or make them (`_MAKES`)."""
    functions: Mapping[str, Sequence[tuple[Function, SourceFile]]] = field(default_factory=dict)
    """Functions that an argument may be, by name."""


class Runs:
    """Answers whether functions of a project run a model, each looked at once."""

    def __init__(self, sources: Sources, models: Models) -> None:
        self._sources = sources
        self._models = models
        self._known: dict[tuple[object, ...], bool] = {}
        self._globals: dict[str, frozenset[str]] = {}
        self._attributes: dict[ast.ClassDef, frozenset[str]] = {}

    def does(self, function: Function, file: SourceFile, scope: Scope) -> bool:
        """Return whether a function, a fixture that it takes or a helper that it calls runs a model.

        Args:
            function: A test, a fixture or a helper.
            file: The file that it is in.
            scope: What it has around it.
        """
        methods = tuple(sorted((name, where.path, one.lineno) for name, (one, where) in scope.methods.items()))
        key = file.path, function.lineno, methods, scope.modules, tuple(sorted(scope.functions))
        if key not in self._known:
            self._known[key] = False  # of functions that call each other
            self._known[key] = self._does(function, file, scope)
        return self._known[key]

    def parametrized(self, decorators: Iterable[ast.expr], file: SourceFile, scope: Scope) -> Scope:
        """Return a scope with the models, and the functions, that ``parametrize`` and parameters of fixtures give names to."""
        modules, functions = set(scope.modules), dict(scope.functions)
        for names, value in (pair for one in decorators for pair in _given_values(one)):
            modules.update(_named(names, value, file, self._models, scope.modules))
            found = self._sources.definition(file.dotted(value) or "", file)
            if found is not None and isinstance(found[0], Function):
                for name in names:
                    functions[name] = [*functions.get(name, ()), (found[0], found[1])]
        return replace(scope, modules=frozenset(modules), functions=functions)

    def _does(self, function: Function, file: SourceFile, scope: Scope) -> bool:
        fixtures = scope.fixtures
        taken = [fixtures[name] for name in parameters(function) if name in fixtures]
        around = self._given(function, scope) | scope.modules | self._modules_around(function, file)
        modules = modules_in(function, file, self._models, around)
        if any(_runs_itself(node, file, self._models, modules) for node in nodes_in(function)):
            return True
        for one, where in taken:
            if one is not function and self.does(one, where, self.parametrized(one.decorator_list, where, scope)):
                return True
        return any(
            self.does(one, where, inside)
            for one, where, inside in self._helpers(function, file, modules, scope)
            if one is not function
        )

    def _given(self, function: Function, scope: Scope, depth: int = 5) -> frozenset[str]:
        """Return the names of modules, and of what makes them, that a function's fixtures are."""
        found: frozenset[str] = frozenset()
        for name in parameters(function):
            if depth and name in scope.fixtures:
                fixture, file = scope.fixtures[name]
                given = self.parametrized(fixture.decorator_list, file, Scope({})).modules
                given |= self._given(fixture, scope, depth - 1)
                found |= returned(name, fixture, file, self._models, given)
        return found

    def _modules_around(self, function: Function, file: SourceFile) -> frozenset[str]:
        """Return the modules that a function sees beside its own: globals, and attributes that its class or a method sets."""
        if file.path not in self._globals:
            self._globals[file.path] = self._global_modules(file)
        owner = file.owners.get(function)
        return self._globals[file.path] | (frozenset() if owner is None else self.attributes(owner, file))

    def attributes(self, owner: ast.ClassDef, file: SourceFile) -> frozenset[str]:
        """Return the names of modules that a class has as attributes, as its methods have them: ``self.net``."""
        if owner not in self._attributes:
            within = modules_in(owner, file, self._models, frozenset())
            names = {one.removeprefix(own) for one in within for own in _OWN if one.startswith(own)}
            names |= modules_in(assignments(owner.body), file, self._models, frozenset())
            self._attributes[owner] = frozenset(f"{own}{name}" for name in names for own in _OWN)
        return self._attributes[owner]

    def _global_modules(self, file: SourceFile) -> frozenset[str]:
        """Return the globals of a file that are modules, those that a function declares and sets included."""
        found = modules_in(assignments(file.tree.body), file, self._models, frozenset())
        for function in file.functions.values():
            declared = {name for node in nodes_in(function) if isinstance(node, ast.Global) for name in node.names}
            if declared:
                found |= declared & modules_in(function, file, self._models, frozenset())
        return found

    def _helpers(
        self, function: Function, file: SourceFile, modules: frozenset[str], scope: Scope
    ) -> Iterator[tuple[Function, SourceFile, Scope]]:
        """Yield the functions of the project that a function calls, each with what it is handed.

        They are of its file, of its class, imported, given by ``parametrize``, or methods of a model.
        """
        for node in nodes_in(function):
            if not isinstance(node, ast.Call):
                continue
            for one, where in self._called(node.func, function, file, modules, scope):
                handed = _handed(node, one, file, self._models, modules)
                if where.owners.get(one) is None:
                    yield one, where, Scope({}, modules=handed)
                elif isinstance(node.func, ast.Attribute) and is_module(node.func.value, file, self._models, modules):
                    yield one, where, Scope({}, modules=handed | {"self"})
                else:
                    yield one, where, replace(scope, modules=self._of_class(scope) | handed)

    @staticmethod
    def _of_class(scope: Scope) -> frozenset[str]:
        return frozenset(one for one in scope.modules if one.startswith(_OWN))

    def _called(
        self, called: ast.expr, function: Function, file: SourceFile, modules: frozenset[str], scope: Scope
    ) -> Iterator[tuple[Function, SourceFile]]:
        if isinstance(called, ast.Attribute) and ast.unparse(called.value) in ("self", "cls"):
            owner = file.owners.get(function)
            if called.attr in scope.methods:
                yield scope.methods[called.attr]
            elif owner is not None:
                for definition, where in self._sources.lineage(owner, file):
                    yield from ((one, where) for one in definition.body if is_function(one, called.attr))
        elif isinstance(called, ast.Attribute) and is_module(called.value, file, self._models, modules):
            yield from self._models.methods(called.attr)
        else:
            yield from scope.functions.get(ast.unparse(called), ())
            found = self._sources.definition(file.dotted(called) or "", file)
            if found is not None and isinstance(found[0], Function):
                yield found[0], found[1]


def is_function(statement: ast.stmt, name: str) -> TypeGuard[Function]:
    """Return whether a statement defines a function of this name."""
    return isinstance(statement, Function) and statement.name == name


def _handed(
    call: ast.Call, function: Function, file: SourceFile, models: Models, modules: frozenset[str]
) -> frozenset[str]:
    """Return the parameters of a function to which a call gives a module, or what makes one (`_MAKES`)."""
    arguments = function.args
    names = [one.arg for one in (*arguments.posonlyargs, *arguments.args) if one.arg not in ("self", "cls")]
    given = [*zip(names, call.args, strict=False), *((word.arg, word.value) for word in call.keywords)]
    return frozenset(
        one for name, value in given if name is not None for one in _named([name], value, file, models, modules)
    )


def _given_values(decorator: ast.expr) -> Iterator[tuple[list[str], ast.expr]]:
    """Yield the names and values of a ``parametrize``, or of the parameters of a fixture, which are ``request.param``."""
    if isinstance(decorator, ast.List | ast.Tuple):
        for one in decorator.elts:
            yield from _given_values(one)
    if not isinstance(decorator, ast.Call):
        return
    words = {word.arg: word.value for word in decorator.keywords}
    kind = ast.unparse(decorator.func).rpartition(".")[2]
    if kind == "parametrize":
        names = decorator.args[0] if decorator.args else words.get("argnames")
        values = decorator.args[1] if len(decorator.args) > 1 else words.get("argvalues")
        if isinstance(names, ast.Constant) and isinstance(names.value, str):
            each = [name.strip() for name in names.value.split(",") if name.strip()]
        else:
            parts = names.elts if isinstance(names, ast.List | ast.Tuple) else []
            each = [str(one.value) for one in parts if isinstance(one, ast.Constant)]
    else:
        each, values = ["request.param"], words.get("params") if kind == "fixture" else None
    for value in values.elts if isinstance(values, ast.List | ast.Tuple) else []:
        if isinstance(value, ast.Call) and ast.unparse(value.func).rpartition(".")[2] == "param":
            row = value.args
        elif len(each) > 1:
            row = value.elts if isinstance(value, ast.List | ast.Tuple) else []
        else:
            row = [value]
        yield from (([name], one) for name, one in zip(each, row, strict=False))


def assignments(body: Iterable[ast.stmt]) -> ast.Module:
    """Return the assignments among statements, as a module of their own."""
    return ast.Module([one for one in body if isinstance(one, _Assignment)], [])


def parameters(function: Function) -> list[str]:
    """Return the names of the arguments that fixtures can be."""
    arguments = function.args
    return [one.arg for one in (*arguments.posonlyargs, *arguments.args, *arguments.kwonlyargs) if one.arg != "self"]


def _runs_itself(node: ast.AST, file: SourceFile, models: Models, modules: frozenset[str]) -> bool:
    if isinstance(node, ast.Name | ast.Attribute) and is_of_a_zoo(file.dotted(node) or ""):
        return True
    if isinstance(node, ast.Import | ast.ImportFrom):
        module = getattr(node, "module", None)
        names = [f"{module}.{alias.name}" if module else f"{alias.name}." for alias in node.names]
        return any(map(is_of_a_zoo, names))
    if not isinstance(node, ast.Call):
        return False
    if is_module(node.func, file, models, modules):
        return True
    dotted = file.dotted(node.func) or ""
    is_autograd = dotted.startswith("torch.autograd.") and dotted.rpartition(".")[2] not in _AUTOGRAD_SETTINGS
    return _is_step(node.func) or is_autograd or _is_fit(node.func, file, models, modules)


def _is_step(called: ast.expr) -> bool:
    """Return whether what is called is a method that runs a model by its name.

    ``loss.backward``, ``optimizer.step``, ``trainer.fit`` or ``Trainer(max_steps=4).train``.
    """
    if not isinstance(called, ast.Attribute):
        return False
    if called.attr in _STEPS:
        return True
    owner = ast.unparse(called.value).lower()
    return (called.attr == "step" and "opt" in owner) or (called.attr in _OF_TRAINERS and "trainer" in owner)


def _is_fit(called: ast.expr, file: SourceFile, models: Models, modules: frozenset[str]) -> bool:
    """Return whether what is called is a trainer's method of what was made from a class of models: ``Classifier(Net).fit``."""
    return (
        isinstance(called, ast.Attribute)
        and called.attr in _OF_TRAINERS
        and _makes_modules(called.value, file, models, modules)
    )


def mentions_gpu(trees: Iterable[ast.AST]) -> bool:
    """Return whether any of these sources puts something on a GPU: ``"cuda"`` as a text, or ``.cuda()``."""
    return any(
        (isinstance(node, ast.Constant) and isinstance(node.value, str) and node.value.startswith("cuda"))
        or (isinstance(node, ast.Call) and isinstance(node.func, ast.Attribute) and node.func.attr == "cuda")
        for tree in trees
        for node in ast.walk(tree)
    )
