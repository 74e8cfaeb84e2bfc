"""Block lifetimes of one recorded step: when each was allocated, in which spans, and when it was freed. Pure."""

from __future__ import annotations

from dataclasses import replace
from math import prod
from typing import TYPE_CHECKING

from pytest_gpumem.explain.blocks import Lifetime, Timeline
from pytest_gpumem.explain.leftovers import with_leftovers
from pytest_gpumem.explain.trace import WHOLE_STEP, GraphCalls, Label, Mark, SpanStack
from pytest_gpumem.torch_support.static_access import tensor_text
from pytest_gpumem.values.composition import item_bits
from pytest_gpumem.values.events import AllocationEvent, Close, Open, Seen
from pytest_gpumem.values.layers import folded, layers_of

if TYPE_CHECKING:
    from collections.abc import Iterable, Iterator, Mapping

    from pytest_gpumem.explain.trace import Trace
    from pytest_gpumem.values.layers import Numbers


def timeline_of(trace: Trace, own_bytes: int | None = None) -> Timeline:
    """Return the block lifetimes of a trace.

    ``own_bytes`` are the step's when it began. Those not found on anything that it holds were left by earlier steps, as in a
    list, or by a graph: of a step that repeats, each does what this one did.
    """
    timeline = _with_following(_Reader(trace).read(), trace)
    if own_bytes is None:
        return timeline
    return replace(timeline, lifetimes=with_leftovers(timeline, own_bytes))


def _with_following(timeline: Timeline, trace: Trace) -> Timeline:
    """Return the timeline with those of the steps that ran after it, and with the blocks that outlived these steps."""
    steps = [timeline]
    for tokens in trace.following:
        there = {block.address: block.nbytes for block in steps[-1].lifetimes if block.freed is None}
        steps.append(_Reader(replace(trace, tokens=tokens, before=there, own=frozenset(), following=())).read())
    freed_later: frozenset[int] = frozenset()
    for number in range(len(steps) - 2, -1, -1):
        freed_later |= {
            block.address for block in steps[number + 1].lifetimes if block.is_older and block.freed is not None
        }
        lifetimes = (
            replace(block, lasts=block.address not in freed_later) if block.freed is None else block
            for block in steps[number].lifetimes
        )
        steps[number] = replace(steps[number], lifetimes=tuple(lifetimes))
    return replace(steps[0], following=tuple(steps[1:]))


def _with_workspaces(lifetimes: Iterable[Lifetime], released: tuple[int, int] | None) -> Iterator[Lifetime]:
    """Yield the blocks; those from before that went with the backend's workspaces are of the step's own earlier runs."""
    for block in lifetimes:
        from_before = block.allocated < 0 and block.label is None
        if from_before and released and block.freed is not None and released[0] <= block.freed <= released[1]:
            yield replace(block, own=True)
        else:
            yield block


def _is_more_specific(label: Label, block: Lifetime) -> bool:
    known = block.label
    if label.category == "input" and block.allocated >= 0:
        # What is put into a list that was handed in is no input.
        return False
    # An input is what is nothing else: a fixture's tensors may turn out to be parameters. Lines come to be known later.
    if known is None or known.category == "input":
        return True
    return known.category == label.category and bool(label.site) and not known.site


def _layers(trace: Trace) -> Mapping[str, frozenset[Numbers]]:
    paths = {mark.path for mark in trace.marks if mark.kind == "module"}
    paths |= {label.module for labels in trace.snapshots.values() for label in labels}
    return layers_of(paths)


def _phase(around: SpanStack) -> str:
    if around.phase not in ("", WHOLE_STEP):
        return around.phase
    return "backward" if around.within_node else "optimizer" if around.in_optimizer else "forward"


