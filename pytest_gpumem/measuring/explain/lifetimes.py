"""Find when, and in which spans, a recorded step allocated each block, and when the block was freed.

All functions are pure.

Example:
    A step multiplies its input by a weight. The weight is a block of 400 bytes at address 1, which exists before the recording.
    So ``Trace.before`` is ``{1: 400}``, and ``Trace.own`` is ``{1}``. Forward allocates an output with 800 bytes. Backward
    allocates a gradient with 400 bytes and frees the output. The tokens, and the live bytes after each token, are::

        moment  token                                live
        0       SpanBegin mark "phase" forward          0
        1       SpanBegin operator aten::mm, sequence 0 0
        2       allocation of 800 bytes at 2          800
        3, 4    SpanEnd, SpanEnd                      800
        5       SpanBegin mark "phase" backward       800
        6       SpanBegin node MmBackward0, sequence 0     800
        7       allocation of 400 bytes at 3         1200
        8       free at 2                             400
        9, 10   SpanEnd, SpanEnd                      400

    Live bytes begin at 0, so the weight's 400 bytes are not included. `timeline_of` returns a timeline with ``peak=7``,
    ``peak_bytes=1200`` and these lifetimes::

        address  nbytes  allocated  freed  phase     operator  node         call_ended
        1        400     -1         None                                    None
        2        800     2          8      forward   aten::mm               3
        3        400     7          None   backward            MmBackward0  9
"""

from __future__ import annotations

from dataclasses import replace
from math import prod
from typing import TYPE_CHECKING

from pytest_gpumem.facts.values.composition import item_bits
from pytest_gpumem.facts.values.events import AllocationEvent, SpanBegin, SpanEnd, TensorRecord
from pytest_gpumem.facts.values.layers import folded, layers_of
from pytest_gpumem.measuring.explain.blocks import Lifetime, Timeline
from pytest_gpumem.measuring.explain.leftovers import with_leftovers
from pytest_gpumem.measuring.explain.trace import WHOLE_STEP, GraphCalls, Label, Mark, SpanStack
from pytest_gpumem.torch_support.static_access import tensor_text

if TYPE_CHECKING:
    from collections.abc import Iterable, Iterator, Mapping

    from pytest_gpumem.facts.values.layers import Numbers
    from pytest_gpumem.measuring.explain.trace import Trace


def timeline_of(trace: Trace, own_bytes: int | None = None) -> Timeline:
    """Return the block lifetimes in a trace.

    Args:
        trace: The recording.
        own_bytes: The step's own bytes at its beginning. If these are more than the bytes in ``trace.own``, earlier steps left
            the other bytes, for example in a list or a graph. A repeated step makes the same blocks each time, so these
            leftovers are matched with blocks from this step. With ``None``, nothing is matched.
    """
    timeline = _with_following(_Reader(trace).read(), trace)
    if own_bytes is None:
        return timeline
    return replace(timeline, lifetimes=with_leftovers(timeline, own_bytes))


def tensors_of_allocations(source: Timeline, target: Timeline) -> tuple[tuple[str, ...], ...]:
    """Return the dtypes and shapes of allocations in ``target``, from ``source``, another recording of the same code.

    Args:
        source: The timeline with dtypes and shapes.
        target: The timeline without dtypes and shapes.

    Returns:
        For each step a tuple with a text, such as ``float32[8, 256]``, for each allocation. The recorded step comes first, then
        the following steps. The texts come from a step in ``source`` whose allocations have the same sizes in the same order.
        If ``source`` has no such step, the tuple is empty.
    """
    texts = {_sizes(step): tuple(block.tensor for block in _allocated(step)) for step in (source, *source.following)}
    return tuple(texts.get(_sizes(step), ()) for step in (target, *target.following))


def _sizes(step: Timeline) -> tuple[int, ...]:
    return tuple(block.nbytes for block in _allocated(step))


def _allocated(step: Timeline) -> list[Lifetime]:
    return [block for block in step.lifetimes if not block.is_older]


