"""A recorded region of CUDA: the profiler's events and the caching allocator's history made one list of tokens. Pure.

The profiler records the spans of allocations, whose sizes are those of the allocator's blocks. The allocator's history has
the requested sizes, and the times when blocks were really free: a block that another stream still uses is not.
"""

from __future__ import annotations

from collections import deque
from pathlib import PurePath
from typing import TYPE_CHECKING, Any, NamedTuple

from pytest_gpumem.measurement import MeasuringError
from pytest_gpumem.values.events import NOWHERE, AllocationEvent, Close, Open, Seen, Threads, Token

if TYPE_CHECKING:
    from collections.abc import Iterable, Mapping, Sequence


ALLOCATED, GIVEN_BACK, FREE, _RAN_OUT = "alloc", "free_requested", "free_completed", "oom"
_USED_ACTIONS = (ALLOCATED, GIVEN_BACK, FREE, _RAN_OUT)
_NUMBERS_OF_A_THREAD = 2**40
_AT_ONCE_NS = 100_000
"""A block that comes back this soon, with nothing in between, was not waited for."""


class HistoryEntry(NamedTuple):
    """An entry of the allocator's history, under torch's own name for what happened; ``nbytes`` as it was asked for.

    An allocation that is ``apart`` was made by a thread that the program started, which the profiler does not see.
    """

    time_ns: int
    action: str
    address: int
    nbytes: int
    apart: bool = False


def history_of(trace: Iterable[Mapping[str, Any]], *, threads_apart: bool = False) -> list[HistoryEntry]:
    """Return what happened to blocks, of one of the ``device_traces`` of torch's snapshot; its segments are the cache's.

    With ``threads_apart`` the frames of allocations tell which were made by a `threading.Thread`.
    """
    return [
        HistoryEntry(
            int(entry["time_us"]) * 1000,
            entry["action"],
            entry.get("addr", NOWHERE),
            entry["size"],
            apart=threads_apart and entry["action"] == ALLOCATED and _is_in_a_thread(entry.get("frames") or []),
        )
        for entry in trace
        if entry["action"] in _USED_ACTIONS
    ]


def _is_in_a_thread(frames: Sequence[Mapping[str, Any]]) -> bool:
    """Return whether the outermost of Python's frames is that in which any `threading.Thread` begins."""
    return bool(frames) and (PurePath(frames[-1]["filename"]).name, frames[-1]["name"]) == (
        "threading.py",
        "_bootstrap",
    )


def numbered_by_thread(tokens: Iterable[Token], threads: Mapping[int, Threads]) -> list[Token]:
    """Return ``tokens`` with autograd's numbers made unique: each thread counts from 0, and backward has its own.

    ``threads`` are those of operators and nodes, by the time at which they began.
    """
    return [
        token._replace(sequence=token.sequence + _NUMBERS_OF_A_THREAD * _counting(token, threads[token.time_ns]))
        if isinstance(token, Open) and token.sequence >= 0 and token.time_ns in threads
        else token
        for token in tokens
    ]


def _counting(span: Open, threads: Threads) -> int:
    return threads.made if span.kind == "node" and threads.made else threads.ran


def in_order_of_time(tokens: Sequence[Token]) -> list[Token]:
    """Return the tokens of several threads, of which one runs at a time, in order of time and nested.

    The profiler hangs the operators of another thread (backward's) on what the first one happened to run when they began,
    or on nothing. Tokens of the same moment stay as they are, and what an operator took stays with it. A span of another
    thread may end a moment after what waited for it (``torch.jit.fork``): with the mark that both are in, at the latest.
    """
    moments: list[int] = []
    begun: list[int] = []
    opened_at: dict[int, int] = {}
    for index, token in enumerate(tokens):
        if isinstance(token, Seen):
            moments.append(moments[-1])
        elif isinstance(token, Close):
            opened_at[index] = begun.pop()
            # Of a span that did not end the time is none.
            moments.append(max(token.time_ns, moments[opened_at[index]]))
        else:
            moments.append(token.time_ns)
            if isinstance(token, Open):
                begun.append(index)
    return _nested(tokens, sorted(range(len(tokens)), key=moments.__getitem__), opened_at)


