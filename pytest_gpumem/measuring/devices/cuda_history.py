"""Merge the profiler's events and the CUDA caching allocator's history into a single list of tokens. Pure.

The profiler records the spans around allocations, but only the allocator's rounded block sizes. The allocator's history has the
requested sizes and the real times when blocks were freed. A block is not free while another stream still uses its memory.
"""

from __future__ import annotations

from collections import deque
from pathlib import PurePath
from typing import TYPE_CHECKING, Any, NamedTuple

from pytest_gpumem.facts.measurement import MeasuringError
from pytest_gpumem.facts.values.events import NOWHERE, AllocationEvent, SpanBegin, SpanEnd, TensorRecord, Threads, Token

if TYPE_CHECKING:
    from collections.abc import Iterable, Mapping, Sequence


ALLOCATED, GIVEN_BACK, FREE, _RAN_OUT = "alloc", "free_requested", "free_completed", "oom"
_USED_ACTIONS = (ALLOCATED, GIVEN_BACK, FREE, _RAN_OUT)
_NUMBERS_OF_A_THREAD = 2**40
_AT_ONCE_NS = 100_000
"""A block that is freed within this time, with no event in between, was not in use by another stream."""


class HistoryEntry(NamedTuple):
    """An entry of the allocator's history, with torch's name for the action and the requested bytes.

    ``from_other_thread`` marks an allocation from the program's own thread, which the profiler does not see.

    For example, ``HistoryEntry(1_000, "alloc", 0x7f00, 5000)`` is an allocation with 5,000 bytes.
    """

    time_ns: int
    action: str
    address: int
    nbytes: int
    from_other_thread: bool = False


def history_of(trace: Iterable[Mapping[str, Any]], *, threads_apart: bool = False) -> list[HistoryEntry]:
    """Return the block events from an element of ``device_traces`` in torch's snapshot, without segment events.

    Args:
        trace: The entries of a device.
        threads_apart: Whether to mark allocations whose frames begin in a `threading.Thread`.
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
    """Return whether the outermost Python frame is the function with which every `threading.Thread` begins."""
    return bool(frames) and (PurePath(frames[-1]["filename"]).name, frames[-1]["name"]) == (
        "threading.py",
        "_bootstrap",
    )


def numbered_by_thread(tokens: Iterable[Token], threads: Mapping[int, Threads]) -> list[Token]:
    """Return ``tokens`` with unique autograd numbers. Autograd counts from 0 in each thread, and backward has its own thread.

    Args:
        tokens: The tokens of all threads.
        threads: The threads of operators and nodes, by their start time.
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
    """Return the tokens from several threads, ordered by time and nested. Only a single thread runs at a time.

    The profiler attaches another thread's operators (backward's) to an arbitrary operator from the first thread, or to none.
    Tokens with the same time keep their order, and an operator keeps its inputs. A span from another thread may end shortly
    after its waiting span (``torch.jit.fork``). Such a span ends with their common mark at the latest.
    """
    moments: list[int] = []
    open_spans: list[int] = []
    opened_at: dict[int, int] = {}
    for index, token in enumerate(tokens):
        if isinstance(token, TensorRecord):
            moments.append(moments[-1])
        elif isinstance(token, SpanEnd):
            opened_at[index] = open_spans.pop()
            # An unfinished span has no valid end time.
            moments.append(max(token.time_ns, moments[opened_at[index]]))
        else:
            moments.append(token.time_ns)
            if isinstance(token, SpanBegin):
                open_spans.append(index)
    return _nested(tokens, sorted(range(len(tokens)), key=moments.__getitem__), opened_at)


