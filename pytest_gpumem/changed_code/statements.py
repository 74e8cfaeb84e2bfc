"""A file in two versions, and which of its statements are not the same in both. Pure."""

from __future__ import annotations

import ast
from dataclasses import dataclass
from difflib import SequenceMatcher
from functools import cached_property
from typing import TYPE_CHECKING, NamedTuple

if TYPE_CHECKING:
    from collections.abc import Iterator, Sequence

_FUNCTIONS = (ast.FunctionDef, ast.AsyncFunctionDef)
_TESTS_OWN = "@pytest."
"""Beginning of a decorator that changes which tests there are, and not what the code in them does."""


class _Block(NamedTuple):
    """Lines that run under a ``with`` or a decorator: the first and the last line of its head, and of what is within."""

    first: int
    last: int
    begin: int
    end: int


@dataclass(frozen=True)
class TwoVersions:
    """A file in both versions, as lines."""

    old: Sequence[str]
    new: Sequence[str]

    @cached_property
    def kept(self) -> frozenset[int]:
        """The lines of the new file that are in the old one, from 1."""
        old, new = self.old, self.new
        # Most files differ in a few lines, and what is around these need not be matched.
        shortest = min(len(old), len(new))
        begin = next((at for at in range(shortest) if old[at] != new[at]), shortest)
        rest = shortest - begin
        end = next((at for at in range(rest) if old[-1 - at] != new[-1 - at]), rest)
        matcher = SequenceMatcher(None, old[begin : len(old) - end], new[begin : len(new) - end], autojunk=False)
        between = (begin + b + at for _, b, size in matcher.get_matching_blocks() for at in range(size))
        return frozenset(at + 1 for at in (*range(begin), *between, *range(len(new) - end, len(new))))

    def changed_at(self, number: int) -> int | None:
        """Return the line that has changed and that code at a line of the new file runs by; ``None`` if there is none.

        It is ``number`` if its statement is not in the old file as it is. Otherwise it is that of a ``with`` around it or of
        a decorator of its function: ``@torch.no_grad()`` decides what the lines beneath it keep.
        """
        around = [(first, last) for first, last in self._statements if first <= number <= last]
        if self._differs(*max(around, default=(number, number))):
            return number
        inner = (block for block in self._around(number) if self._differs(block.first, block.last))
        return next((block.first for block in inner), None)

    def _differs(self, first: int, last: int) -> bool:
        return any(line not in self.kept for line in range(first, last + 1))

    @cached_property
    def _nodes(self) -> list[ast.stmt]:
        try:
            tree = ast.parse("\n".join(self.new))
        except (SyntaxError, ValueError, RecursionError):
            return []
        return [node for node in ast.walk(tree) if isinstance(node, ast.stmt)]

    @cached_property
    def _statements(self) -> list[tuple[int, int]]:
        """The first and the last line of each statement, of one that has others within up to the first of these."""
        found = []
        for node in self._nodes:
            body: list[ast.stmt] = getattr(node, "body", [])
            found.append((node.lineno, _first(body[0]) - 1 if body else node.end_lineno or node.lineno))
        return found

    @cached_property
    def _functions(self) -> list[tuple[int, int]]:
        nodes = [node for node in self._nodes if isinstance(node, _FUNCTIONS)]
        return [(_first(node), node.end_lineno or node.lineno) for node in nodes]

    @cached_property
    def _blocks(self) -> list[_Block]:
        found = []
        for node in self._nodes:
            end = node.end_lineno or node.lineno
            if isinstance(node, (ast.With, ast.AsyncWith)):
                found.append(_Block(node.lineno, _first(node.body[0]) - 1, node.lineno, end))
            elif isinstance(node, _FUNCTIONS):
                found += [
                    _Block(one.lineno, one.end_lineno or one.lineno, node.lineno, end)
                    for one in node.decorator_list
                    if not self.new[one.lineno - 1].strip().startswith(_TESTS_OWN)
                ]
        return found

    def _around(self, number: int) -> Iterator[_Block]:
        """Yield what the code at a line runs under in its function, the innermost first."""
        within = max((first for first, last in self._functions if first <= number <= last), default=0)
        blocks = (one for one in self._blocks if one.begin <= number <= one.end and one.first >= within)
        return iter(sorted(blocks, reverse=True))


def _first(node: ast.stmt) -> int:
    """Return the first line of a statement with its decorators."""
    decorators: list[ast.expr] = getattr(node, "decorator_list", [])
    return min([node.lineno, *(one.lineno for one in decorators)])
