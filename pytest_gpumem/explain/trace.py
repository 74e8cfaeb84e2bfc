"""A recorded step: events, marks and ownership snapshots as frozen values, and the state that a reader of its spans keeps."""

from __future__ import annotations

import re
from dataclasses import dataclass, field, replace
from itertools import accumulate
from typing import TYPE_CHECKING, Literal

from pytest_gpumem.values.events import AllocationEvent, Close, Open
from pytest_gpumem.values.layers import folded
from pytest_gpumem.values.module_calls import Caller, ModuleCalls, counted

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence
    from collections.abc import Set as AbstractSet

    from pytest_gpumem.values.events import Seen, Token
    from pytest_gpumem.values.source_lines import Chain


MarkKind = Literal["phase", "module", "call", "optimizer", "snapshot", "rest", "next"]

WHOLE_STEP = "step"
"""The only phase of a step that has no others."""

# Operators by which others make their results; the outer operator is more specific.
_FACTORY = re.compile(r"aten::(_?empty|new_|zeros|ones|full|resize|clone|contiguous|to$|_to_copy|_resize)")


_CAST = "aten::_to_copy"
AUTOCAST = "autocast's cached cast"
"""The operator name for a weight's copy in lower precision. The profiler shows the copy within the weight's first user."""


@dataclass(frozen=True, slots=True)
class Mark:
    """A span of Python code: a phase, a module's call, a torch function's call, an optimizer's step.

    ``snapshot`` is a moment at which blocks were labelled; ``rest`` is what comes after the step (``workspaces``, ``garbage``).
    ``next`` is the span of one of the steps that run after it.
    """

    kind: MarkKind
    path: str = ""
    """The module's path; the phase's name; the name of the rest."""
    site: str = ""
    library: str = ""
    callers: Chain = ()
    """The lines that led there, as in `Site`."""
    grad: bool = True
    """True if autograd recorded when the call of a module, or of a torch function, began."""
    function: str = ""
    """The function in which a torch function is called, if it is no module's ``forward``."""
    caller: str = ""
    """The line that calls this function."""
    caller_function: str = ""
    """The function with this line. For the call of a module the function that calls the module."""
    casts: frozenset[int] = frozenset()
    """Sizes in bytes: autocast may copy weights in a call to lower precision, and keep the copies until it ends."""


@dataclass(frozen=True, slots=True)
class Label:
    """The owner of the block at an address."""

    address: int
    category: str
    module: str = ""
    tensor: str = ""
    site: str = ""


@dataclass(frozen=True)
class Trace:
    """A recording. ``before`` are the bytes of blocks from before it by address, ``own`` the addresses of the step's."""

    tokens: tuple[Token, ...]
    marks: tuple[Mark, ...] = ()
    snapshots: Mapping[int, tuple[Label, ...]] = field(default_factory=dict)
    """The labels of each ``snapshot``, by the index of its mark."""
    before: Mapping[int, int] = field(default_factory=dict)
    own: frozenset[int] = frozenset()
    results: Mapping[int, tuple[Seen, ...]] = field(default_factory=dict)
    """The tensors that each call returned, by the index of its mark: operators have only those that they take."""
    tensors: tuple[tuple[str, ...], ...] = ()
    """Dtype and shape of each allocation in their order (``float32[8, 256]``), if another recording saw them; else empty.

    First those of the recorded step, and then those of each step in ``following``.
    """
    following: tuple[tuple[Token, ...], ...] = ()
    """The tokens of each step that ran after it, with those of its ``rest``."""
    freed_at_end: frozenset[int] = frozenset()
    """The addresses of blocks freed by a following step that failed, which is not in `following`."""

    def apart(self, steps: int) -> Trace:
        """Return the trace with its later tokens in `following`, for the first ``steps`` steps after the recorded step."""
        begins = [n for n, token in enumerate(self.tokens) if self._is_next(token)]
        if not begins:
            return self
        ends = [*begins[1:], len(self.tokens)]
        following = (self._within(self.tokens[begin:end]) for begin, end in zip(begins, ends, strict=True))
        failed = self.tokens[begins[steps] :] if steps < len(begins) else ()
        freed = (token.address for token in failed if isinstance(token, AllocationEvent) and token.nbytes < 0)
        return replace(
            self,
            tokens=self.tokens[: begins[0]],
            following=tuple(following)[:steps],
            freed_at_end=frozenset(freed),
        )

    def _is_next(self, token: Token) -> bool:
        return isinstance(token, Open) and token.kind == "mark" and self.marks[token.mark].kind == "next"

    @staticmethod
    def _within(tokens: tuple[Token, ...]) -> tuple[Token, ...]:
        """Return ``tokens``, which begin with the opening of a span, without that and the span's end."""
        depths = accumulate(isinstance(token, Open) - isinstance(token, Close) for token in tokens)
        end = next((n for n, depth in enumerate(depths) if depth == 0), len(tokens))
        return tokens[1:end] + tokens[end + 1 :]


