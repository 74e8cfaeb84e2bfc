"""The stack of open spans around an allocation, outermost first, and its attribution to them."""

from __future__ import annotations

import re
from dataclasses import dataclass
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from collections.abc import Set as AbstractSet

    from pytest_gpumem.explain.trace import Mark
    from pytest_gpumem.values.events import Open

# Operators by which others make their results; the one around them says more.
_FACTORY = re.compile(r"aten::(_?empty|new_|zeros|ones|full|resize|clone|contiguous|to$|_to_copy|_resize)")


@dataclass(slots=True)
class SpanStack:
    """The open spans around an allocation, outermost first, and the allocation's attribution to them."""

    lines: AbstractSet[tuple[str, str]]
    phase: str = ""
    in_optimizer: bool = False
    operator: str = ""
    outermost_operator: int = -1
    call: int = -1
    module: int = -1
    node: Open | None = None
    """The node of the autograd graph that allocates; ``None`` when Python code that it runs does."""
    within_node: bool = False
    recomputed: bool = False
    mark: Mark | None = None

    def operator_begins(self, opened: int, span: Open) -> None:
        if self.outermost_operator < 0:
            self.outermost_operator = opened
        if not self.operator or not _FACTORY.match(span.name):
            self.operator = span.name

    def node_begins(self, opened: int, span: Open) -> None:
        self.node, self.call, self.module, self.mark = span, opened, -1, None
        self.within_node, self.recomputed = True, False
        self.operator, self.outermost_operator = "", -1

    def mark_begins(self, opened: int, mark: Mark) -> None:
        if mark.kind == "phase":
            self.phase = mark.path
        elif mark.kind == "optimizer":
            self.in_optimizer = True
        elif mark.kind in ("call", "module"):
            self.operator, self.outermost_operator = "", -1
            self.mark = mark
            if mark.kind == "module":
                self.module, self.call = opened, -1
                # An optimizer's closure runs the model.
                self.in_optimizer = False
            else:
                self.call = opened
            # Code of torch alone, or of a function's own backward, is the node's.
            known = bool(mark.site or mark.library) and (mark.site, mark.library) in self.lines
            if self.within_node and (mark.kind == "module" or known):
                self.recomputed, self.node = True, None
