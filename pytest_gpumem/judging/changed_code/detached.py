"""Find the lines whose results belong to a graph of gradients, because a later ``detach()`` is gone. All functions are pure.

For example, a function loses the second of these statements::

    hidden = self.up(x)
    hidden = hidden.detach()
    return self.down(hidden)

Then ``self.up`` keeps its activations for backward, although the line with its call is the same in both versions.
"""

from __future__ import annotations

import ast
import re
from typing import TYPE_CHECKING, NamedTuple

from pytest_gpumem.judging.changed_code.lifetimes import parts_of, statements_in

if TYPE_CHECKING:
    from collections.abc import Iterator
    from collections.abc import Set as AbstractSet

    from pytest_gpumem.judging.changed_code.lifetimes import Function, StatementInBlocks

_DETACHING_METHODS = frozenset({"detach", "detach_", "item", "tolist", "numpy"})
_DETACHING_ATTRIBUTE = "data"


class _Detached(NamedTuple):
    """An expression for a tensor outside its graph: its text, the tensor's text, and the names in the tensor's text.

    Example: ``tensor="hidden[0]"``, ``text="hidden[0].detach()"`` and ``names={"hidden"}``.
    """

    tensor: str
    text: str
    names: frozenset[str]


def lines_before_lost_detach(old: Function, new: Function) -> dict[int, str]:
    """Return old lines whose results are detached in the old version, and used without detaching them in the new version.

    A line counts if the detached tensor depends on a name bound by the line. The methods ``item``, ``tolist`` and ``numpy`` and
    the attribute ``data`` count like ``detach``. A removed ``print(loss.item())`` is no lost detach, because nothing uses
    ``loss`` in its place.

    Returns:
        For each line number in the old version, the expression that is gone: ``{2: "hidden.detach()"}``.
    """
    still_detached = {each.tensor for node in ast.walk(new) for each in _detached(node)}
    statements = statements_in(old)
    old_texts = {ast.unparse(statement.node) for statement in statements}
    added = [statement for statement in statements_in(new) if ast.unparse(statement.node) not in old_texts]
    lines: dict[int, str] = {}
    for index, statement in enumerate(statements):
        for each in (each for node in parts_of(statement.node) for each in _detached(node)):
            if each.tensor not in still_detached and _is_used(each, statement, statements[index + 1 :], added):
                lines |= dict.fromkeys(_lines_of(each.names, statement, statements[:index]), each.text)
    return lines


def _detached(node: ast.AST) -> Iterator[_Detached]:
    """Yield the tensor detached by an expression, or nothing if the expression detaches no tensor."""
    attribute = node.func if isinstance(node, ast.Call) and not node.args else node
    if not isinstance(attribute, ast.Attribute):
        return
    is_call = attribute is not node
    if attribute.attr in _DETACHING_METHODS if is_call else attribute.attr == _DETACHING_ATTRIBUTE:
        yield _Detached(ast.unparse(attribute.value), ast.unparse(node), frozenset(_read(attribute.value)))


def _is_used(
    gone: _Detached, statement: StatementInBlocks, later: list[StatementInBlocks], added: list[StatementInBlocks]
) -> bool:
    """Return whether the new version uses the tensor in places where the old version uses its detached value."""
    text = ast.unparse(statement.node)
    added_texts = {ast.unparse(each.node) for each in added}
    if text == f"{gone.tensor}.detach_()":
        return True
    if gone.tensor in statement.bound:
        return not any(gone.tensor in each.bound for each in added)
    if text.replace(gone.text, gone.tensor) in added_texts:
        return True
    return any(
        re.sub(rf"(?<![\w.]){re.escape(name)}(?!\w)", lambda _: gone.tensor, ast.unparse(use.node)) in added_texts
        for name in statement.bound
        for use in later
        if name in {read for node in parts_of(use.node) for read in _read(node)}
    )


def _lines_of(names: AbstractSet[str], statement: StatementInBlocks, earlier: list[StatementInBlocks]) -> Iterator[int]:
    """Yield the numbers of the earlier lines with the computation of ``names``, as used in ``statement``."""
    for candidate in reversed(earlier):
        if names.isdisjoint(candidate.bound) or not candidate.can_reach(statement):
            continue
        yield candidate.node.lineno
        if candidate.steps == statement.steps[: len(candidate.steps)]:
            names = names - set(candidate.bound)
        for node in parts_of(candidate.node):
            names = names | _read(node)


def _read(node: ast.AST) -> set[str]:
    """Return the names and attributes that an expression reads, for example ``x`` and ``self.cache``."""
    return {
        ast.unparse(part)
        for part in ast.walk(node)
        if isinstance(part, ast.Name | ast.Attribute) and isinstance(part.ctx, ast.Load)
    }