class _Reader:
    def __init__(self, trace: Trace) -> None:
        self._trace = trace
        self._open: list[tuple[int, Open]] = []
        self._live: dict[int, Lifetime] = {}
        self._done: list[Lifetime] = []
        self._around: dict[int, tuple[int, int]] = {}
        """The beginnings of the innermost call and module around each allocation, by its moment; -1 for none."""
        self._ends: dict[int, int] = {}
        self._made: dict[int, Mark | None] = {}
        """The innermost mark around the operator that made each node, by autograd's number."""
        self._recomputed: dict[str, int] = {}
        self._nodes: list[int] = []
        self._spans: dict[str, tuple[int, int]] = {}
        self._lines: set[tuple[str, str]] = set()
        """The lines that forward reached: backward that reaches one of them computes it again."""
        self._sites: dict[str, Mark] = {}
        """The latest mark in forward of each module that has a line."""
        self._paths: dict[tuple[str, str], str] = {}
        """The module in which forward reached a line, for code that is recomputed outside of any module's call."""
        self._calls = GraphCalls(trace.marks)

    def read(self) -> Timeline:
        trace = self._trace
        for address, nbytes in trace.before.items():
            self._live[address] = Lifetime(address, nbytes, -1, own=address in trace.own)
        live, lines, peak, peak_bytes = 0, [], -1, 0
        phases: dict[str, tuple[int, int]] = {}
        for moment, token in enumerate(trace.tokens):
            if isinstance(token, AllocationEvent):
                live += self._allocation(moment, token)
                if live > peak_bytes:
                    peak, peak_bytes = moment, live
                if token.nbytes > 0:
                    phase = self._live[token.address].phase
                    phases[phase] = max(phases.get(phase, (live, -moment)), (live, -moment))
            elif isinstance(token, Open):
                self._opened(moment, token)
            elif isinstance(token, Close):
                self._closed(moment)
            else:
                self._seen(token)
            lines.append(live)
        self._done += self._live.values()
        rest = self._spans
        lifetimes = map(self._finished, _with_workspaces(self._done, rest.get("workspaces")))
        return Timeline(
            live=tuple(lines),
            peak=peak,
            peak_bytes=peak_bytes,
            lifetimes=tuple(sorted(lifetimes, key=lambda block: (block.allocated, block.address))),
            recomputed=self._recomputed,
            nodes=tuple(self._nodes),
            step_ended=min((begin for begin, _ in rest.values()), default=None),
            garbage=rest.get("garbage"),
            workspaces=rest.get("workspaces"),
            no_grad=self._calls.no_grad(),
            no_backward=self._calls.no_backward(),
            layers=_layers(trace),
            phases={phase: -moment for phase, (_, moment) in phases.items()},
        )

    def _allocation(self, moment: int, event: AllocationEvent) -> int:
        """Enter an allocation or free, and return the change of the live bytes."""
        change = max(event.nbytes, 0)
        gone = self._live.pop(event.address, None)
        if gone is not None:
            self._done.append(replace(gone, freed=moment))
            change -= gone.nbytes
        if event.nbytes > 0:
            self._live[event.address] = self._allocated(moment, event)
        return change

    def _allocated(self, moment: int, event: AllocationEvent) -> Lifetime:
        around = SpanStack(self._lines)
        for opened, span in filter(self._is_phase, self._open) if event.apart else self._open:
            if span.kind == "operator":
                around.operator_begins(opened, span)
            elif span.kind == "node":
                around.node_begins(opened, span)
            else:
                around.mark_begins(opened, self._trace.marks[span.mark])
        mark = around.mark
        if around.node is not None:
            mark = self._node_mark(around.node, mark)
        elif mark is not None and around.recomputed:
            mark = self._recomputed_mark(mark)
        self._around[moment] = around.call if around.call >= 0 else around.outermost_operator, around.module
        return Lifetime(
            event.address,
            event.nbytes,
            moment,
            phase=_phase(around),
            operator=around.operator_of(event.nbytes),
            node=around.node.name if around.node is not None else "",
            in_optimizer=around.in_optimizer,
            recomputed=around.recomputed,
            mark=mark,
        )

    def _is_phase(self, opened: tuple[int, Open]) -> bool:
        _, span = opened
        return span.kind == "mark" and self._trace.marks[span.mark].kind == "phase"

    def _node_mark(self, node: Open, own: Mark | None) -> Mark | None:
        """Return the mark around the operator that made a node, or the node's own where it runs Python code."""
        made = self._made.get(node.sequence)
        if own is None or not (own.site or own.library):
            return made
        return replace(own, path=own.path or (made.path if made is not None else ""))

    def _recomputed_mark(self, mark: Mark) -> Mark:
        """Return a mark in backward with the module or the line of forward, since callers are torch's then."""
        if not mark.path:
            return replace(mark, path=self._paths.get((mark.site, mark.library), ""))
        if not mark.site and not mark.library and mark.path in self._sites:
            forward = self._sites[mark.path]
            return replace(mark, site=forward.site, library=forward.library, callers=forward.callers)
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
        if mark.kind == "snapshot":
            for label in self._trace.snapshots.get(span.mark, ()):
                found = self._live.get(label.address)
                if found is not None and _is_more_specific(label, found):
                    self._live[label.address] = replace(found, label=label)
        elif mark.kind in ("call", "module"):
            self._reached(mark)

    def _reached(self, mark: Mark) -> None:
        """Enter the beginning of a module or call: its line and module in forward, a recomputed module in backward."""
        in_node = next((n for n in range(len(self._open) - 1, -1, -1) if self._open[n][1].kind == "node"), None)
        if in_node is None:
            self._lines.add((mark.site, mark.library))
            if mark.path:
                self._sites[mark.path] = mark
                self._paths.setdefault((mark.site, mark.library), mark.path)
            return
        above = [self._trace.marks[span.mark].kind for _, span in self._open[in_node + 1 : -1] if span.kind == "mark"]
        if mark.kind == "module" and "module" not in above:
            path = folded(mark.path)
            self._recomputed[path] = self._recomputed.get(path, 0) + 1

    def _innermost_mark(self) -> Mark | None:
        marks = (self._trace.marks[span.mark] for _, span in reversed(self._open) if span.kind == "mark")
        return next((mark for mark in marks if mark.kind in ("call", "module")), None)

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
        # A view of another size is not what was allocated.
        if (
            found is not None
            and not found.tensor
            and prod(tensor.shape) * (item_bits(tensor.dtype) // 8) == found.nbytes
        ):
            self._live[tensor.address] = replace(found, tensor=tensor_text(tensor.dtype, tensor.shape))

    def _finished(self, block: Lifetime) -> Lifetime:
        call, module = (
            None if begin < 0 else self._ends.get(begin, len(self._trace.tokens))
            for begin in self._around.get(block.allocated, (-1, -1))
        )
        return replace(block, call_ended=call, module_ended=module)