def _nested(tokens: Sequence[Token], order: Sequence[int], opened_at: Mapping[int, int]) -> list[Token]:
    """Return ``tokens`` in ``order``, with nested spans.

    A mark belongs to the recording thread and ends all spans within it. Any other span waits for the spans within it, because
    an allocation between them may belong to either thread.
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
    """Return ``tokens`` with requested sizes, and with each free at the time when the block could be reused.

    Both arguments have the same allocations in the same order. Events that only the history has are inserted between common
    events, as accurately as its clock allows. They are frees delayed by another stream, events from unprofiled
    threads, and failed allocations (0 bytes at `NOWHERE`).

    For example, the profiler has an allocation with 5,120 bytes at ``0x7f00``, and the history's allocation there has 5,000
    bytes. The result has 5,000 bytes.

    Raises:
        MeasuringError: The allocations do not match.
    """
    join = _Join(tokens, history)
    for token in tokens:
        join.follow(token)
    return join.end()


class _Join:
    """The state of the merge: the remaining history, the tokens so far, and the current time."""

    def __init__(self, tokens: Sequence[Token], history: Sequence[HistoryEntry]) -> None:
        self._left = deque(entry for entry in history if entry.action in _USED_ACTIONS)
        self._tokens: list[Token] = []
        self._now = next((token.time_ns for token in tokens if not isinstance(token, TensorRecord)), 0)
        self._ahead = 0
        """The difference between the profiler's clock and the history's, from the latest common event."""
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
            raise self._mismatch(f"the history goes on with {entry.nbytes} bytes at {entry.address:#x}")
        return self._tokens

    def _allocated(self, token: AllocationEvent) -> None:
        self._seen += 1
        entry = self._reach(ALLOCATED)
        event_text = f"allocation {self._seen} is {token.nbytes} bytes at {token.address:#x} to the profiler"
        if entry is None:
            raise self._mismatch(f"{event_text}, and the history has ended")
        if entry.address != token.address or entry.nbytes > token.nbytes:
            raise self._mismatch(f"{event_text}, and {entry.nbytes} bytes at {entry.address:#x} to the history")
        self._ahead = token.time_ns - entry.time_ns
        self._tokens.append(token._replace(nbytes=entry.nbytes))

    def _given_back(self, token: AllocationEvent) -> None:
        entry = self._reach(GIVEN_BACK, token.address)
        if entry is None:
            raise self._mismatch(
                f"after allocation {self._seen} the profiler has a free of {-token.nbytes} bytes at {token.address:#x}, "
                "and the history none"
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
        """Return whether only the history has this entry."""
        return entry.from_other_thread or entry.action in (FREE, _RAN_OUT)

    def _reach(self, action: str, address: int | None = None) -> HistoryEntry | None:
        """Emit all entries before the next match, and return the match; ``None`` if an allocation or the end comes first."""
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
        # Use the time of the surrounding tokens, because the history has a different clock.
        if entry.action == FREE:
            self._tokens.append(AllocationEvent(self._now, entry.address, -entry.nbytes))
        elif entry.action == _RAN_OUT:
            self._tokens.append(AllocationEvent(self._now, NOWHERE, 0))
        elif entry.from_other_thread:
            self._tokens.append(AllocationEvent(self._now, entry.address, entry.nbytes, from_other_thread=True))

    def _mismatch(self, difference: str) -> MeasuringError:
        profiled, recorded = self._counts
        return MeasuringError(
            f"the profiler has {profiled} allocations on the GPU and the allocator's history has {recorded}, and they do not "
            f"match: {difference}; another thread allocated memory, or the measured code ran a profiler or recorded the "
            "history (torch.cuda.memory._record_memory_history)"
        )


def live_blocks(segments: list[dict[str, Any]], size: str) -> dict[int, int]:
    """Return the tensors' blocks as address -> bytes, from the segments in ``torch.cuda.memory_snapshot()``.

    Args:
        segments: The segments.
        size: The key of a block's bytes: ``size``, or ``requested_size`` for the bytes before rounding.
    """
    blocks: dict[int, int] = {}
    for segment in segments:
        address = segment["address"]
        for block in segment["blocks"]:
            if block["state"] == "active_allocated":
                blocks[address] = block[size]
            address += block["size"]
    return blocks