def _with_following(timeline: Timeline, trace: Trace) -> Timeline:
    """Add a timeline for each following step, and set `Lifetime.is_kept` for each block that outlives its step."""
    steps = [timeline]
    for number, tokens in enumerate(trace.following, 1):
        live_blocks = {block.address: block.nbytes for block in steps[-1].lifetimes if block.freed is None}
        later = replace(
            trace,
            tokens=tokens,
            before=live_blocks,
            own=frozenset(),
            following=(),
            tensors=trace.tensors[number : number + 1],
        )
        steps.append(_Reader(later).read())
    freed_later: frozenset[int] = frozenset()
    for number in range(len(steps) - 2, -1, -1):
        freed_later |= {
            block.address for block in steps[number + 1].lifetimes if block.is_older and block.freed is not None
        }
        lifetimes = (
            replace(block, is_kept=block.address not in freed_later) if block.freed is None else block
            for block in steps[number].lifetimes
        )
        steps[number] = replace(steps[number], lifetimes=tuple(lifetimes))
    return replace(steps[0], following=tuple(steps[1:]))


def _with_workspaces(lifetimes: Iterable[Lifetime], released: tuple[int, int] | None) -> Iterator[Lifetime]:
    """Yield the blocks. The backend's workspaces (cuBLAS) count as the step's own.

    The step's earlier runs, before the recording, allocated these workspaces. They are freed in ``released``, the span in
    which the backend releases its workspaces.
    """
    for block in lifetimes:
        is_older_without_label = block.allocated < 0 and block.label is None
        if (
            is_older_without_label
            and released
            and block.freed is not None
            and released[0] <= block.freed <= released[1]
        ):
            yield replace(block, own=True)
        else:
            yield block


def _is_more_specific(label: Label, block: Lifetime) -> bool:
    current_label = block.label
    if label.category == "input" and block.allocated >= 0:
        # The step made this block and put the tensor into an input, for example a list. So the block is not an input.
        return False
    # Any other label replaces the label "input", because an input may turn out to be a parameter. A later label with the same
    # category replaces the current label if only the later label has a line.
    if current_label is None or current_label.category == "input":
        return True
    return current_label.category == label.category and bool(label.site) and not current_label.site


def _layers(trace: Trace) -> Mapping[str, frozenset[Numbers]]:
    paths = {mark.path for mark in trace.marks if mark.kind == "module"}
    paths |= {label.module for labels in trace.snapshots.values() for label in labels}
    return layers_of(paths)


def _phase(around: SpanStack) -> str:
    if around.phase not in ("", WHOLE_STEP):
        return around.phase
    return "backward" if around.within_node else "optimizer" if around.in_optimizer else "forward"