def _nested(tokens: Sequence[Token], order: Sequence[int], opened_at: Mapping[int, int]) -> list[Token]:
    """Return ``tokens`` in ``order``, with spans that nest.

    A mark, which is the recording thread's, ends the spans within it that are still open. Any other span waits for them: of two
    threads it is not known which one's an allocation is.
    """
    ordered: list[Token] = []
    stack: list[int] = []
    ended: set[int] = set()
    for index in order:
        token = tokens[index]
        if not isinstance(token, Close):
            ordered.append(token)
            if isinstance(token, Open):
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
    return isinstance(token, Open) and token.kind == "mark"


def with_requested_sizes(tokens: Sequence[Token], history: Sequence[HistoryEntry]) -> list[Token]:
    """Return ``tokens`` with requested sizes, and with each free where the block could be used again.

    Both have the same allocations in the same order. What only the history has stands between what both have, as near as
    its clock shows: blocks that another stream used for longer, what threads did that are not profiled, and allocations
    that failed (of 0 bytes, at `NOWHERE`). Raises `MeasuringError` when the two do not match.
    """
    join = _Join(tokens, history)
    for token in tokens:
        join.follow(token)
    return join.end()


class _Join:
    def __init__(self, tokens: Sequence[Token], history: Sequence[HistoryEntry]) -> None:
        self._left = deque(entry for entry in history if entry.action in _USED_ACTIONS)
        self._tokens: list[Token] = []
        self._now = next((token.time_ns for token in tokens if not isinstance(token, Seen)), 0)
        self._ahead = 0
        """The lead of the profiler's clock over the history's, by the latest event that both have."""
        self._seen = 0
        self._counts = (
            sum(isinstance(token, AllocationEvent) and token.nbytes > 0 for token in tokens),
            sum(entry.action == ALLOCATED and not entry.apart for entry in self._left),
        )

    def follow(self, token: Token) -> None:
        if isinstance(token, AllocationEvent):
            self._now = token.time_ns
            if token.nbytes > 0:
                self._allocated(token)
            else:
                self._given_back(token)
            return
        if not isinstance(token, Seen):
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
        known = f"allocation {self._seen} is {token.nbytes} bytes at {token.address:#x} to the profiler"
        if entry is None:
            raise self._mismatch(f"{known}, and the history has ended")
        if entry.address != token.address or entry.nbytes > token.nbytes:
            raise self._mismatch(f"{known}, and {entry.nbytes} bytes at {entry.address:#x} to the history")
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
        after = self._left[0] if self._left else None
        if (
            after is not None
            and (after.action, after.address) == (FREE, token.address)
            and after.time_ns - entry.time_ns <= _AT_ONCE_NS
        ):
            self._emit(self._left.popleft())

    @staticmethod
    def _is_alone(entry: HistoryEntry) -> bool:
        """Return whether only the history has it."""
        return entry.apart or entry.action in (FREE, _RAN_OUT)

    def _reach(self, action: str, address: int | None = None) -> HistoryEntry | None:
        """Return the next such entry, once the ones before it are emitted; ``None`` when an allocation, or the end, does."""
        while self._left:
            entry = self._left.popleft()
            if entry.action == action and address in (None, entry.address) and not entry.apart:
                return entry
            if entry.action == ALLOCATED and not entry.apart:
                self._left.appendleft(entry)
                return None
            self._emit(entry)
        return None

    def _emit(self, entry: HistoryEntry) -> None:
        # At the time of the tokens around it: the history's clock is another one.
        if entry.action == FREE:
            self._tokens.append(AllocationEvent(self._now, entry.address, -entry.nbytes))
        elif entry.action == _RAN_OUT:
            self._tokens.append(AllocationEvent(self._now, NOWHERE, 0))
        elif entry.apart:
            self._tokens.append(AllocationEvent(self._now, entry.address, entry.nbytes, apart=True))

    def _mismatch(self, what: str) -> MeasuringError:
        profiled, kept = self._counts
        return MeasuringError(
            f"the profiler tells of {profiled} allocations on the GPU and the allocator's history of {kept}, and they do not "
            f"match: {what}; another thread allocated meanwhile, or the measured code profiled itself or recorded the "
            "history (torch.cuda.memory._record_memory_history)"
        )


def live_blocks(segments: list[dict[str, Any]], size: str) -> dict[int, int]:
    """Return the blocks that tensors hold, by address, in the segments of ``torch.cuda.memory_snapshot()``.

    ``size`` is the key of their bytes: ``size``, or ``requested_size`` for what was asked for.
    """
    found: dict[int, int] = {}
    for segment in segments:
        address = segment["address"]
        for block in segment["blocks"]:
            if block["state"] == "active_allocated":
                found[address] = block[size]
            address += block["size"]
    return found
