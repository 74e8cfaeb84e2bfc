"""Merge the profiler's events and the CUDA caching allocator's history into a single list of tokens. All functions are pure.

The profiler records allocations with the surrounding operators, but with rounded sizes. The allocator's history has the
requested sizes, and the times when blocks became free. These times differ from the profiler's, because a freed block remains
in use as long as another stream uses its memory.
"""

from __future__ import annotations

from collections import deque
from pathlib import PurePath
from typing import TYPE_CHECKING, Any, NamedTuple

from pytest_gpumem.base.errors import MeasuringError
from pytest_gpumem.facts.values.events import NOWHERE, AllocationEvent, SpanBegin, SpanEnd, TensorRecord, Threads, Token

if TYPE_CHECKING:
    from collections.abc import Iterable, Mapping, Sequence


ALLOCATED, GIVEN_BACK, FREE, _RAN_OUT = "alloc", "free_requested", "free_completed", "oom"
_USED_ACTIONS = (ALLOCATED, GIVEN_BACK, FREE, _RAN_OUT)
_NUMBERS_OF_A_THREAD = 2**40
_AT_ONCE_NS = 100_000
"""If a block becomes free within this time after its deallocation, with no event in between, no other stream used it."""


class HistoryEntry(NamedTuple):
    """An entry in the allocator's history: a time, torch's name for the action, an address and the requested bytes.

    ``from_other_thread`` is true for an allocation in a thread started by the program. The profiler does not record this
    thread.

    For example, ``HistoryEntry(1_000, "alloc", 0x7f00, 5000)`` is an allocation of 5,000 bytes.
    """

    time_ns: int
    action: str
    address: int
    nbytes: int
    from_other_thread: bool = False


def history_of(trace: Iterable[Mapping[str, Any]], *, threads_apart: bool = False) -> list[HistoryEntry]:
    """Return the entries about blocks from a device's history. Entries about segments are omitted.

    Args:
        trace: The device's element in ``device_traces`` of torch's snapshot.
        threads_apart: Whether to set ``from_other_thread`` for allocations whose call stack begins in a `threading.Thread`.
    """
    return [
        HistoryEntry(
            int(entry["time_us"]) * 1000,
            entry["action"],
            entry.get("addr", NOWHERE),
            entry["size"],
            from_other_thread=threads_apart
            and entry["action"] == ALLOCATED
            and _is_in_a_thread(entry.get("frames") or []),
        )
        for entry in trace
        if entry["action"] in _USED_ACTIONS
    ]


def _is_in_a_thread(frames: Sequence[Mapping[str, Any]]) -> bool:
    """Return whether the outermost Python frame is the function in which each `threading.Thread` starts."""
    return bool(frames) and (PurePath(frames[-1]["filename"]).name, frames[-1]["name"]) == (
        "threading.py",
        "_bootstrap",
    )


def numbered_by_thread(tokens: Iterable[Token], threads: Mapping[int, Threads]) -> list[Token]:
    """Return ``tokens`` with unique autograd sequence numbers.

    Autograd numbers the operators in each thread from 0, and backward runs in a thread of its own.

    Args:
        tokens: The tokens of all threads.
        threads: The threads of each operator and node, by the operator's or node's start time.
    """
    return [
        token._replace(sequence=token.sequence + _NUMBERS_OF_A_THREAD * _counting(token, threads[token.time_ns]))
        if isinstance(token, SpanBegin) and token.sequence >= 0 and token.time_ns in threads
        else token
        for token in tokens
    ]


def _counting(span: SpanBegin, threads: Threads) -> int:
    return threads.made_by if span.kind == "node" and threads.made_by else threads.run_by