class _Reader:
    """Reads the tokens in a trace in order, and tracks the open spans and the live blocks."""

    def __init__(self, trace: Trace) -> None:
        self._trace = trace
        self._open: list[tuple[int, SpanBegin]] = []
        self._live: dict[int, Lifetime] = {}
        self._done: list[Lifetime] = []
        self._around: dict[int, tuple[int, int]] = {}
        """For each allocation's moment: the moments at which the innermost call and module around it began; -1 for none."""
        self._ends: dict[int, int] = {}
        """The moment at which each span ended, by the moment at which the span began."""
        self._mark_by_node: dict[int, Mark | None] = {}
        """The innermost mark around the operator that created each autograd node, by the node's sequence number."""
        self._recomputed: dict[str, int] = {}
        """The number of recomputed calls, by the module's folded path."""
        self._nodes: list[int] = []
        self._spans: dict[str, tuple[int, int]] = {}
        """The first and last moment of each mark with kind ``rest``, by the mark's path: workspaces, garbage or result."""
        self._lines: set[tuple[str, str]] = set()
        """The lines that ran in forward. If such a line runs in backward too, the line is recomputed."""
        self._sites: dict[str, Mark] = {}
        """The latest forward mark in each module, by the module's path."""
        self._paths: dict[tuple[str, str], str] = {}
        """The module in which each line first ran in forward. Recomputed code outside all modules gets this module."""
        self._calls = GraphCalls(trace.marks)
        self._tensors = iter(trace.tensors[0] if trace.tensors else ())

    def read(self) -> Timeline:
        trace = self._trace
        for address, nbytes in trace.before.items():
            self._live[address] = Lifetime(address, nbytes, -1, own=address in trace.own)
        live, lines, peak, peak_bytes = 0, [], -1, 0
        # Each phase's peak and the first moment of this peak, as (live bytes, -moment). So the maximum is the earliest peak.
        phases: dict[str, tuple[int, int]] = {}
        for moment, token in enumerate(trace.tokens):
            if isinstance(token, AllocationEvent):
                live += self._allocation(moment, token)
                if live > peak_bytes:
                    peak, peak_bytes = moment, live
                if token.nbytes > 0:
                    phase = self._live[token.address].phase
                    phases[phase] = max(phases.get(phase, (live, -moment)), (live, -moment))
            elif isinstance(token, SpanBegin):
                self._opened(moment, token)
            elif isinstance(token, SpanEnd):
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
            callers=self._calls.callers(),
            function_at=self._calls.function_at(),
            layers=_layers(trace),
            phases={phase: -moment for phase, (_, moment) in phases.items()},
        )

    def _allocation(self, moment: int, event: AllocationEvent) -> int:
        """Process an allocation or free, and return the change in live bytes."""
        change = max(event.nbytes, 0)
        freed_block = self._live.pop(event.address, None)
        if freed_block is not None:
            self._done.append(replace(freed_block, freed=moment))
            change -= freed_block.nbytes
        if event.nbytes > 0:
            self._live[event.address] = self._allocated(moment, event)
            self._calls.allocated()
        return change

    def _allocated(self, moment: int, event: AllocationEvent) -> Lifetime:
        around = SpanStack(self._lines)
        for opened, span in filter(self._is_phase, self._open) if event.from_other_thread else self._open:
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
            tensor=next(self._tensors, ""),
        )

    def _is_phase(self, opened: tuple[int, SpanBegin]) -> bool:
        _, span = opened
        return span.kind == "mark" and self._trace.marks[span.mark].kind == "phase"

    def _node_mark(self, node: SpanBegin, own: Mark | None) -> Mark | None:
        """Return a node's own mark if this mark has a line, and otherwise the mark of the operator that created the node."""
        creating_mark = self._mark_by_node.get(node.sequence)
        if own is None or not (own.site or own.library):
            return creating_mark
        return replace(own, path=own.path or (creating_mark.path if creating_mark is not None else ""))

    def _recomputed_mark(self, mark: Mark) -> Mark:
        """Add the module or line from forward to a recomputed mark, because in backward only torch calls the code."""
        if not mark.path:
            return replace(mark, path=self._paths.get((mark.site, mark.library), ""))
        if not mark.site and not mark.library and mark.path in self._sites:
            forward = self._sites[mark.path]
            return replace(mark, site=forward.site, library=forward.library, callers=forward.callers)
        return mark

    def _opened(self, moment: int, span: SpanBegin) -> None:
        self._open.append((moment, span))
        self._calls.opened(span)
        if span.kind == "node":
            self._nodes.append(moment)
            return
        if span.kind == "operator":
            if span.sequence >= 0:
                self._mark_by_node[span.sequence] = self._innermost_mark()
            return
        mark = self._trace.marks[span.mark]
        if mark.kind == "snapshot":
            for label in self._trace.snapshots.get(span.mark, ()):
                block = self._live.get(label.address)
                if block is not None and _is_more_specific(label, block):
                    self._live[label.address] = replace(block, label=label)
        elif mark.kind in ("call", "module"):
            self._reached(mark)

    def _reached(self, mark: Mark) -> None:
        """Process the beginning of a module or call. In forward, store the line. In backward, count a recomputed module."""
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

    def _seen(self, tensor: TensorRecord) -> None:
        block = self._live.get(tensor.address)
        # A view with another size does not describe the whole block.
        if (
            block is not None
            and not block.tensor
            and prod(tensor.shape) * (item_bits(tensor.dtype) // 8) == block.nbytes
        ):
            self._live[tensor.address] = replace(block, tensor=tensor_text(tensor.dtype, tensor.shape))

    def _finished(self, block: Lifetime) -> Lifetime:
        call, module = (
            None if begin < 0 else self._ends.get(begin, len(self._trace.tokens))
            for begin in self._around.get(block.allocated, (-1, -1))
        )
        return replace(block, call_ended=call, module_ended=module)
