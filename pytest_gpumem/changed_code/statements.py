"""A file in two versions, and its changed statements. Pure."""

from __future__ import annotations

import ast
from dataclasses import dataclass
from difflib import SequenceMatcher
from functools import cached_property
from typing import TYPE_CHECKING, NamedTuple

from pytest_gpumem.changed_code.lifetimes import Values, bound

if TYPE_CHECKING:
    from collections.abc import Iterator, Sequence

_Function = ast.FunctionDef | ast.AsyncFunctionDef
_With = (ast.With, ast.AsyncWith)
_Blocks = (*_With, ast.If, ast.For, ast.AsyncFor, ast.While, ast.Try)
"""Statements that can take the place of a ``with`` while the lines in it stay as they are."""
_TESTS_OWN = "pytest."
"""Beginning of a decorator that selects tests, and does not change the code in them."""


class _Statement(NamedTuple):
    """First and last line of a statement, and what it binds: ``outputs``, ``self.cache``."""

    first: int
    last: int
    bound: tuple[str, ...] = ()


class _Block(NamedTuple):
    """Lines that run under a changed ``with`` or changed decorators: the line to name, and the first and last line inside."""

    changed: ChangedLine
    begin: int
    end: int


class ChangedLine(NamedTuple):
    """A line of the new file, and the statement or decorator of the old one that it lacks: ``del hidden``."""

    number: int
    removed: str = ""


@dataclass(frozen=True)
class TwoVersions:
    """A file in both versions, as lines."""

    old: Sequence[str]
    new: Sequence[str]

    @cached_property
    def kept(self) -> dict[int, int]:
        """Numbers of the new file's lines, from 1, that the old file has too, with their numbers there."""
        old, new = self.old, self.new
        # Most files differ in a few lines. Matching only these is quick, also in a file with 10,000 lines.
        shortest = min(len(old), len(new))
        begin = next((at for at in range(shortest) if old[at] != new[at]), shortest)
        rest = shortest - begin
        end = next((at for at in range(rest) if old[-1 - at] != new[-1 - at]), rest)
        matcher = SequenceMatcher(None, old[begin : len(old) - end], new[begin : len(new) - end], autojunk=False)
        between = (
            (begin + b + at, begin + a + at) for a, b, size in matcher.get_matching_blocks() for at in range(size)
        )
        after = ((len(new) - at, len(old) - at) for at in range(end, 0, -1))
        return {here + 1: there + 1 for here, there in (*((at, at) for at in range(begin)), *between, *after)}

    def changed_at(self, number: int) -> ChangedLine | None:
        """Return the changed line that decides what a line of the new file does; ``None`` if nothing has changed.

        A changed statement is the line itself, and so is a statement whose result lives longer: the old function deleted the
        result before it did other work, and the new one does not. Otherwise a changed ``with`` around the line counts, another
        block in its place, or a changed decorator on its function. Example: ``@torch.no_grad()`` decides which tensors the
        function keeps.
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
        removed = next((ends[name] for name in innermost.bound if name in ends), "")
        if removed:
            return ChangedLine(number, removed)
        within = _first(self._functions[function]) if function else 0
        blocks = (block for block in self._blocks if block.begin <= number <= block.end)
        named = max((block for block in blocks if block.changed.number >= within), default=None)
        return None if named is None else named.changed

    def _differs(self, first: int, last: int) -> bool:
        return any(line not in self.kept for line in range(first, last + 1))

    @cached_property
    def _nodes(self) -> list[ast.stmt]:
        return [node for node in ast.walk(_parsed(self.new)) if isinstance(node, ast.stmt)]

    @cached_property
    def _statements(self) -> list[_Statement]:
        """All statements. A compound statement ends before its body."""
        statements = []
        for node in self._nodes:
            body: list[ast.stmt] = getattr(node, "body", [])
            last = _first(body[0]) - 1 if body else node.end_lineno or node.lineno
            statements.append(_Statement(node.lineno, last, tuple(bound(node))))
        return statements

    @cached_property
    def _longer_lived(self) -> dict[str, dict[str, str]]:
        """Names whose first value now lives longer, by the function's qualified name.

        Each has the statement of the old version that ended the value: ``{"Net.forward": {"hidden": "del hidden"}}``.
        """
        old = {name: Values(node) for name, node in _functions(_parsed(self.old)) if name in self._functions}
        return {
            name: values.longer_lived_than(
                old[name], lambda node: self._differs(node.lineno, node.end_lineno or node.lineno)
            )
            for name, values in ((name, Values(node)) for name, node in self._functions.items() if name in old)
        }

    @cached_property
    def _functions(self) -> dict[str, _Function]:
        return dict(_functions(_parsed(self.new)))

    @cached_property
    def _blocks(self) -> list[_Block]:
        """Blocks with a changed head."""
        blocks = [
            _Block(ChangedLine(node.lineno), node.lineno, node.end_lineno or node.lineno)
            for node in self._nodes
            if isinstance(node, _Blocks)
            and (isinstance(node, _With) or self._was_in_with(node.body))
            and self._differs(node.lineno, _first(node.body[0]) - 1)
        ]
        before = {name: _decorators(node) for name, node in _functions(_parsed(self.old))}
        # A removed decorator leaves no line, so the function's first line stands for it.
        for name, node in self._functions.items():
            decorators = _decorators(node)
            earlier = before.get(name, decorators)
            if earlier != decorators:
                removed = next((f"@{text}" for text in earlier if text not in decorators), "")
                blocks.append(_Block(ChangedLine(_first(node), removed), node.lineno, node.end_lineno or node.lineno))
        return blocks

    def _was_in_with(self, body: Sequence[ast.stmt]) -> bool:
        """Return whether a statement of a block is one that stood in a ``with`` of the old file."""
        return not self._old_in_with.isdisjoint(self.kept.get(_first(one)) for one in body)

    @cached_property
    def _old_in_with(self) -> frozenset[int]:
        """First lines of the statements that are the old file's bodies of ``with``."""
        nodes = ast.walk(_parsed(self.old))
        return frozenset(_first(one) for node in nodes if isinstance(node, _With) for one in node.body)


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
