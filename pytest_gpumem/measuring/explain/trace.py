"""Represent a recorded step by frozen values (events, marks and ownership snapshots), and read the step's spans."""

from __future__ import annotations

from dataclasses import dataclass, field, replace
from itertools import accumulate
from typing import TYPE_CHECKING, Literal

from pytest_gpumem.facts.values.events import AllocationEvent, SpanBegin, SpanEnd
from pytest_gpumem.facts.values.layers import folded
from pytest_gpumem.facts.values.module_calls import Caller, ModuleCalls, count_calls
from pytest_gpumem.torch_support.operators import FACTORY, within

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence
    from collections.abc import Set as AbstractSet

    from pytest_gpumem.facts.values.events import TensorRecord, Token
    from pytest_gpumem.facts.values.source_lines import Chain


MarkKind = Literal["phase", "module", "call", "optimizer", "snapshot", "rest", "next"]

WHOLE_STEP = "step"
"""The phase's name in a step without marked phases."""

_CAST = "aten::_to_copy"
AUTOCAST = "autocast's cached cast"
"""The displayed operator for a weight's copy in lower precision, which autocast caches.

The profiler shows the copy within the first operator that uses the weight.
"""


@dataclass(frozen=True, slots=True)
class Mark:
    """A span of Python code in a recording.

    The kinds are:

    - ``phase``, ``module``, ``call``, ``optimizer``: a phase, a module call, a torch function call, an optimizer step.
    - ``snapshot``: a moment at which blocks get labels. This span is empty.
    - ``rest``: work after the step, named ``workspaces``, ``garbage`` or ``result``.
    - ``next``: one of the following steps.

    Example:
        ``Mark("call", "net.up", site="model.py:12")`` is a torch function call at line 12, in the module ``net.up``.
    """

    kind: MarkKind
    path: str = ""
    """The module's path, the phase's name, or the name of the work after the step."""
    site: str = ""
    library: str = ""
    callers: Chain = ()
    """The calling lines, as in `Site`."""
    grad: bool = True
    """True if autograd was recording when a module call or torch function call began."""
    function: str = ""
    """The function that calls the torch function; empty for a module's ``forward``."""
    caller: str = ""
    """The line that calls ``function``."""
    caller_function: str = ""
    """The function that contains ``caller``. For a module call, the function that calls the module."""
    casts: frozenset[int] = frozenset()
    """The sizes in bytes of the weight copies in lower precision that autocast may make and cache during the call."""


@dataclass(frozen=True, slots=True)
class Label:
    """The owner of a block at an address."""

    address: int
    category: str
    module: str = ""
    tensor: str = ""
    site: str = ""


@dataclass(frozen=True)
class Trace:
    """A recording of one step, and of the steps that follow. `lifetimes` has an example."""

    tokens: tuple[Token, ...]
    marks: tuple[Mark, ...] = ()
    snapshots: Mapping[int, tuple[Label, ...]] = field(default_factory=dict)
    """The labels from each ownership snapshot, by the index of the snapshot's mark."""
    before: Mapping[int, int] = field(default_factory=dict)
    """The size in bytes of each block from before the recording, by address."""
    own: frozenset[int] = frozenset()
    """The addresses of blocks in ``before`` that belong to the step."""
    results: Mapping[int, tuple[TensorRecord, ...]] = field(default_factory=dict)
    """The tensors returned by each call, by the index of its mark. Operator tokens show only the operator's arguments."""
    tensors: tuple[tuple[str, ...], ...] = ()
    """Dtype and shape for each allocation in order (``float32[8, 256]``), if another recording saw them; otherwise
    empty.

    The recorded step's allocations come first, and then the allocations in each ``following`` step.
    """
    following: tuple[tuple[Token, ...], ...] = ()
    """The tokens of each following step, including the work after this step (``rest``)."""
    freed_at_end: frozenset[int] = frozenset()
    """The addresses of blocks freed by a following step that failed. The failed step is not in ``following``."""

    def apart(self, steps: int) -> Trace:
        """Return the trace with the tokens split into the recorded step and the first ``steps`` following steps."""
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
        return isinstance(token, SpanBegin) and token.kind == "mark" and self.marks[token.mark].kind == "next"

    @staticmethod
    def _within(tokens: tuple[Token, ...]) -> tuple[Token, ...]:
        """Return ``tokens`` without the first token, which begins a span, and without the end of this span."""
        depths = accumulate(isinstance(token, SpanBegin) - isinstance(token, SpanEnd) for token in tokens)
        end = next((n for n, depth in enumerate(depths) if depth == 0), len(tokens))
        return tokens[1:end] + tokens[end + 1 :]


