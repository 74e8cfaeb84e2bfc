"""Find the names and expressions in a project's source whose values are modules (`torch.nn.Module`). No code is run.

For example, in a file with ``from torch import nn``::

    net = nn.Sequential(nn.Linear(4, 4))    # `net` is a module
    for Net in (Small, Large):              # `Net` makes modules if `Small` and `Large` are classes of modules
        model = Net().eval()                # so `model` is a module
    weight = nn.Parameter(torch.ones(4))    # `weight` is not a module
"""

from __future__ import annotations

import ast
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING

from pytest_gpumem.tools.init.sources import Function, nodes_in

if TYPE_CHECKING:
    from collections.abc import Iterable, Iterator, Sequence

    from pytest_gpumem.tools.init.sources import SourceFile, Sources

_STEPS = {"backward", "generate", "forward"}
_TRAINER_METHODS = {"fit", "train", "validate", "test", "predict", "evaluate"}
"""Methods of ``Trainer`` in Lightning and transformers. They run a model."""
_METHODS_THAT_RETURN_SELF = {
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
"""Methods of a module. Their result is a module, as in ``net.eval()``."""
_NO_MODULES = {"Parameter", "Buffer", "UninitializedParameter", "UninitializedBuffer", "ParameterList", "ParameterDict"}
"""Classes in `torch.nn` without a forward computation."""
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
"""Name endings in model libraries, such as transformers, for objects other than models."""
_BASES = {"LightningModule", "PreTrainedModel", "ModelMixin"}
_ZOOS = ("transformers.", "diffusers.", "timm.", "torchvision.models.")
_AUTOGRAD_SETTINGS = {"detect_anomaly", "set_detect_anomaly", "set_grad_enabled", "set_multithreading_enabled"}
_YIELDING = {"Iterator", "Generator"}
"""Types in return annotations of generator functions: ``Iterator[Net]`` yields a ``Net``."""
Assignment = ast.Assign | ast.AnnAssign
MAKES = "()"
"""Suffix for the name of a callable that returns a module. Example: after ``for Net in (Small, Large)``, the variable is called
``Net()``."""


class Models:
    """The names in a project that make modules when called: module classes, and functions that return a module.

    Names are collected without their file. If a project has a module class and another class with the same name, both count as
    module classes.
    """

    def __init__(self, sources: Sources) -> None:
        self._makers: set[str] = set()
        files = list(sources.files.values())
        self._methods: dict[str, list[tuple[Function, SourceFile]]] = {}
        for file in files:
            for method in file.owners:
                self._methods.setdefault(method.name, []).append((method, file))
        previous_count = -1
        while previous_count != len(self._makers):
            previous_count = len(self._makers)
            for file in files:
                self._add(file)

    def _add(self, file: SourceFile) -> None:
        for name, definition in file.classes.items():
            bases = [file.dotted(base) or "" for base in definition.bases]
            if any(self.makes(base) or base.rpartition(".")[2] in _BASES for base in bases):
                self._makers.add(name)
        view = View(file, self)
        for name, function in file.functions.items():
            if not name.startswith("test") and name in view.returned(name, function):
                self._makers.add(name)
        global_names = view.inside(assignments(file.tree.body)).modules
        self._makers.update(name.removesuffix(MAKES) for name in global_names if name.endswith(MAKES))

    def methods(self, name: str) -> Sequence[tuple[Function, SourceFile]]:
        """Return all methods with this name in the project's classes, each with its file."""
        return self._methods.get(name, ())

    def makes(self, dotted: str) -> bool:
        """Return whether calling the object with this full name makes a module: True for ``torch.nn.Linear``."""
        name = dotted.rpartition(".")[2]
        if dotted.startswith("torch.nn."):
            return name[:1].isupper() and name not in _NO_MODULES
        if is_from_a_zoo(dotted):
            return True
        return name in self._makers and not dotted.startswith("torch.")


def is_from_a_zoo(dotted: str) -> bool:
    """Return whether a full name is from a model library, such as timm, and not a tokenizer, a config or the like."""
    return dotted.startswith(_ZOOS) and not any(part.endswith(_NO_MODELS) for part in dotted.split("."))


@dataclass(frozen=True)
class View:
    """A file, together with the names of its variables known to be modules.

    Example: with ``modules = {"net"}``, the expression ``net.eval()`` is a module.
    """

    file: SourceFile
    models: Models
    modules: frozenset[str] = frozenset()
    """Names of modules, such as ``self.net``, and names with the suffix `MAKES`, which make modules when called."""

    def inside(self, tree: ast.AST) -> View:
        """Return a view with further modules: the variables and parameters in a function, a class or a statement."""
        assigned = [pair for node in nodes_in(tree) for pair in _assigned(node)]
        view = self.with_modules(
            parameter for node in nodes_in(tree) if isinstance(node, Function) for parameter in self._annotated(node)
        )
        while more := {name for targets, value in assigned for name in view.names(targets, value)} - view.modules:
            view = view.with_modules(more)
        return view

    def with_modules(self, names: Iterable[str]) -> View:
        """Return a view with further names of modules."""
        return replace(self, modules=self.modules.union(names))

    def names(self, targets: Iterable[str], value: ast.expr) -> Iterator[str]:
        """Yield the targets if the value is a module, or the targets with the suffix `MAKES` if the value makes modules when
        called.
        """
        if self.is_module(value):
            yield from targets
        elif self._makes_modules(value):
            yield from (f"{target}{MAKES}" for target in targets)

    def returned(self, name: str, function: Function) -> frozenset[str]:
        """Return a set with ``name`` if a function returns or yields a module, or a tuple with a module.

        If the function's result makes modules when called, the name gets the suffix `MAKES`. In any other case the set is
        empty.
        """
        if self._is_annotation(function.returns):
            return frozenset([name])
        values = [
            node.value
            for node in nodes_in(function)
            if isinstance(node, ast.Return | ast.Yield) and node.value is not None
        ]
        if not values:
            return frozenset()
        inside = self.inside(function)
        parts = [part for value in values for part in (value.elts if isinstance(value, ast.Tuple) else [value])]
        return frozenset(found_name for part in parts for found_name in inside.names([name], part))

    def passed(self, call: ast.Call, function: Function) -> frozenset[str]:
        """Return the function's parameters to which a call passes modules or module classes."""
        parameters = [*function.args.posonlyargs, *function.args.args]
        names = [parameter.arg for parameter in parameters if parameter.arg not in ("self", "cls")]
        arguments = [*zip(names, call.args, strict=False), *((keyword.arg, keyword.value) for keyword in call.keywords)]
        return frozenset(
            module for name, value in arguments if name is not None for module in self.names([name], value)
        )

    def is_module(self, node: ast.expr) -> bool:
        """Return whether an expression is a module: ``net``, ``Net(3)``, ``net.eval()``, ``await net``."""
        if isinstance(node, ast.Name | ast.Attribute):
            return ast.unparse(node) in self.modules
        if isinstance(node, ast.Await):
            return self.is_module(node.value)
        if not isinstance(node, ast.Call):
            return False
        by_method = isinstance(node.func, ast.Attribute) and self._method_returns_module(node, node.func)
        return by_method or self._makes_modules(node.func)

    def runs_model(self, node: ast.AST) -> bool:
        """Return whether a syntax node suggests that a model runs: ``net(x)``, ``loss.backward()``, ``trainer.fit(net)``,
        ``import timm``.
        """
        if isinstance(node, ast.Name | ast.Attribute) and is_from_a_zoo(self.file.dotted(node) or ""):
            return True
        if isinstance(node, ast.Import | ast.ImportFrom):
            module = getattr(node, "module", None)
            names = [f"{module}.{alias.name}" if module else f"{alias.name}." for alias in node.names]
            return any(map(is_from_a_zoo, names))
        if not isinstance(node, ast.Call):
            return False
        if self.is_module(node.func):
            return True
        dotted = self.file.dotted(node.func) or ""
        is_autograd = dotted.startswith("torch.autograd.") and dotted.rpartition(".")[2] not in _AUTOGRAD_SETTINGS
        return _is_step(node.func) or is_autograd or self._is_fit(node.func)

    def _is_fit(self, callee: ast.expr) -> bool:
        """Return whether ``callee`` is a trainer's method, such as ``fit``, on an object made with a module class:
        ``Classifier(Net).fit``.
        """
        return (
            isinstance(callee, ast.Attribute) and callee.attr in _TRAINER_METHODS and self._makes_modules(callee.value)
        )

    def _annotated(self, function: Function) -> Iterator[str]:
        """Yield the parameters of a function whose annotation is a module class."""
        arguments = function.args
        for parameter in (*arguments.posonlyargs, *arguments.args, *arguments.kwonlyargs):
            if self._is_annotation(parameter.annotation):
                yield parameter.arg

    def _is_annotation(self, annotation: ast.expr | None) -> bool:
        """Return whether an annotation contains a module class: ``Net``, ``"Net"``, ``Net | None``, ``Iterator[Net]``."""
        if isinstance(annotation, ast.Constant) and isinstance(annotation.value, str):
            try:
                annotation = ast.parse(annotation.value, mode="eval").body
            except (SyntaxError, ValueError):
                return False
        if isinstance(annotation, ast.BinOp):
            return self._is_annotation(annotation.left) or self._is_annotation(annotation.right)
        if isinstance(annotation, ast.Subscript) and ast.unparse(annotation.value).rpartition(".")[2] in _YIELDING:
            yielded = annotation.slice
            return self._is_annotation(yielded.elts[0] if isinstance(yielded, ast.Tuple) else yielded)
        if not isinstance(annotation, ast.Name | ast.Attribute):
            return False
        return self.models.makes(self.file.dotted(annotation) or "")

    def _method_returns_module(self, call: ast.Call, method: ast.Attribute) -> bool:
        """Return whether a method call returns a module: ``net.eval()``, ``torch.compile(net)``, ``Net.from_pretrained(x)``."""
        if method.attr == "from_pretrained":
            return self._is_pretrained(method.value)
        if method.attr == "compile" and call.args and self.is_module(call.args[0]):
            return True
        is_annotated = any(
            View(file, self.models)._is_annotation(definition.returns)  # noqa: SLF001 - of this class
            for definition, file in self.models.methods(method.attr)
        )
        return (is_annotated or method.attr in _METHODS_THAT_RETURN_SELF) and self.is_module(method.value)

    def _is_pretrained(self, owner: ast.expr) -> bool:
        """Return whether ``from_pretrained`` is called on a model class. It may also be called on, for example, a tokenizer
        class.
        """
        name = (self.file.dotted(owner) or "").rpartition(".")[2]
        return name[:1].isupper() and not name.endswith(_NO_MODELS)

    def _makes_modules(self, node: ast.expr) -> bool:
        """Return whether calling an expression makes a module: ``Net``, ``partial(Net, 3)``, ``scaled(Net)``."""
        if isinstance(node, ast.Call):
            arguments = [*node.args, *(keyword.value for keyword in node.keywords)]
            return any(self._makes_modules(value) for value in arguments if not isinstance(value, ast.Call))
        if not isinstance(node, ast.Name | ast.Attribute):
            return False
        dotted = self.file.dotted(node)
        return f"{ast.unparse(node)}{MAKES}" in self.modules or (dotted is not None and self.models.makes(dotted))


def _is_step(callee: ast.expr) -> bool:
    """Return whether a called method runs a model, judging by its name.

    Examples: ``loss.backward``, ``optimizer.step``, ``trainer.fit`` and ``Trainer(max_steps=4).train``.
    """
    if not isinstance(callee, ast.Attribute):
        return False
    if callee.attr in _STEPS:
        return True
    owner = ast.unparse(callee.value).lower()
    return (callee.attr == "step" and "opt" in owner) or (callee.attr in _TRAINER_METHODS and "trainer" in owner)


def assignments(body: Iterable[ast.stmt]) -> ast.Module:
    """Return a syntax tree with only the assignments among some statements."""
    return ast.Module([statement for statement in body if isinstance(statement, Assignment)], [])


def _assigned(node: ast.AST) -> Iterator[tuple[list[str], ast.expr]]:
    """Yield pairs of assigned names and their value: two pairs for ``a, b = f(), 3``, and a single pair for ``a, b = f()``."""
    if isinstance(node, ast.For | ast.comprehension) and isinstance(node.iter, ast.Tuple | ast.List):
        for value in node.iter.elts:
            yield from _pairs(node.target, value)
    elif isinstance(node, ast.withitem) and node.optional_vars is not None:
        yield list(_target_names(node.optional_vars)), node.context_expr
    elif isinstance(node, Assignment) and node.value is not None:
        for target in node.targets if isinstance(node, ast.Assign) else [node.target]:
            yield from _pairs(target, node.value)


def _pairs(target: ast.expr, value: ast.expr) -> Iterator[tuple[list[str], ast.expr]]:
    if isinstance(target, ast.Tuple) and isinstance(value, ast.Tuple):
        for part, part_value in zip(target.elts, value.elts, strict=False):
            yield list(_target_names(part)), part_value
    else:
        yield list(_target_names(target)), value


def _target_names(target: ast.expr) -> Iterator[str]:
    if isinstance(target, ast.Tuple | ast.List):
        for part in target.elts:
            yield from _target_names(part)
    elif isinstance(target, ast.Name | ast.Attribute):
        yield ast.unparse(target)


def mentions_gpu(trees: Iterable[ast.AST]) -> bool:
    """Return whether any syntax tree contains a string with the prefix ``cuda``, or a call of ``.cuda()``."""
    return any(
        (isinstance(node, ast.Constant) and isinstance(node.value, str) and node.value.startswith("cuda"))
        or (isinstance(node, ast.Call) and isinstance(node.func, ast.Attribute) and node.func.attr == "cuda")
        for tree in trees
        for node in ast.walk(tree)
    )
