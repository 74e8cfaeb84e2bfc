"""Find the lines whose results belong to an autograd graph now, because a later ``detach()`` is gone. All functions are pure.

For example, a function loses the second of these statements::

    hidden = self.up(x)
    hidden = hidden.detach()
    return self.down(hidden)

Then ``self.up`` keeps its activations for backward, although the line with its call is the same in both versions.

A wrong line costs a reader more than a missing line. So a line is left out if the new version may detach the tensor in another
way, or if the old version may keep the activations as well.
"""

from __future__ import annotations

import ast
import re
from typing import TYPE_CHECKING, NamedTuple

from pytest_gpumem.judging.changed_code.lifetimes import children_of, parts_of, statements_in

if TYPE_CHECKING:
    from collections.abc import Iterable, Iterator

    from pytest_gpumem.judging.changed_code.lifetimes import Function, StatementInBlocks

GRAD_MODE = re.compile(r"no_grad|inference_mode|grad_enabled")
"""Matches a decorator or a ``with`` that can turn grad mode off."""
_DETACHING = frozenset({"detach", "item", "tolist"})
_WITHOUT_GRAPH = _DETACHING | {
    *("detach_", "data", "numpy", "backward", "argmax", "argmin"),
    *("shape", "dtype", "device", "ndim", "size", "dim", "numel", "stride", "requires_grad"),
    *("float", "int", "bool", "len", "str", "repr", "print", "isinstance", "type", "info", "debug", "warning"),
}
"""Attributes and functions whose results belong to no graph. ``backward`` frees its tensor's graph."""
_Assignment = (ast.Assign, ast.AnnAssign)
_Keeping = (*_Assignment, ast.AugAssign, ast.Expr, ast.Return)
"""Statements that can keep a tensor. For example, an ``if`` condition keeps none."""
_OwnNames = (
    ast.Lambda,
    ast.ListComp,
    ast.SetComp,
    ast.DictComp,
    ast.GeneratorExp,
    ast.FunctionDef,
    ast.AsyncFunctionDef,
    ast.ClassDef,
)


class _Detached(NamedTuple):
    """An expression for a tensor outside its graph. Example: ``text="hidden[0].detach()"`` and ``tensor=hidden[0]``."""

    text: str
    tensor: ast.expr


class _Version:
    """The statements in a function's version, and their texts: ``with autocast(): hidden = self.up(x)``."""

    def __init__(self, function: Function) -> None:
        self.statements = statements_in(function)
        self.texts = [_text(statement) for statement in self.statements]

    def sets_grad_mode(self) -> bool:
        """Return whether a statement sets grad mode for all later ones, such as ``torch.set_grad_enabled(False)``."""
        nodes = (each.node for each in self.statements)
        return any(isinstance(node, ast.Expr) and GRAD_MODE.search(ast.unparse(node)) for node in nodes)

    def binding(self, names: Iterable[str], before: int) -> list[str]:
        """Return the texts of the statements that bind one of the names, before the statement with the index ``before``."""
        wanted = set(names)
        return [self.texts[index] for index in range(before) if not wanted.isdisjoint(self.statements[index].bound)]

    def uses(self, name: str, index: int) -> Iterator[int]:
        """Yield the indexes of the statements that use the value bound by a statement, and use it as a part of a graph.

        The function's caller may use the value of an attribute. Its index is -1.
        """
        binding = self.statements[index]
        again = (each for each in range(index + 1) if self.statements[each].loops() & binding.loops())
        for position in (*range(index + 1, len(self.statements)), *again):
            statement = self.statements[position]
            if position > index and not binding.can_reach(statement):
                continue
            if name in _read(statement.node):
                yield position
            ends = name in statement.bound or ast.unparse(statement.node) == f"{name}.detach_()"
            if ends and statement.steps == binding.steps[: len(statement.steps)]:
                return
        if "." in name or "[" in name:
            yield -1


