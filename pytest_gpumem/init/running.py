"""Finding out by its source whether a test runs a model: itself, its fixtures and helpers of the project."""

from __future__ import annotations

import ast
from typing import TYPE_CHECKING

from pytest_gpumem.init.sources import Function, nodes_in

if TYPE_CHECKING:
    from collections.abc import Iterable, Iterator, Mapping

    from pytest_gpumem.init.sources import SourceFile, Sources

_STEPS = {"backward", "generate", "forward"}
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
_NO_MODELS = ("Tokenizer", "TokenizerFast", "Config", "Processor", "FeatureExtractor", "logging", "set_seed")
_BASES = {"LightningModule", "PreTrainedModel", "ModelMixin"}
_ZOOS = ("transformers.", "diffusers.", "timm.", "torchvision.models.")
_AUTOGRAD_SETTINGS = {"detect_anomaly", "set_detect_anomaly", "set_grad_enabled", "set_multithreading_enabled"}
_Assignment = ast.Assign | ast.AnnAssign
_OWN = ("self.", "cls.", "request.cls.")
"""Objects on which an attribute of a test's class is set."""


class Models:
    """The names by which a project makes models: classes that are modules, and functions that return one.

    By their names alone, wherever they are defined: a project that calls two things alike has both.
    """

    def __init__(self, sources: Sources) -> None:
        self._makers: set[str] = set()
        files = list(sources.files.values())
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
            if not name.startswith("test") and returns_module(function, file, self, frozenset()):
                self._makers.add(name)

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


def returns_module(function: Function, file: SourceFile, models: Models, given: frozenset[str]) -> bool:
    """Return whether a function returns or yields a module, alone or in a tuple; ``given`` are names of modules in it."""
    values = [
        node.value for node in nodes_in(function) if isinstance(node, ast.Return | ast.Yield) and node.value is not None
    ]
    if not values:
        return False
    modules = modules_in(function, file, models, given)
    parts = [part for value in values for part in (value.elts if isinstance(value, ast.Tuple) else [value])]
    return any(is_module(part, file, models, modules) for part in parts)


def modules_in(within: ast.AST, file: SourceFile, models: Models, given: frozenset[str]) -> frozenset[str]:
    """Return the variables that are modules, ``self.x`` included: of a function, a class or a statement."""
    pairs = [pair for node in nodes_in(within) if isinstance(node, _Assignment) for pair in _assigned(node)]
    found = given
    while more := {name for names, value in pairs if is_module(value, file, models, found) for name in names} - found:
        found |= more
    return found


def _assigned(node: ast.Assign | ast.AnnAssign) -> Iterator[tuple[list[str], ast.expr]]:
    """Yield the names that an assignment gives a value, with the value: ``a, b = f(), 3`` has two, ``a, b = f()`` has one."""
    if node.value is None:
        return
    for target in node.targets if isinstance(node, ast.Assign) else [node.target]:
        if isinstance(target, ast.Tuple) and isinstance(node.value, ast.Tuple):
            yield from ((list(_names(one)), value) for one, value in zip(target.elts, node.value.elts, strict=False))
        else:
            yield list(_names(target)), node.value


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
    if isinstance(node.func, ast.Attribute) and node.func.attr in _KEEPS_A_MODULE:
        if is_module(node.func.value, file, models, modules):
            return True
        # torch.compile(model)
        return node.func.attr == "compile" and bool(node.args) and is_module(node.args[0], file, models, modules)
    dotted = file.dotted(node.func)
    return dotted is not None and models.makes(dotted)


