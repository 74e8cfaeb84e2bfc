"""Find values that live longer in a function's new version than in the old version. All functions are pure.

The value of a variable ``hidden`` ends at ``del hidden``, at ``hidden = None``, or if ``hidden`` is bound to another value.
``return down(hidden)`` contains none of these statements, but frees ``hidden`` as early as ``hidden = down(hidden)`` does.

For example, the old version of a function is ``hidden = up(x); out = down(hidden); del hidden; return head(out)``. If the new
version lacks ``del hidden``, `Values.longer_lived_than` returns ``{"hidden": "del hidden"}``.
"""

from __future__ import annotations

import ast
from itertools import takewhile
from typing import TYPE_CHECKING, NamedTuple

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator

Function = ast.FunctionDef | ast.AsyncFunctionDef
_Scope = (ast.FunctionDef, ast.AsyncFunctionDef, ast.ClassDef)
_Loop = (ast.For, ast.AsyncFor, ast.While)
_Work = (ast.Call, ast.BinOp, ast.UnaryOp, ast.Compare, ast.Await, ast.Yield, ast.YieldFrom)
"""Expressions that can allocate memory."""
_Leaving = (ast.Return, ast.Raise, ast.Continue, ast.Break)


class _Step(NamedTuple):
    """A block around a statement, for example the ``else`` block of an ``if``.

    ``parent`` is the compound statement, and ``block`` is the block's name in `ast`, for example ``"orelse"``. ``is_left`` is
    True if the block ends with ``return``, ``raise``, ``continue`` or ``break``.
    """

    parent: ast.stmt
    block: str
    is_left: bool


class StatementInBlocks(NamedTuple):
    """A statement in a function, with the blocks around it (the outermost first) and the names bound by it."""

    node: ast.stmt
    steps: tuple[_Step, ...]
    bound: tuple[str, ...]

    def can_reach(self, later: StatementInBlocks) -> bool:
        """Return whether a single call to the function can run this statement first and ``later`` second."""
        shared = len(list(takewhile(lambda pair: pair[0] == pair[1], zip(self.steps, later.steps, strict=False))))
        own, later_steps = self.steps[shared:], later.steps[shared:]
        if own and later_steps and own[0].parent is later_steps[0].parent and _are_alternatives(own[0], later_steps[0]):
            return False
        return not any(step.is_left for step in own)

    def loops(self) -> set[ast.stmt]:
        """Return the loops around this statement."""
        return {step.parent for step in self.steps if isinstance(step.parent, _Loop)}


class Values:
    """The values of names and attributes in a function. Nested functions are ignored."""

    def __init__(self, function: Function) -> None:
        self._statements = statements_in(function)

    def longer_lived_than(self, old: Values, is_changed: Callable[[ast.stmt], bool]) -> dict[str, str]:
        """Return the variables and attributes whose first assigned value lives longer than in the function's old version.

        Args:
            old: The values in the function's old version.
            is_changed: Returns whether a statement in this version has lines that the old version lacks.

        Returns:
            The names, each with the statement that ended the value in the old version: ``{"hidden": "del hidden"}``.
        """
        endings = {}
        for name in {name for statement in self._statements for name in statement.bound}:
            end = old._end(name)
            if end is None or self._end(name) is not None or not old._is_followed(name, end):
                continue
            if "." in name or "[" in name:
                longer = not self._calls(name.partition(".")[0].partition("[")[0], is_changed)
            else:
                used = self._last_use(name, None)
                longer = used is not None and (
                    self._is_followed(name, used) or _depth(used.node, name) > old._depth_until(name, end)
                )
            if longer:
                endings[name] = ast.unparse(end.node).partition("\n")[0] if name in end.bound else f"del {name}"
        return endings

    def _first(self, name: str) -> StatementInBlocks | None:
        """Return the first statement that binds a name to a value other than None."""
        return next(
            (statement for statement in self._statements if name in statement.bound and not _is_none(statement.node)),
            None,
        )

    def _end(self, name: str) -> StatementInBlocks | None:
        """Return the statement that ends the first value of a name, or ``None`` if no statement ends this value."""
        first = self._first(name)
        if first is None:
            return None
        later = self._statements[self._statements.index(first) + 1 :]
        return next(
            (
                statement
                for statement in later
                if name in {*statement.bound, *_deleted(statement.node)} and first.can_reach(statement)
            ),
            None,
        )

    def _last_use(self, name: str, until: StatementInBlocks | None) -> StatementInBlocks | None:
        """Return the last statement that reads or binds a name, up to ``until``. ``None`` means up to the function's end."""
        last = None
        for statement in self._statements:
            if _depth(statement.node, name) >= 0 or name in statement.bound:
                last = statement
            if statement is until:
                break
        return last

    def _depth_until(self, name: str, end: StatementInBlocks) -> int:
        last = self._last_use(name, end)
        return -1 if last is None else _depth(last.node, name)

    def _is_followed(self, name: str, statement: StatementInBlocks) -> bool:
        """Return whether code after a statement can allocate memory, so a value kept until then may raise the peak."""
        if "." in name or "[" in name:
            return True
        first = self._first(name)
        if first is not None and first.loops() & statement.loops():
            return True
        end = statement.node.end_lineno or statement.node.lineno
        return any(
            later.node.lineno > end and statement.can_reach(later) and _works(later.node) for later in self._statements
        )

    def _calls(self, name: str, is_changed: Callable[[ast.stmt], bool]) -> bool:
        """Return whether a changed statement calls a method on the object ``name``, which may replace its attributes."""
        return any(
            is_changed(statement.node)
            and any(isinstance(part, ast.Call) and _root(part.func) == name for part in parts_of(statement.node))
            for statement in self._statements
        )


