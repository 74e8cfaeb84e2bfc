"""Find the lines that changed between two versions of a file. All functions are pure.

A line can count as changed although its text is the same. For example, the old version of this function had a ``del hidden``
before ``return``, and the new version has none::

    hidden = self.up(x)        # line 2: changed, because ``del hidden`` is gone and the tensor lives longer
    out = self.down(hidden)    # line 3: not changed
    return self.head(out)      # line 4: not changed

``TwoVersions(old, new).changed_at(2)`` is then ``ChangedLine(number=2, removed="del hidden")``.
"""

from __future__ import annotations

import ast
from dataclasses import dataclass
from difflib import SequenceMatcher
from functools import cached_property
from typing import TYPE_CHECKING, NamedTuple

from pytest_gpumem.judging.changed_code.detached import GRAD_MODE, count_detached, lines_before_lost_detach
from pytest_gpumem.judging.changed_code.lifetimes import Values, bound

if TYPE_CHECKING:
    from collections.abc import Iterator, Sequence

    from pytest_gpumem.judging.gate.graph_changes import Kind

_Function = ast.FunctionDef | ast.AsyncFunctionDef
_With = (ast.With, ast.AsyncWith)
_Blocks = (*_With, ast.If, ast.For, ast.AsyncFor, ast.While, ast.Try)
"""Statements that can take the place of a ``with`` around the same body."""
_TESTS_OWN = "pytest."
"""Prefix of pytest's decorators. They select tests or pass parameters, so a change in them does not count."""


class _Statement(NamedTuple):
    """A statement's first line, its last line and the names bound by it, for example ``outputs`` and ``self.cache``."""

    first: int
    last: int
    bound: tuple[str, ...] = ()


class _Block(NamedTuple):
    """Lines inside a changed ``with``, or in a function with changed decorators.

    ``changed`` is the line to report for all these lines. ``begin`` and ``end`` are the first and the last of these lines.
    """

    changed: ChangedLine
    begin: int
    end: int


class ChangedLine(NamedTuple):
    """The number of a changed line in the new file.

    ``removed`` is the statement or decorator whose removal is the change, for example ``del hidden``. It is empty if the line
    itself has changed. ``kind`` is set if the removal brings calls into a graph: ``no_backward`` for a ``hidden.detach()``, and
    ``no_grad`` for a decorator.
    """

    number: int
    removed: str = ""
    kind: Kind | None = None