class GraphCalls:
    """Counts module calls in a trace. The trace's spans have to be passed in order.

    The counts show which modules ran with grad mode off, and which ran in forward but not in backward.
    """

    def __init__(self, marks: Sequence[Mark]) -> None:
        self._marks = marks
        self._calls: list[tuple[str, bool]] = []
        """Each module call: the folded path, and True if grad mode was off."""
        self._functions: list[tuple[str, bool]] = []
        """Each torch function call: the function that calls it, and True if grad mode was off.

        Calls in a module with grad mode off are left out.
        """
        self._function_at: dict[str, str] = {}
        """The function that contains each line, for lines that ran with grad mode on, and for their callers."""
        self._callers: dict[str, dict[Caller, None]] = {}
        """The callers of each module or function that ran with grad mode on, in call order."""
        self._open: list[int] = []
        """The open calls, as indices into ``_calls``."""
        self._nodes = 0
        """The number of running autograd nodes."""
        self._made_in: dict[int, tuple[int, ...]] = {}
        """The module calls in which forward made each autograd node, by the node's sequence number."""
        self._ran: set[int] = set()
        """The sequence numbers of the autograd nodes that ran."""
        self._allocated_in: set[int] = set()
        """The module calls in which forward allocated memory."""

    def opened(self, span: SpanBegin) -> None:
        """Process the beginning of a span."""
        if span.kind == "node":
            self._nodes += 1
            self._ran.add(span.sequence)
        elif span.kind == "operator":
            # Code recomputed in backward makes a separate graph, whose nodes may never run. So these nodes do not count.
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
            return  # grad mode is off in the module, so also in its functions
        function = _function_text(folded(mark.path), mark.function)
        self._functions.append((function, not mark.grad))
        if mark.grad:
            self._called(function, mark.caller)
            self._function_at[mark.library or mark.site] = function
            self._is_in(mark.caller, folded(mark.path), mark.caller_function)

    def _is_in(self, line: str, module: str, function: str) -> None:
        if line and function:
            self._function_at.setdefault(line, _function_text(module, function))

    def _called(self, module_or_function: str, line: str) -> None:
        calling_module = self._calls[self._open[-1]][0] if self._open else ""
        self._callers.setdefault(module_or_function, {})[Caller(calling_module, line)] = None

    def allocated(self) -> None:
        """Process an allocation."""
        if not self._nodes:
            self._allocated_in.update(self._open)

    def closed(self, span: SpanBegin) -> None:
        """Process the end of a span."""
        if span.kind == "node":
            self._nodes -= 1
        elif self._is_module(span):
            self._open.pop()

    def _is_module(self, span: SpanBegin) -> bool:
        return span.kind == "mark" and self._marks[span.mark].kind == "module"

    def callers(self) -> dict[str, tuple[Caller, ...]]:
        """Return the callers with grad mode on, by the folded path of the called module or function."""
        return {path: tuple(callers) for path, callers in self._callers.items()}

    def function_at(self) -> dict[str, str]:
        """Return the function around each line that ran with grad mode on."""
        return dict(self._function_at)

    def no_grad(self) -> ModuleCalls:
        """Return how many calls began with grad mode off, for each module and function."""
        return count_calls([*self._calls, *self._functions])

    def no_backward(self) -> ModuleCalls:
        """Return, for each module, the number of forward calls with grad mode on whose nodes did not run in backward.

        A call counts only if it made a node or allocated memory. For example, a dropout that returns its input does not count.
        If a module's parameters require no gradient, its calls make no nodes. The result is empty for a step without backward.
        """
        if not self._ran:
            return {}
        forward_calls = {call for calls in self._made_in.values() for call in calls}
        forward_calls |= {call for call in self._allocated_in if not self._calls[call][1]}
        reached = {call for number in self._ran for call in self._made_in.get(number, ())}
        return count_calls((self._calls[call][0], call not in reached) for call in sorted(forward_calls))


def _function_text(module: str, function: str) -> str:
    """Return ``"net.target()"``, or ``"step()"`` outside of modules."""
    return f"{module}.{function}()" if module else f"{function}()"


@dataclass(slots=True)
class SpanStack:
    """Attributes an allocation to the open spans around it. The spans have to be passed in order, the outermost first.

    ``lines`` are the lines that ran in forward, as (site, library).
    """

    lines: AbstractSet[tuple[str, str]]
    phase: str = ""
    in_optimizer: bool = False
    operator: str = ""
    outermost_operator: int = -1
    call: int = -1
    module: int = -1
    node: SpanBegin | None = None
    """The autograd node that allocates; ``None`` if forward code allocates, even if a node recomputes this code."""
    within_node: bool = False
    recomputed: bool = False
    mark: Mark | None = None
    is_cast_within: bool = False
    """True within a cast that another operator calls. For example, ``linear`` casts its weight under autocast."""

    def operator_begins(self, opened: int, span: SpanBegin) -> None:
        if self.outermost_operator < 0:
            self.outermost_operator = opened
        self.is_cast_within |= span.name == _CAST and not FACTORY.match(self.operator or _CAST)
        self.operator = within(self.operator, span.name)

    def operator_of(self, nbytes: int) -> str:
        """Return the name of the operator that allocates ``nbytes``."""
        is_weight = self.is_cast_within and self.mark is not None and nbytes in self.mark.casts
        return AUTOCAST if is_weight else self.operator

    def node_begins(self, opened: int, span: SpanBegin) -> None:
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
                # An optimizer's closure runs the model, whose allocations do not belong to the optimizer.
                self.in_optimizer = False
            else:
                self.call = opened
            # In a node, a module or a line from forward is recomputed. All other code belongs to the node: torch's code, or an
            # autograd function's own backward.
            is_line_of_forward = bool(mark.site or mark.library) and (mark.site, mark.library) in self.lines
            if self.within_node and (mark.kind == "module" or is_line_of_forward):
                self.recomputed, self.node = True, None