def in_order_of_time(tokens: Sequence[Token]) -> list[Token]:
    """Return tokens from several threads, ordered by time, with properly nested spans.

    The threads must run one at a time, like the main thread and backward's. The order has to be restored because the
    profiler puts backward's operators inside an arbitrary operator from the main thread, or outside all of them. Tokens with
    the same time keep their order, and an operator's inputs stay directly behind the operator.

    If a span waits for a second thread (``torch.jit.fork``), a span in this second thread may end shortly after the waiting
    span. Then the waiting span is extended until the other span ends, but not beyond the surrounding mark.
    """
    moments: list[int] = []
    open_spans: list[int] = []
    opened_at: dict[int, int] = {}
    for index, token in enumerate(tokens):
        if isinstance(token, TensorRecord):
            moments.append(moments[-1])
        elif isinstance(token, SpanEnd):
            opened_at[index] = open_spans.pop()
            # The profiler has no valid end time for an unfinished span.
            moments.append(max(token.time_ns, moments[opened_at[index]]))
        else:
            moments.append(token.time_ns)
            if isinstance(token, SpanBegin):
                open_spans.append(index)
    return _nested(tokens, sorted(range(len(tokens)), key=moments.__getitem__), opened_at)


def _nested(tokens: Sequence[Token], order: Sequence[int], opened_at: Mapping[int, int]) -> list[Token]:
    """Return ``tokens`` in ``order``, with properly nested spans.

    The end of a mark also ends all spans within it. Any other span ends only after the spans within it have ended, because an
    allocation between the two ends may come from either span's thread.
    """
    ordered: list[Token] = []
    stack: list[int] = []
    ended: set[int] = set()
    for index in order:
        token = tokens[index]
        if not isinstance(token, SpanEnd):
            ordered.append(token)
            if isinstance(token, SpanBegin):
                stack.append(index)
            continue
        opened = opened_at[index]
        if opened in stack and _is_mark(tokens[opened]):
            ended.update(stack[stack.index(opened) :])
        ended.add(opened)
        while stack and stack[-1] in ended:
            stack.pop()
            ordered.append(token)
    return ordered


def _is_mark(token: Token) -> bool:
    return isinstance(token, SpanBegin) and token.kind == "mark"


def with_requested_sizes(tokens: Sequence[Token], history: Sequence[HistoryEntry]) -> list[Token]:
    """Return ``tokens`` with two corrections from the allocator's history: requested sizes, and later frees.

    Each allocation gets its requested size. Each free moves to the time at which the allocator could reuse the block, because
    another stream may still use a deallocated block.

    The profiler's tokens and the history must have the same allocations in the same order. Three kinds of events are only in
    the history: frees that another stream has delayed, events from threads without a profiler, and failed allocations (0 bytes
    at `NOWHERE`). These are inserted between the other events, as accurately as the history's clock allows.

    For example, an allocation at ``0x7f00`` has 5,120 bytes in the profiler's tokens and 5,000 bytes in the history. In the
    result it has 5,000 bytes.

    Raises:
        MeasuringError: The profiler's allocations differ from the history's.
    """
    join = _Join(tokens, history)
    for token in tokens:
        join.follow(token)
    return join.end()