@dataclass(frozen=True)
class TwoVersions:
    """The lines of a file in the old and the new version."""

    old: Sequence[str]
    new: Sequence[str]

    @cached_property
    def common_lines(self) -> dict[int, int]:
        """For each line that both files contain: its number in the old file, by its number in the new file, from 1.

        Example: an old file has 4 lines, and its line 2 was removed: ``{1: 1, 2: 3, 3: 4}``.
        """
        old, new = self.old, self.new
        # Most files begin and end with many equal lines. Leave these lines out, so matching is fast even with 10,000 lines.
        shortest = min(len(old), len(new))
        begin = next((index for index in range(shortest) if old[index] != new[index]), shortest)
        rest = shortest - begin
        end = next((index for index in range(rest) if old[-1 - index] != new[-1 - index]), rest)
        matcher = SequenceMatcher(None, old[begin : len(old) - end], new[begin : len(new) - end], autojunk=False)
        between = (
            (begin + b + offset, begin + a + offset)
            for a, b, size in matcher.get_matching_blocks()
            for offset in range(size)
        )
        after = ((len(new) - offset, len(old) - offset) for offset in range(end, 0, -1))
        before = ((index, index) for index in range(begin))
        return {new_index + 1: old_index + 1 for new_index, old_index in (*before, *between, *after)}

    def changed_at(self, number: int) -> ChangedLine | None:
        """Return the changed line with an effect on a line in the new file; ``None`` if no changed line affects it.

        The first condition that is true decides:

        1. The statement with the line has changed. The result is the line itself.
        2. A result of the statement is no longer detached, because a later ``hidden.detach()`` was removed. The result is the
           line itself.
        3. The statement binds a value that lives longer now, for example because a ``del`` was removed. The result is the line
           itself.
        4. A ``with`` around the line has changed, or another block has replaced the ``with``. The result is the first line of
           the new block.
        5. A decorator on the function with the line has changed. The result is the function's first line. For example,
           ``@torch.no_grad()`` decides whether the function's calls save tensors.
        """
        statements = [statement for statement in self._statements if statement.first <= number <= statement.last]
        innermost = max(statements, default=_Statement(number, number))
        if self._differs(innermost.first, innermost.last):
            return ChangedLine(number)
        function = max(
            (name for name, node in self._functions.items() if _contains(node, number)),
            key=lambda name: _first(self._functions[name]),
            default="",
        )
        ends = self._longer_lived.get(function, {})
        detached = self._not_detached.get(self.common_lines[innermost.first], "")
        if detached:
            return ChangedLine(number, detached, "no_backward")
        removed = next((ends[name] for name in innermost.bound if name in ends), "")
        if removed:
            return ChangedLine(number, removed)
        within = _first(self._functions[function]) if function else 0
        blocks = (block for block in self._blocks if block.begin <= number <= block.end)
        named = max((block for block in blocks if block.changed.number >= within), default=None)
        return None if named is None else named.changed

    def _differs(self, first: int, last: int) -> bool:
        return any(line not in self.common_lines for line in range(first, last + 1))

    @cached_property
    def _nodes(self) -> list[ast.stmt]:
        return [node for node in ast.walk(_parsed(self.new)) if isinstance(node, ast.stmt)]

    @cached_property
    def _statements(self) -> list[_Statement]:
        """All statements in the new file. A compound statement, such as a ``for``, ends at the line before its body."""
        statements = []
        for node in self._nodes:
            body: list[ast.stmt] = getattr(node, "body", [])
            last = _first(body[0]) - 1 if body else node.end_lineno or node.lineno
            statements.append(_Statement(node.lineno, last, tuple(bound(node))))
        return statements

    @cached_property
    def _longer_lived(self) -> dict[str, dict[str, str]]:
        """The variables whose first value lives longer in the new version, by the function's qualified name.

        Each variable comes with the old statement that ended its value: ``{"Net.forward": {"hidden": "del hidden"}}``.
        """
        old = {name: Values(node) for name, node in _functions(_parsed(self.old)) if name in self._functions}
        return {
            name: values.longer_lived_than(
                old[name], lambda node: self._differs(node.lineno, node.end_lineno or node.lineno)
            )
            for name, values in ((name, Values(node)) for name, node in self._functions.items() if name in old)
        }

    @cached_property
    def _not_detached(self) -> dict[int, str]:
        """The old lines whose results are no longer detached, with the expression that is gone: ``{2: "hidden.detach()"}``.

        If a function of the new file detaches more tensors than before, the ``detach()`` may have moved there.
        """
        old = dict(_functions(_parsed(self.old)))
        counts = {name: count_detached(node) for name, node in old.items()}
        if any(count_detached(node) > counts.get(name, 0) for name, node in self._functions.items()):
            return {}
        lines: dict[int, str] = {}
        for name, node in old.items():
            if name in self._functions:
                lines |= lines_before_lost_detach(node, self._functions[name])
        return lines

    @cached_property
    def _functions(self) -> dict[str, _Function]:
        return dict(_functions(_parsed(self.new)))

    @cached_property
    def _blocks(self) -> list[_Block]:
        """Each changed ``with`` (or its replacement), and each function whose decorators have changed."""
        blocks = [
            _Block(ChangedLine(node.lineno), node.lineno, node.end_lineno or node.lineno)
            for node in self._nodes
            if isinstance(node, _Blocks)
            and (isinstance(node, _With) or self._was_in_with(node.body))
            and self._differs(node.lineno, _first(node.body[0]) - 1)
        ]
        old_decorators = {name: _decorators(node) for name, node in _functions(_parsed(self.old))}
        # A removed decorator has no line in the new file, so the function's first line is reported.
        for name, node in self._functions.items():
            decorators = _decorators(node)
            earlier = old_decorators.get(name, decorators)
            if earlier != decorators:
                removed = next((f"@{text}" for text in earlier if text not in decorators), "")
                changed = ChangedLine(_first(node), removed, "no_grad" if GRAD_MODE.search(removed) else None)
                blocks.append(_Block(changed, node.lineno, node.end_lineno or node.lineno))
        return blocks

    def _was_in_with(self, body: Sequence[ast.stmt]) -> bool:
        """Return whether a statement in this block was inside a ``with`` in the old file."""
        return not self._old_in_with.isdisjoint(self.common_lines.get(_first(statement)) for statement in body)

    @cached_property
    def _old_in_with(self) -> frozenset[int]:
        """The numbers of the lines at which the statements inside a ``with`` begin, in the old file."""
        nodes = ast.walk(_parsed(self.old))
        return frozenset(_first(statement) for node in nodes if isinstance(node, _With) for statement in node.body)


def _parsed(lines: Sequence[str]) -> ast.Module:
    """Return the syntax tree of a file; an empty tree if this Python cannot parse it."""
    try:
        return ast.parse("\n".join(lines))
    except (SyntaxError, ValueError, RecursionError):
        return ast.Module([], [])


def _functions(node: ast.AST, prefix: str = "") -> Iterator[tuple[str, _Function]]:
    """Yield each function in a tree with its qualified name, for example ``Net.forward``."""
    for child in ast.iter_child_nodes(node):
        name = prefix
        if isinstance(child, _Function | ast.ClassDef):
            name = f"{prefix}{child.name}."
            if isinstance(child, _Function):
                yield name, child
        yield from _functions(child, name)


def _decorators(node: _Function) -> list[str]:
    texts = map(ast.unparse, node.decorator_list)
    return [text for text in texts if not text.startswith(_TESTS_OWN)]


def _contains(node: _Function, number: int) -> bool:
    return _first(node) <= number <= (node.end_lineno or node.lineno)


def _first(node: ast.stmt) -> int:
    """Return the first line of a statement, which may be a decorator."""
    decorators: list[ast.expr] = getattr(node, "decorator_list", [])
    return min([node.lineno, *(decorator.lineno for decorator in decorators)])