class Runs:
    """Answers whether functions of a project run a model, each looked at once."""

    def __init__(self, sources: Sources, models: Models) -> None:
        self._sources = sources
        self._models = models
        self._known: dict[tuple[str, int], bool] = {}
        self._globals: dict[str, frozenset[str]] = {}
        self._attributes: dict[ast.ClassDef, frozenset[str]] = {}

    def does(self, function: Function, file: SourceFile, fixtures: Mapping[str, tuple[Function, SourceFile]]) -> bool:
        """Return whether a function, a fixture that it takes or a helper that it calls runs a model.

        Args:
            function: A test, a fixture or a helper.
            file: The file that it is in.
            fixtures: Those that its parameters may name, by name.
        """
        key = file.path, function.lineno
        if key not in self._known:
            self._known[key] = False  # of functions that call each other
            self._known[key] = self._does(function, file, fixtures)
        return self._known[key]

    def _does(self, function: Function, file: SourceFile, fixtures: Mapping[str, tuple[Function, SourceFile]]) -> bool:
        taken = [fixtures[name] for name in parameters(function) if name in fixtures]
        given = frozenset(
            name
            for name in parameters(function)
            if name in fixtures and self._is_module_fixture(fixtures[name], fixtures)
        )
        modules = modules_in(function, file, self._models, given | self._modules_around(function, file))
        if any(_runs_itself(node, file, self._models, modules) for node in nodes_in(function)):
            return True
        if any(self.does(one, where, fixtures) for one, where in taken if one is not function):
            return True
        return any(
            self.does(one, where, fixtures) for one, where in self._helpers(function, file) if one is not function
        )

    def _is_module_fixture(
        self, fixture: tuple[Function, SourceFile], fixtures: Mapping[str, tuple[Function, SourceFile]], depth: int = 5
    ) -> bool:
        function, file = fixture
        given = frozenset(
            name
            for name in parameters(function)
            if depth and name in fixtures and self._is_module_fixture(fixtures[name], fixtures, depth - 1)
        )
        return returns_module(function, file, self._models, given)

    def _modules_around(self, function: Function, file: SourceFile) -> frozenset[str]:
        """Return the modules that a function sees beside its own: globals, and attributes that its class or a method sets."""
        if file.path not in self._globals:
            self._globals[file.path] = self._global_modules(file)
        owner = file.owners.get(function)
        if owner is None:
            return self._globals[file.path]
        if owner not in self._attributes:
            within = modules_in(owner, file, self._models, frozenset())
            names = {one.removeprefix(own) for one in within for own in _OWN if one.startswith(own)}
            names |= modules_in(_assignments(owner.body), file, self._models, frozenset())
            self._attributes[owner] = frozenset(f"{own}{name}" for name in names for own in _OWN)
        return self._globals[file.path] | self._attributes[owner]

    def _global_modules(self, file: SourceFile) -> frozenset[str]:
        """Return the globals of a file that are modules, those that a function declares and sets included."""
        found = modules_in(_assignments(file.tree.body), file, self._models, frozenset())
        for function in file.functions.values():
            declared = {name for node in nodes_in(function) if isinstance(node, ast.Global) for name in node.names}
            if declared:
                found |= declared & modules_in(function, file, self._models, frozenset())
        return found

    def _helpers(self, function: Function, file: SourceFile) -> Iterator[tuple[Function, SourceFile]]:
        """Yield the functions of the project that a function calls: of its file, its class, or imported ones."""
        for node in nodes_in(function):
            if not isinstance(node, ast.Call):
                continue
            if isinstance(node.func, ast.Attribute) and ast.unparse(node.func.value) == "self":
                yield from ((method, file) for method in _methods_called(node.func.attr, function, file))
                continue
            dotted = file.dotted(node.func)
            if dotted is None:
                continue
            if dotted in file.functions:
                yield file.functions[dotted], file
                continue
            module, _, name = dotted.rpartition(".")
            where = self._sources.module(module, file.path) if module else None
            if where is not None and name in where.functions:
                yield where.functions[name], where


def _assignments(body: Iterable[ast.stmt]) -> ast.Module:
    return ast.Module([one for one in body if isinstance(one, _Assignment)], [])


def _methods_called(name: str, function: Function, file: SourceFile) -> Iterator[Function]:
    """Yield the methods called ``name`` of the class that ``function`` is in."""
    owner = file.owners.get(function)
    yield from (one for one in (owner.body if owner else ()) if isinstance(one, Function) and one.name == name)


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
    return _is_step(node.func) or is_autograd


def _is_step(called: ast.expr) -> bool:
    """Return whether what is called is a method that runs a model by its name: ``loss.backward``, ``optimizer.step``."""
    if not isinstance(called, ast.Attribute):
        return False
    return called.attr in _STEPS or (called.attr == "step" and "opt" in ast.unparse(called.value).lower())


def mentions_gpu(trees: Iterable[ast.AST]) -> bool:
    """Return whether any of these sources puts something on a GPU: ``"cuda"`` as a text, or ``.cuda()``."""
    return any(
        (isinstance(node, ast.Constant) and isinstance(node.value, str) and node.value.startswith("cuda"))
        or (isinstance(node, ast.Call) and isinstance(node.func, ast.Attribute) and node.func.attr == "cuda")
        for tree in trees
        for node in ast.walk(tree)
    )
