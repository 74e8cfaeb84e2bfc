"""Block lifetimes of one recorded step: when each was allocated, in which spans, and when it was freed. Pure."""

from __future__ import annotations

from dataclasses import dataclass, field, replace
from typing import TYPE_CHECKING

from pytest_gpumem.explain.span_stack import SpanStack
from pytest_gpumem.explain.trace import GraphCalls, Label, Mark, folded, tensor_text
from pytest_gpumem.values.composition import item_bits
from pytest_gpumem.values.events import AllocationEvent, Close, Open, Seen

if TYPE_CHECKING:
    from collections.abc import Mapping

    from pytest_gpumem.explain.trace import Trace
    from pytest_gpumem.values.module_calls import ModuleCalls


@dataclass(frozen=True, slots=True)
class Lifetime:
    """A block from its allocation to its free. Moments are indices of tokens; -1 is before the recording."""

    address: int
    nbytes: int
    born: int
    died: int | None = None
    """``None`` when it outlived the recording."""
    own: bool = True
    """Whether it is the step's: everything that it allocates, and what it held when it began."""
    phase: str = ""
    operator: str = ""
    node: str = ""
    """The node of the autograd graph that allocated it; empty for what Python code of the step, or of a module, did."""
    in_optimizer: bool = False
    recomputed: bool = False
    """Whether Python code allocated it while backward ran: a part that is computed once more."""
    mark: Mark | None = None
    """The innermost mark around its allocation; in backward that around the operator that made the node."""
    call_ended: int | None = None
    """When the innermost call that allocated it ended: of a torch function, a node, or an operator."""
    module_ended: int | None = None
    """When the innermost module that allocated it ended; ``None`` outside of modules."""
    tensor: str = ""
    label: Label | None = None
    like: Lifetime | None = None
    """What this step made and left, for a block that an earlier step left: it was made as that one."""


@dataclass(frozen=True, slots=True)
class Timeline:
    """Live bytes over a recording, less what was live when it began: after each token, and the highest of them.

    Moments are indices of tokens.
    """

    live: tuple[int, ...]
    peak: int
    """The moment of the peak: -1 when nothing rose above what was live in the beginning."""
    peak_bytes: int
    lives: tuple[Lifetime, ...]
    recomputed: Mapping[str, int]
    nodes: tuple[int, ...] = ()
    """The moments at which nodes of the autograd graph began to run."""
    step_ended: int | None = None
    garbage: tuple[int, int] | None = None
    """From when to when cycles were collected, after the step."""
    workspaces: tuple[int, int] | None = None
    """From when to when the backend's workspaces were given back, after the step."""
    no_grad: ModuleCalls = field(default_factory=dict)
    no_backward: ModuleCalls = field(default_factory=dict)
    """As of `GraphCalls`."""

    def at(self, moment: int) -> list[Lifetime]:
        """Return the blocks that are live right after a moment."""
        return [life for life in self.lives if life.born <= moment and (life.died is None or life.died > moment)]


def timeline_of(trace: Trace, own_bytes: int | None = None) -> Timeline:
    """Follow a trace from its beginning to its end.

    ``own_bytes`` are the step's when it began. What of them was not found on anything that it holds was left by earlier
    steps, as in a list, or by a graph: of a step that repeats, each does what this one did.
    """
    timeline = _Reader(trace).read()
    if own_bytes is None:
        return timeline
    return replace(timeline, lives=_with_leftovers(timeline.lives, own_bytes))


def _with_leftovers(lives: tuple[Lifetime, ...], own_bytes: int) -> tuple[Lifetime, ...]:
    """Match older blocks without an owner with blocks of the same size that this step leaves behind.

    They are the step's as far as ``own_bytes`` has room for them beside what else it held when it began.
    """
    left: dict[int, list[Lifetime]] = {}
    for life in lives:
        if life.born >= 0 and life.died is None and life.label is None:
            left.setdefault(life.nbytes, []).append(life)

    def is_leftover(life: Lifetime) -> bool:
        return life.born < 0 and life.label is None and life.nbytes in left

    room = own_bytes - sum(life.nbytes for life in lives if life.born < 0 and life.own and not is_leftover(life))
    told: list[Lifetime] = []
    turns: dict[int, int] = {}
    # What leads to its blocks is known of those that are the step's already: they come first.
    for life in sorted(lives, key=lambda life: not life.own):
        if not is_leftover(life):
            told.append(life)
            continue
        fits = life.nbytes <= room
        if fits:
            room -= life.nbytes
            likes = left[life.nbytes]
            turn = turns.get(life.nbytes, 0)
            turns[life.nbytes] = turn + 1
            told.append(replace(life, own=True, like=likes[turn % len(likes)]))
        else:
            told.append(replace(life, own=False))
    return tuple(sorted(told, key=lambda life: (life.born, life.address)))