def lines_before_lost_detach(old: Function, new: Function) -> dict[int, str]:
    """Return old lines whose results are detached in the old version, and used without detaching them in the new version.

    A line counts if the detached tensor depends on a name bound by the line. The methods ``item`` and ``tolist`` count like
    ``detach``. A removed ``print(loss.item())`` is no lost detach, because nothing uses ``loss`` in its place.

    Returns:
        For each line number in the old version, the expression that is gone: ``{2: "hidden.detach()"}``.
    """
    old_decorators, new_decorators = ({ast.unparse(each) for each in node.decorator_list} for node in (old, new))
    if new_decorators - old_decorators or any(map(GRAD_MODE.search, old_decorators)):
        return {}
    before, after = _Version(old), _Version(new)
    if before.sets_grad_mode() or after.sets_grad_mode():
        return {}
    lines: dict[int, str] = {}
    for index, statement in enumerate(before.statements):
        if before.texts[index] not in after.texts and isinstance(statement.node, _Keeping):
            for gone, uses in _lost(before, index, after):
                names = {name for name in _read(gone.tensor) if before.binding([name], index)}
                if _is_same_tensor(names, before, index, after, uses):
                    lines |= dict.fromkeys(_lines_of(names, before, index, after), gone.text)
    return lines


def count_detached(function: Function) -> int:
    """Return the number of places in a function that detach a tensor or turn grad mode off."""
    return len(
        re.findall(rf"\.({'|'.join(_DETACHING)})\b|\.detach_\(|\.data\b|{GRAD_MODE.pattern}", ast.unparse(function))
    )


def _lost(before: _Version, index: int, after: _Version) -> Iterator[tuple[_Detached, list[int]]]:
    """Yield the detached tensors in an old statement, each with the new statements that use the tensor in its place."""
    node, text = before.statements[index].node, before.texts[index]
    bare, inside = _without_detach(text, node), list(_detached(node))
    for position, (new, new_text) in enumerate(zip(after.statements, after.texts, strict=True)):
        if new_text not in before.texts and _without_detach(new_text, new.node) == bare:
            still = {ast.unparse(each.tensor) for each in _detached(new.node)}
            yield from ((each, [position]) for each in inside if ast.unparse(each.tensor) not in still)
    bound = re.fullmatch(r"([\w.]+) = (([\w.]+)\.(?:detach\(\)|data))|(([\w.]+)\.detach_\(\))", ast.unparse(node))
    if bound is None:
        return
    tensor = bound[3] or bound[5]
    name = bound[1] or tensor
    if name == tensor or not bound[2].endswith(".data"):
        name_in_text = re.compile(rf"(?<![\w.]){re.escape(name)}(?!\w)")
        uses = {name_in_text.sub(tensor, before.texts[use]) for use in before.uses(name, index) if use > index}
        positions = [position for position, new_text in enumerate(after.texts) if new_text in uses]
        yield _Detached(bound[2] or bound[4], ast.parse(tensor, mode="eval").body), positions


def _is_same_tensor(names: set[str], before: _Version, index: int, after: _Version, uses: list[int]) -> bool:
    """Return whether the new uses are the only change to the tensor with these names, and grad mode can be on in a use."""
    binding = before.binding(names, index)
    added = [
        each.node
        for position, each in enumerate(after.statements)
        if position not in uses and after.texts[position] not in before.texts
    ]
    return any(
        after.binding(names, use) == binding and not GRAD_MODE.search(after.texts[use]) for use in uses
    ) and not any(
        ast.unparse(part) in names
        for node in added
        for part in parts_of(node)
        if isinstance(part, ast.Name | ast.Attribute)
    )


def _lines_of(names: set[str], before: _Version, index: int, after: _Version) -> Iterator[int]:
    """Yield the numbers of the lines with the computation of ``names``, as used in the statement with an index.

    If another statement uses a result as a part of a graph, then the old version keeps the activations as well. This does not
    matter if the detached tensor outlives the call: ``self.cache = hidden.detach()``.
    """
    statement = before.statements[index]
    outlives = _outlives_call(statement.node)
    lines: set[int] = set()
    for position in reversed(range(index)):
        candidate = before.statements[position]
        if names.isdisjoint(candidate.bound) or not candidate.can_reach(statement):
            continue
        used = {use for name in candidate.bound for use in before.uses(name, position)}
        if candidate.steps == statement.steps[: len(candidate.steps)]:
            names = names - set(candidate.bound)
        text, node = before.texts[position], candidate.node
        is_recorded = isinstance(node, _Assignment) and not _has_no_graph(node.value) and not GRAD_MODE.search(text)
        if is_recorded and text in after.texts and (outlives or used <= lines):
            lines.add(position)
            names = names | _read(node)
            yield node.lineno


