"""Recordings written by hand: what a source would tell of a step, token by token."""

from __future__ import annotations

from contextlib import contextmanager
from typing import TYPE_CHECKING

from pytest_gpumem.facts.values.events import AllocationEvent, SpanBegin, SpanEnd, TensorRecord, Token
from pytest_gpumem.measuring.explain.lifetimes import timeline_of
from pytest_gpumem.measuring.explain.trace import Label, Mark, MarkKind, Trace

if TYPE_CHECKING:
    from collections.abc import Iterator, Mapping

    from pytest_gpumem.facts.values.events import SpanKind
    from pytest_gpumem.measuring.explain.blocks import Lifetime, Timeline


class Stream:
    """A recording in the making. ``before`` are the blocks that are there when it begins, ``own`` those of the step."""

    def __init__(self, before: Mapping[int, int] | None = None, own: frozenset[int] | set[int] = frozenset()) -> None:
        self.tokens: list[Token] = []
        self.marks: list[Mark] = []
        self.snapshots: dict[int, tuple[Label, ...]] = {}
        self._before = dict(before or {})
        self._own = frozenset(own)

    def _add(self, token: Token) -> int:
        self.tokens.append(token)
        return len(self.tokens) - 1

    @property
    def _now(self) -> int:
        """A token a microsecond, from a second on."""
        return 10**9 + 1000 * len(self.tokens)

    def alloc(self, address: int, nbytes: int = 4, *, from_other_thread: bool = False) -> int:
        """The moment of the allocation."""
        return self._add(AllocationEvent(self._now, address, nbytes, from_other_thread))

    def free(self, address: int) -> int:
        """The moment of the free. How many bytes a free tells of is not looked at: not every source knows."""
        return self._add(AllocationEvent(self._now, address, -1))

    def seen(self, address: int, dtype: str, *shape: int) -> None:
        self._add(TensorRecord(address, dtype, shape))

    @contextmanager
    def operator(self, name: str, sequence: int = -1) -> Iterator[None]:
        with self._span("operator", name, sequence):
            yield

    @contextmanager
    def node(self, name: str, sequence: int = -1) -> Iterator[None]:
        with self._span("node", name, sequence):
            yield

    @contextmanager
    def mark(self, kind: MarkKind, path: str = "", site: str = "", library: str = "") -> Iterator[None]:
        self.marks.append(Mark(kind, path, site, library))
        with self._span("mark", "", -1, len(self.marks) - 1):
            yield

    @contextmanager
    def _span(self, kind: SpanKind, name: str, sequence: int = -1, mark: int = -1) -> Iterator[None]:
        self._add(SpanBegin(self._now, kind, name, sequence, mark))
        yield
        self._add(SpanEnd(self._now))

    def snapshot(self, *labels: Label) -> None:
        self.snapshots[len(self.marks)] = labels
        with self.mark("snapshot"):
            pass

    def trace(self) -> Trace:
        return Trace(tuple(self.tokens), tuple(self.marks), self.snapshots, self._before, self._own)

    def timeline(self) -> Timeline:
        return timeline_of(self.trace())

    def lifetimes(self) -> dict[int, Lifetime]:
        """The blocks by address, of a recording that uses each address once."""
        lifetimes = self.timeline().lifetimes
        found = {block.address: block for block in lifetimes}
        assert len(found) == len(lifetimes), "an address was used again"
        return found