@dataclass(slots=True)
class _Birth:
    """A block that is live, while the trace is read."""

    life: Lifetime
    call: int
    module: int


def _says_more(label: Label, life: Lifetime) -> bool:
    known = life.label
    if label.category == "input" and life.born >= 0:
        # What is put into a list that was handed in is no input.
        return False
    # An input is what is nothing else: a fixture's tensors may turn out to be parameters. Lines come to be known later.
    if known is None or known.category == "input":
        return True
    return known.category == label.category and bool(label.site) and not known.site


class _Reader:
    def __init__(self, trace: Trace) -> None:
        self._trace = trace
        self._open: list[tuple[int, Open]] = []
        self._live: dict[int, _Birth] = {}
        self._done: list[_Birth] = []
        self._ends: dict[int, int] = {}
        self._made: dict[int, Mark | None] = {}
        """The innermost mark around the operator that made each node, by autograd's number."""
        self._recomputed: dict[str, int] = {}
        self._nodes: list[int] = []
        self._spans: dict[str, tuple[int, int]] = {}
        self._lines: set[tuple[str, str]] = set()
        """The lines that forward reached: backward that reaches one of them computes it again."""
        self._sites: dict[str, tuple[str, str]] = {}
        """The latest line in forward of each module."""
        self._paths: dict[tuple[str, str], str] = {}
        """The module in which forward reached a line, for code that is recomputed outside of any module's call."""
        self._calls = GraphCalls(trace.marks)

    def read(self) -> Timeline:
        trace = self._trace
        for address, nbytes in trace.before.items():
            life = Lifetime(address, nbytes, -1, own=address in trace.own)
            self._live[address] = _Birth(life, -1, -1)
        live, lines, peak, peak_bytes = 0, [], -1, 0
        for moment, token in enumerate(trace.tokens):
            if isinstance(token, AllocationEvent):
                live += self._allocation(moment, token)
                if live > peak_bytes:
                    peak, peak_bytes = moment, live
            elif isinstance(token, Open):
                self._opened(moment, token)
            elif isinstance(token, Close):
                self._closed(moment)
            else:
                self._seen(token)
            lines.append(live)
        self._done += self._live.values()
        lives = [self._finished(birth) for birth in self._done]
        lives.sort(key=lambda life: (life.born, life.address))
        rest = self._spans
        return Timeline(
            live=tuple(lines),
            peak=peak,
            peak_bytes=peak_bytes,
            lives=tuple(lives),
            recomputed=self._recomputed,
            nodes=tuple(self._nodes),
            step_ended=min((begin for begin, _ in rest.values()), default=None),
            garbage=rest.get("garbage"),
            workspaces=rest.get("workspaces"),
            no_grad=self._calls.no_grad(),
            no_backward=self._calls.no_backward(),
        )

    def _allocation(self, moment: int, event: AllocationEvent) -> int:
        """The change of the live bytes."""
        gone = self._live.pop(event.address, None)
        change = 0
        if gone is not None:
            gone.life = replace(gone.life, died=moment)
            self._done.append(gone)
            change -= gone.life.nbytes
        if event.nbytes > 0:
            self._live[event.address] = self._born(moment, event)
            change += event.nbytes
        return change

    def _born(self, moment: int, event: AllocationEvent) -> _Birth:
        around = SpanStack(self._lines)
        for opened, span in self._open:
            if span.kind == "operator":
                around.operator_begins(opened, span)
            elif span.kind == "node":
                around.node_begins(opened, span)
            else:
                around.mark_begins(opened, self._trace.marks[span.mark])
        mark = around.mark
        if around.node is not None:
            mark = self._led_back(around.node, mark)
        elif mark is not None and around.recomputed:
            mark = self._computed_again(mark)
        life = Lifetime(
            event.address,
            event.nbytes,
            moment,
            phase=around.phase,
            operator=around.operator,
            node=around.node.name if around.node is not None else "",
            in_optimizer=around.in_optimizer,
            recomputed=around.recomputed,
            mark=mark,
        )
        return _Birth(life, around.call if around.call >= 0 else around.outermost_operator, around.module)

    def _led_back(self, node: Open, own: Mark | None) -> Mark | None:
        """Return the mark around the operator that made a node, or the node's own where it runs Python code."""
        made = self._made.get(node.sequence)
        if own is None or not (own.site or own.library):
            return made
        return replace(own, path=own.path or (made.path if made is not None else ""))

    def _computed_again(self, mark: Mark) -> Mark:
        """Return a mark in backward with the module or the line of forward, since callers are torch's then."""
        if not mark.path:
            return replace(mark, path=self._paths.get((mark.site, mark.library), ""))
        if not mark.site and not mark.library and mark.path in self._sites:
            site, library = self._sites[mark.path]
            return replace(mark, site=site, library=library)
        return mark

    def _opened(self, moment: int, span: Open) -> None:
        self._open.append((moment, span))
        self._calls.opened(span)
        if span.kind == "node":
            self._nodes.append(moment)
            return
        if span.kind == "operator":
            if span.sequence >= 0:
                self._made[span.sequence] = self._innermost_mark()
            return
        mark = self._trace.marks[span.mark]
        if mark.kind == "look":
            for label in self._trace.looks.get(span.mark, ()):
                found = self._live.get(label.address)
                if found is not None and _says_more(label, found.life):
                    found.life = replace(found.life, label=label)
        elif mark.kind in ("call", "module"):
            self._reached(mark)

    def _reached(self, mark: Mark) -> None:
        """A module or a call begins: in forward its line belongs to its module, in backward a module runs once more."""
        in_node = next((n for n in range(len(self._open) - 1, -1, -1) if self._open[n][1].kind == "node"), None)
        if in_node is None:
            self._lines.add((mark.site, mark.library))
            if mark.path:
                self._sites[mark.path] = mark.site, mark.library
                self._paths.setdefault((mark.site, mark.library), mark.path)
            return
        above = [self._trace.marks[span.mark].kind for _, span in self._open[in_node + 1 : -1] if span.kind == "mark"]
        if mark.kind == "module" and "module" not in above:
            path = folded(mark.path)
            self._recomputed[path] = self._recomputed.get(path, 0) + 1

    def _innermost_mark(self) -> Mark | None:
        for _, span in reversed(self._open):
            if span.kind == "mark":
                mark = self._trace.marks[span.mark]
                if mark.kind in ("call", "module"):
                    return mark
        return None

    def _closed(self, moment: int) -> None:
        opened, span = self._open.pop()
        self._calls.closed(span)
        self._ends[opened] = moment
        for tensor in self._trace.results.get(span.mark, ()):
            self._seen(tensor)
        if span.kind == "mark" and self._trace.marks[span.mark].kind == "rest":
            self._spans[self._trace.marks[span.mark].path] = opened, moment

    def _seen(self, tensor: Seen) -> None:
        found = self._live.get(tensor.address)
        if found is not None and not found.life.tensor:
            count = 1
            for size in tensor.shape:
                count *= size
            item = item_bits(tensor.dtype) // 8
            # A view of another size is not what was allocated.
            rounded = -(-count * item // self._trace.granularity) * self._trace.granularity
            if rounded == found.life.nbytes:
                found.life = replace(found.life, tensor=tensor_text(tensor.dtype, tensor.shape))

    def _finished(self, birth: _Birth) -> Lifetime:
        last = len(self._trace.tokens)
        return replace(
            birth.life,
            call_ended=self._ends.get(birth.call, last) if birth.call >= 0 else None,
            module_ended=self._ends.get(birth.module, last) if birth.module >= 0 else None,
        )