def _text(statement: StatementInBlocks) -> str:
    """Return a statement's text without the statements in its blocks, after the ``with`` statements around it."""
    around = [step.parent for step in statement.steps if isinstance(step.parent, ast.With | ast.AsyncWith)]
    return ": ".join(map(_own_text, (*around, statement.node)))


def _own_text(node: ast.stmt) -> str:
    if not hasattr(node, "body"):
        return ast.unparse(node)
    return " ".join([type(node).__name__, *map(ast.unparse, children_of(node))])


def _detached(node: ast.AST) -> Iterator[_Detached]:
    """Yield the tensors detached in a node. Indexes and parts without a graph are left out, such as ``h.detach().shape``."""
    if (
        isinstance(node, ast.Call)
        and isinstance(node.func, ast.Attribute)
        and node.func.attr in _DETACHING
        and not node.args
    ):
        yield _Detached(ast.unparse(node), node.func.value)
        yield from _detached(node.func.value)
    elif not isinstance(node, _OwnNames):
        for child in _with_graph(node):
            yield from _detached(child)


def _without_detach(text: str, node: ast.AST) -> str:
    for each in _detached(node):
        text = text.replace(each.text, ast.unparse(each.tensor))
    return text


def _read(node: ast.AST) -> set[str]:
    """Return the names and attributes that a node reads as a part of a graph, for example ``x`` and ``self.cache``."""
    names = {name for child in _with_graph(node) for name in _read(child)}
    if isinstance(node, _OwnNames):
        names -= {part.arg for part in ast.walk(node) if isinstance(part, ast.arg)}
        names -= {part.id for part in ast.walk(node) if isinstance(part, ast.Name) and isinstance(part.ctx, ast.Store)}
    if isinstance(node, ast.Name | ast.Attribute) and isinstance(node.ctx, ast.Load) and not _ends_graph(node):
        names.add(ast.unparse(node))
    return names


def _with_graph(node: ast.AST) -> Iterator[ast.AST]:
    """Yield the parts of a node that may belong to a graph: ``h`` and ``x`` in ``h[i].add(x)``, none in ``h.shape``."""
    if isinstance(node, ast.Compare | ast.JoinedStr) or _ends_graph(node):
        return
    if isinstance(node, ast.Subscript):
        yield node.value
    elif isinstance(node, ast.Call):
        yield from [node.func.value] if isinstance(node.func, ast.Attribute) else []
        yield from (*node.args, *node.keywords)
    else:
        yield from children_of(node)


def _ends_graph(node: ast.AST) -> bool:
    function = node.func if isinstance(node, ast.Call) else node
    if isinstance(function, ast.Attribute):
        return function.attr in _WITHOUT_GRAPH
    return function is not node and isinstance(function, ast.Name) and function.id in _WITHOUT_GRAPH


def _has_no_graph(node: ast.AST | None) -> bool:
    """Return whether an expression's value is detached: ``self.up(x).detach().view(-1)``."""
    while node is not None and not _ends_graph(node):
        if not isinstance(node, ast.Call | ast.Attribute | ast.Subscript):
            return isinstance(node, ast.Compare)
        node = node.func if isinstance(node, ast.Call) else node.value
    return True


def _outlives_call(node: ast.stmt) -> bool:
    """Return whether a statement stores a value in an attribute: ``self.cache = x`` or ``self.losses.append(x)``."""
    if isinstance(node, ast.Expr):
        function = node.value.func if isinstance(node.value, ast.Call) else None
        return isinstance(function, ast.Attribute) and function.attr == "append" and "." in ast.unparse(function.value)
    targets = node.targets if isinstance(node, ast.Assign) else [getattr(node, "target", ast.Constant(""))]
    return any("." in ast.unparse(target) for target in targets)