def statements_in(function: Function) -> list[StatementInBlocks]:
    """Return all statements in a function, ordered by line. Statements in nested functions and classes are left out."""
    return sorted(_placed(function.body, ()), key=lambda statement: statement.node.lineno)


def bound(node: ast.AST) -> list[str]:
    """Return the names and attributes that a statement binds.

    Example: ``self.cache, hidden = ...`` binds ``self.cache`` and ``hidden``. ``hidden += 1`` binds nothing, because it changes
    the tensor in place.
    """
    if isinstance(node, ast.AugAssign):
        return []
    targets: list[ast.AST | None] = (
        list(node.targets) if isinstance(node, ast.Assign) else [getattr(node, "target", None)]
    )
    targets += (
        [part for part in parts_of(node) if isinstance(part, ast.NamedExpr)] if isinstance(node, ast.stmt) else []
    )
    return [
        ast.unparse(part)
        for target in filter(None, targets)
        for part in ast.walk(target.target if isinstance(target, ast.NamedExpr) else target)
        if isinstance(part, ast.Name | ast.Attribute | ast.Subscript) and isinstance(part.ctx, ast.Store)
    ]


def _placed(body: list[ast.stmt], steps: tuple[_Step, ...]) -> Iterator[StatementInBlocks]:
    for node in body:
        yield StatementInBlocks(node, steps, tuple(bound(node)))
        if not isinstance(node, _Scope):
            for block, inner in _blocks(node):
                yield from _placed(inner, (*steps, _Step(node, block, isinstance(inner[-1], _Leaving))))


def _blocks(node: ast.stmt) -> Iterator[tuple[str, list[ast.stmt]]]:
    for field in ("body", "orelse", "finalbody"):
        inner = getattr(node, field, [])
        if inner:
            yield field, inner
    for field in ("handlers", "cases"):
        for number, clause in enumerate(getattr(node, field, [])):
            yield f"{field} {number}", clause.body


def _are_alternatives(step: _Step, other: _Step) -> bool:
    """Return whether at most one of two blocks in a compound statement can run, like the blocks of ``if`` and ``else``."""
    kinds = {step.block.partition(" ")[0], other.block.partition(" ")[0]}
    if isinstance(step.parent, _Loop) or "finalbody" in kinds:
        return False
    return step.block != other.block and not (isinstance(step.parent, ast.Try) and kinds == {"body", "orelse"})


def parts_of(node: ast.stmt) -> Iterator[ast.AST]:
    """Yield a statement's syntax nodes, without the statements in its blocks. For a nested function or class, yield all."""
    for child in children_of(node):
        yield from ast.walk(child)


def children_of(node: ast.AST) -> Iterator[ast.AST]:
    """Yield a node's direct children, without the statements in its blocks. For a nested function or class, yield all."""
    for child in ast.iter_child_nodes(node):
        if isinstance(node, _Scope) or not isinstance(child, ast.stmt | ast.excepthandler | ast.match_case):
            yield child


def _works(node: ast.stmt) -> bool:
    return not isinstance(node, _Scope) and any(isinstance(part, _Work) for part in parts_of(node))


def _depth(node: ast.AST, name: str) -> int:
    """Return the number of calls and operations around a name: 2 in ``f(g(name))``. Return -1 if the name is not read."""
    if isinstance(node, ast.Name) and node.id == name and isinstance(node.ctx, ast.Load):
        return 0
    inner = max((_depth(child, name) for child in children_of(node)), default=-1)
    return inner + 1 if inner >= 0 and isinstance(node, _Work) else inner


def _root(node: ast.AST) -> str:
    while isinstance(node, ast.Attribute | ast.Subscript):
        node = node.value
    return node.id if isinstance(node, ast.Name) else ""


def _deleted(node: ast.stmt) -> list[str]:
    if not isinstance(node, ast.Delete):
        return []
    targets = [part for target in node.targets for part in (target.elts if isinstance(target, ast.Tuple) else [target])]
    return [ast.unparse(target) for target in targets]


def _is_none(node: ast.stmt) -> bool:
    return isinstance(node, ast.Assign) and ast.unparse(node.value) == "None"
