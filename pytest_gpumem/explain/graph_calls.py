"""Calls of modules in a trace that autograd recorded, and those that backward reached. Pure."""

from __future__ import annotations

from typing import TYPE_CHECKING

from pytest_gpumem.explain.trace import folded
from pytest_gpumem.values.module_calls import ModuleCalls, counted

if TYPE_CHECKING:
    from collections.abc import Sequence

    from pytest_gpumem.explain.trace import Mark
    from pytest_gpumem.values.events import Open


class GraphCalls:
    """Counter of module calls, fed with the spans of a trace in their order."""

    def __init__(self, marks: Sequence[Mark]) -> None:
        self._marks = marks
        self._calls: list[tuple[str, bool]] = []
        """Each call of a module: its folded path, and whether grad mode was off."""
        self._open: list[int] = []
        """The calls that have not ended, by their place among all."""
        self._nodes = 0
        self._made_in: dict[int, tuple[int, ...]] = {}
        """The calls in which each node of the graph was made in forward, by autograd's number."""
        self._ran: set[int] = set()

    def opened(self, span: Open) -> None:
        """A span begins."""
        if span.kind == "node":
            self._nodes += 1
            self._ran.add(span.sequence)
        elif span.kind == "operator":
            # What is computed again makes a graph of its own, of which nothing need run.
            if span.sequence >= 0 and not self._nodes:
                self._made_in[span.sequence] = tuple(self._open)
        elif self._is_module(span):
            mark = self._marks[span.mark]
            self._open.append(len(self._calls))
            self._calls.append((folded(mark.path), not mark.grad))

    def closed(self, span: Open) -> None:
        """The span ends."""
        if span.kind == "node":
            self._nodes -= 1
        elif self._is_module(span):
            self._open.pop()

    def _is_module(self, span: Open) -> bool:
        return span.kind == "mark" and self._marks[span.mark].kind == "module"

    def no_grad(self) -> ModuleCalls:
        """Return how many of each module's calls began with grad mode off."""
        return counted(self._calls)

    def no_backward(self) -> ModuleCalls:
        """Return for each module how many of its forward calls that made graph nodes had none of them run.

        Nothing of a step without backward.
        """
        if not self._ran:
            return {}
        made = {call for calls in self._made_in.values() for call in calls}
        reached = {call for number in self._ran for call in self._made_in.get(number, ())}
        return counted((self._calls[call][0], call not in reached) for call in sorted(made))
