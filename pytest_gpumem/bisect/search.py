"""Search for the first bad one among variants that come from one another, of which some cannot be judged. Pure.

What comes from a bad one is taken to be bad, and what a good one comes from to be good, as `git bisect` does.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import cached_property
from typing import TYPE_CHECKING, Literal

if TYPE_CHECKING:
    from collections.abc import Iterator, Mapping, Sequence

Answer = Literal["good", "bad", "skipped"]
_OPPOSITE: dict[Answer, Answer] = {"good": "bad", "bad": "good", "skipped": "skipped"}


@dataclass(frozen=True)
class Graph:
    """The parents of each one that is searched, by places from 0. The first and the last are the ends.

    ``backwards`` says that the last, which is bad, is the ancestor: the first good one is searched for, which mended it.
    """

    parents: Sequence[Sequence[int]]
    backwards: bool = False

    @classmethod
    def line(cls, count: int) -> Graph:
        """Return a row of ``count``, each of which comes from the one before it."""
        return cls([(), *((at,) for at in range(count - 1))])

    @cached_property
    def ancestors(self) -> list[int]:
        """Each one and all that it comes from, as a number in which their bits are set."""
        found: dict[int, int] = {}
        for start in range(len(self.parents)):
            path = [start]
            while path:
                open_ones = [one for one in self.parents[path[-1]] if one not in found]
                if open_ones:
                    path.append(open_ones[0])
                    continue
                at = path.pop()
                found[at] = 1 << at
                for parent in self.parents[at]:
                    found[at] |= found[parent]
        return [found[at] for at in range(len(self.parents))]


@dataclass(frozen=True, slots=True)
class Bounds:
    """The ends of what is left, and those between, of which each may be the first bad one, as well as ``bad``.

    Of a search backwards it is the good one that comes from the bad one.
    """

    good: int
    bad: int
    between: tuple[int, ...] = ()


@dataclass(frozen=True, slots=True)
class _Left:
    """The steps that may have made the change: ``changed``, which has it, and ``suspects`` with it, as bits.

    ``before`` is the parent of the earliest suspect on the way of first parents; ``None`` where the graph has none.
    """

    changed: int
    suspects: int
    before: int | None


def bounds(graph: Graph, known: Mapping[int, Answer]) -> Bounds:
    """Return what is left of a graph by what is ``known``, in which both ends are."""
    answers = _in_time(graph, known)
    left = _left(graph, answers)
    between = tuple(at for at in _places(left.suspects) if at != left.changed)
    beneath = [at for at, one in answers.items() if one == "good" and _has(graph.ancestors[left.changed], at)]
    nearest = max(beneath, key=lambda at: (graph.ancestors[at].bit_count(), at), default=_start(graph))
    before = left.before if left.before is not None and answers.get(left.before) == "good" else nearest
    return Bounds(left.changed, before, between) if graph.backwards else Bounds(before, left.changed, between)


def next_ones(graph: Graph, known: Mapping[int, Answer], jobs: int = 1) -> tuple[int, ...]:
    """Return which to judge next, at most ``jobs`` at a time; none where the first bad one is known as well as it can be.

    They divide what is left evenly. In place of one that was skipped it is the nearest to it. The last one may be a parent that
    is good by what comes from it: with it the first bad one is compared.
    """
    answers = _in_time(graph, known)
    left = _left(graph, answers)
    weights = {
        at: (graph.ancestors[at] & left.suspects).bit_count() for at in _places(left.suspects) if at not in answers
    }
    wanted: list[int] = []
    for part in range(1, jobs + 1):
        middle = left.suspects.bit_count() * part / (jobs + 1)
        by_distance = {at: (abs(weight - middle), at) for at, weight in weights.items() if at not in wanted}
        if by_distance:
            wanted.append(min(by_distance, key=by_distance.__getitem__))
    if not wanted and left.before is not None and left.before not in answers:
        return (left.before,)
    return tuple(sorted(wanted))


def _in_time(graph: Graph, known: Mapping[int, Answer]) -> dict[int, Answer]:
    """Return the answers such that a good one has not changed yet, and a bad one has."""
    return {at: _OPPOSITE[one] if graph.backwards else one for at, one in known.items()}


def _start(graph: Graph) -> int:
    """Return the end that has not changed yet."""
    return len(graph.parents) - 1 if graph.backwards else 0


def _left(graph: Graph, answers: Mapping[int, Answer]) -> _Left:
    ancestors = graph.ancestors
    changed = min((at for at, one in answers.items() if one == "bad"), key=lambda at: (ancestors[at].bit_count(), at))
    suspects = ancestors[changed]
    for at, one in answers.items():
        # One that is good although it comes from a bad one has something that makes up for it.
        if one == "good" and not _has(ancestors[at], changed):
            suspects &= ~ancestors[at]
    before: int | None = changed
    while before is not None and _has(suspects, before):
        before = next(iter(graph.parents[before]), None)
    return _Left(changed, suspects, before)


def _has(places: int, at: int) -> bool:
    return bool(places >> at & 1)


def _places(bits: int) -> Iterator[int]:
    """Yield the places whose bits are set."""
    while bits:
        lowest = bits & -bits
        yield lowest.bit_length() - 1
        bits ^= lowest