class _Join:
    """The state while `with_requested_sizes` merges: the remaining history, the merged tokens, and the current time."""

    def __init__(self, tokens: Sequence[Token], history: Sequence[HistoryEntry]) -> None:
        self._left = deque(entry for entry in history if entry.action in _USED_ACTIONS)
        self._tokens: list[Token] = []
        self._now = next((token.time_ns for token in tokens if not isinstance(token, TensorRecord)), 0)
        self._ahead = 0
        """The profiler's time of the latest common event minus the history's time of this event."""
        self._seen = 0
        self._counts = (
            sum(isinstance(token, AllocationEvent) and token.nbytes > 0 for token in tokens),
            sum(entry.action == ALLOCATED and not entry.from_other_thread for entry in self._left),
        )

    def follow(self, token: Token) -> None:
        if isinstance(token, AllocationEvent):
            self._now = token.time_ns
            if token.nbytes > 0:
                self._allocated(token)
            else:
                self._given_back(token)
            return
        if not isinstance(token, TensorRecord):
            while self._left and self._is_alone(self._left[0]) and self._left[0].time_ns + self._ahead <= token.time_ns:
                self._emit(self._left.popleft())
            self._now = token.time_ns
        self._tokens.append(token)

    def end(self) -> list[Token]:
        entry = self._reach(ALLOCATED)
        if entry is not None:
            raise self._mismatch(f"the history has another allocation of {entry.nbytes} bytes at {entry.address:#x}")
        return self._tokens

    def _allocated(self, token: AllocationEvent) -> None:
        self._seen += 1
        entry = self._reach(ALLOCATED)
        event_text = f"allocation {self._seen} has {token.nbytes} bytes at {token.address:#x} in the profile"
        if entry is None:
            raise self._mismatch(f"{event_text}, and the history has no further allocation")
        if entry.address != token.address or entry.nbytes > token.nbytes:
            raise self._mismatch(f"{event_text}, but {entry.nbytes} bytes at {entry.address:#x} in the history")
        self._ahead = token.time_ns - entry.time_ns
        self._tokens.append(token._replace(nbytes=entry.nbytes))

    def _given_back(self, token: AllocationEvent) -> None:
        entry = self._reach(GIVEN_BACK, token.address)
        if entry is None:
            raise self._mismatch(
                f"after allocation {self._seen} the profile has a free of {-token.nbytes} bytes at {token.address:#x}, "
                "and the history does not have it"
            )
        self._ahead = token.time_ns - entry.time_ns
        next_entry = self._left[0] if self._left else None
        if (
            next_entry is not None
            and (next_entry.action, next_entry.address) == (FREE, token.address)
            and next_entry.time_ns - entry.time_ns <= _AT_ONCE_NS
        ):
            self._emit(self._left.popleft())

    @staticmethod
    def _is_alone(entry: HistoryEntry) -> bool:
        """Return whether the entry's event is only in the history, not in the profile."""
        return entry.from_other_thread or entry.action in (FREE, _RAN_OUT)

    def _reach(self, action: str, address: int | None = None) -> HistoryEntry | None:
        """Return the next entry with this action and address, and emit all entries before it.

        Return ``None`` if another allocation or the end of the history comes first.
        """
        while self._left:
            entry = self._left.popleft()
            if entry.action == action and address in (None, entry.address) and not entry.from_other_thread:
                return entry
            if entry.action == ALLOCATED and not entry.from_other_thread:
                self._left.appendleft(entry)
                return None
            self._emit(entry)
        return None

    def _emit(self, entry: HistoryEntry) -> None:
        # Use the profiler's time of the previous token, because the history has a different clock.
        if entry.action == FREE:
            self._tokens.append(AllocationEvent(self._now, entry.address, -entry.nbytes))
        elif entry.action == _RAN_OUT:
            self._tokens.append(AllocationEvent(self._now, NOWHERE, 0))
        elif entry.from_other_thread:
            self._tokens.append(AllocationEvent(self._now, entry.address, entry.nbytes, from_other_thread=True))

    def _mismatch(self, difference: str) -> MeasuringError:
        profiled, recorded = self._counts
        return MeasuringError(
            f"{profiled} GPU allocations in the profile do not match {recorded} allocations in the allocator's history: "
            f"{difference}; another thread allocated memory, or the measured code ran a profiler or recorded the "
            "history (torch.cuda.memory._record_memory_history)"
        )


def live_blocks(segments: list[dict[str, Any]], size: str) -> dict[int, int]:
    """Return the blocks that tensors use, as a mapping from addresses to bytes.

    Args:
        segments: The segments from ``torch.cuda.memory_snapshot()``.
        size: The key for a block's bytes: ``size``, or ``requested_size`` for the bytes before rounding.
    """
    blocks: dict[int, int] = {}
    for segment in segments:
        address = segment["address"]
        for block in segment["blocks"]:
            if block["state"] == "active_allocated":
                blocks[address] = block[size]
            address += block["size"]
    return blocks