class GraphCalls:
    """Counter of module calls, fed with the spans of a trace in their order."""

    def __init__(self, marks: Sequence[Mark]) -> None:
        self._marks = marks
        self._calls: list[tuple[str, bool]] = []
        """Each call of a module: its folded path, and whether grad mode was off."""
        self._functions: list[tuple[str, bool]] = []
        """Each call of a torch function outside of modules with grad mode off: its function, and whether the mode was off."""
        self._function_at: dict[str, str] = {}
        """The function of each line that ran with grad mode on, or that called such a function or module."""
        self._callers: dict[str, dict[Caller, None]] = {}
        """The callers of each module with grad mode on, in their order."""
        self._open: list[int] = []
        """The calls that have not ended, by their index among all."""
        self._nodes = 0
        self._made_in: dict[int, tuple[int, ...]] = {}
        """The calls in which each node of the graph was made in forward, by autograd's number."""
        self._ran: set[int] = set()
        self._allocated_in: set[int] = set()
        """The calls in which forward allocated anything."""

    def opened(self, span: Open) -> None:
        """Enter the beginning of a span."""
        if span.kind == "node":
            self._nodes += 1
            self._ran.add(span.sequence)
        elif span.kind == "operator":
            # What is computed again makes a graph of its own, of which nothing need run.
            if span.sequence >= 0 and not self._nodes:
                self._made_in[span.sequence] = tuple(self._open)
        elif self._is_module(span):
            mark = self._marks[span.mark]
            if mark.grad:
                line = mark.library or mark.site
                self._called(folded(mark.path), line)
                self._is_in(line, self._calls[self._open[-1]][0] if self._open else "", mark.caller_function)
            self._open.append(len(self._calls))
            self._calls.append((folded(mark.path), not mark.grad))
        elif span.kind == "mark" and self._marks[span.mark].function and not self._nodes:
            self._in_function(self._marks[span.mark])

    def _in_function(self, mark: Mark) -> None:
        if self._open and self._calls[self._open[-1]][1]:
            return  # the module's grad mode is off, and that of all functions in it
        function = _function_text(folded(mark.path), mark.function)
        self._functions.append((function, not mark.grad))
        if mark.grad:
            self._called(function, mark.caller)
            self._function_at[mark.library or mark.site] = function
            self._is_in(mark.caller, folded(mark.path), mark.caller_function)

    def _is_in(self, line: str, module: str, function: str) -> None:
        if line and function:
            self._function_at.setdefault(line, _function_text(module, function))

    def _called(self, what: str, line: str) -> None:
        around = self._calls[self._open[-1]][0] if self._open else ""
        self._callers.setdefault(what, {})[Caller(around, line)] = None

    def allocated(self) -> None:
        """Enter an allocation."""
        if not self._nodes:
            self._allocated_in.update(self._open)

    def closed(self, span: Open) -> None:
        """Enter the end of a span."""
        if span.kind == "node":
            self._nodes -= 1
        elif self._is_module(span):
            self._open.pop()

    def _is_module(self, span: Open) -> bool:
        return span.kind == "mark" and self._marks[span.mark].kind == "module"

    def callers(self) -> dict[str, tuple[Caller, ...]]:
        """Return the callers of each module and function that was called with grad mode on, by its folded path."""
        return {path: tuple(callers) for path, callers in self._callers.items()}

    def function_at(self) -> dict[str, str]:
        """Return the function of each line that ran with grad mode on."""
        return dict(self._function_at)

    def no_grad(self) -> ModuleCalls:
        """Return how many of each module's calls began with grad mode off, and of the calls in each function."""
        return counted([*self._calls, *self._functions])

    def no_backward(self) -> ModuleCalls:
        """Return for each module how many of its forward calls with grad mode on had no graph node that ran.

        A call that neither made a node nor allocated does not count, such as a dropout that returns its input. A module whose
        parameters require no gradient makes no nodes. Empty for a step without backward.
        """
        if not self._ran:
            return {}
        made = {call for calls in self._made_in.values() for call in calls}
        made |= {call for call in self._allocated_in if not self._calls[call][1]}
        reached = {call for number in self._ran for call in self._made_in.get(number, ())}
        return counted((self._calls[call][0], call not in reached) for call in sorted(made))


def _function_text(module: str, function: str) -> str:
    """Return ``"net.target()"``, or ``"step()"`` outside of modules."""
    return f"{module}.{function}()" if module else f"{function}()"


@dataclass(slots=True)
class SpanStack:
    """The open spans around an allocation, outermost first, and the allocation's attribution to them.

    ``lines`` are those that forward reached, as (site, library).
    """

    lines: AbstractSet[tuple[str, str]]
    phase: str = ""
    in_optimizer: bool = False
    operator: str = ""
    outermost_operator: int = -1
    call: int = -1
    module: int = -1
    node: Open | None = None
    """Node of the autograd graph that allocates; ``None`` for Python code within a node."""
    within_node: bool = False
    recomputed: bool = False
    mark: Mark | None = None
    is_cast_within: bool = False
    """True within a cast that another operator runs, as ``linear`` under autocast casts its weight."""

    def operator_begins(self, opened: int, span: Open) -> None:
        if self.outermost_operator < 0:
            self.outermost_operator = opened
        self.is_cast_within |= span.name == _CAST and not _FACTORY.match(self.operator or _CAST)
        if not self.operator or not _FACTORY.match(span.name):
            self.operator = span.name

    def operator_of(self, nbytes: int) -> str:
        """Return the name of the operator that allocates so many bytes."""
        is_weight = self.is_cast_within and self.mark is not None and nbytes in self.mark.casts
        return AUTOCAST if is_weight else self.operator

    def node_begins(self, opened: int, span: Open) -> None:
        self.node, self.call, self.module, self.mark = span, opened, -1, None
        self.within_node, self.recomputed = True, False
        self.operator, self.outermost_operator, self.is_cast_within = "", -1, False

    def mark_begins(self, opened: int, mark: Mark) -> None:
        if mark.kind == "phase":
            self.phase = mark.path
        elif mark.kind == "optimizer":
            self.in_optimizer = True
        elif mark.kind in ("call", "module"):
            self.operator, self.outermost_operator, self.is_cast_within = "", -1, False
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
