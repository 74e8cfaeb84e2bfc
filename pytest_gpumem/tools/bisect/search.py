"""Search for the first bad variant in a list of releases or a graph of commits, even if some variants cannot be judged.

Like `git bisect`, the search assumes that descendants of a bad variant are bad, and ancestors of a good variant are
good. All functions are pure.

For example, 64 commits are numbered from 0 to 63. Commit 0 is good, commit 63 is bad, and commit 40 made the change. The
search judges the commits 31 (good), 47 (bad), 39 (good), 43 (bad), 41 (bad) and 40 (bad). After these six runs, the result
is ``Bounds(good=39, bad=40)``.
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
    """The parents of each variant. Variants are identified by position, from 0.

    The first variant is known to be good, and the last variant is known to be bad. ``backwards`` is True if the bad variant is
    an ancestor of the good variant. The search then finds the oldest good variant, which fixed the test.

    Example:
        ``Graph(((), (0,), (0,), (1, 2)))`` has two branches, 1 and 2, which both come from 0 and are merged by 3.
    """

    parents: Sequence[Sequence[int]]
    backwards: bool = False

    @classmethod
    def line(cls, count: int) -> Graph:
        """Return a graph without branches: each of ``count`` variants has the previous variant as its parent."""
        return cls([(), *((position,) for position in range(count - 1))])

    @cached_property
    def ancestors(self) -> list[int]:
        """For each variant, a bit set with the positions of this variant and its ancestors.

        Example: ``Graph.line(4).ancestors`` is ``[0b0001, 0b0011, 0b0111, 0b1111]``.
        """
        bits: dict[int, int] = {}
        for start in range(len(self.parents)):
            path = [start]
            while path:
                open_parents = [parent for parent in self.parents[path[-1]] if parent not in bits]
                if open_parents:
                    path.append(open_parents[0])
                    continue
                position = path.pop()
                bits[position] = 1 << position
                for parent in self.parents[position]:
                    bits[position] |= bits[parent]
        return [bits[position] for position in range(len(self.parents))]


@dataclass(frozen=True, slots=True)
class Bounds:
    """The result of a search: the last good variant, the first bad variant, and the skipped variants between them.

    Either ``bad`` or a variant in ``between`` made the change. In a backwards search, ``good`` is the oldest good variant, and
    ``bad`` is the latest bad variant.

    Example: variant 3 is good, variant 4 cannot be run, and variant 5 is bad: ``Bounds(good=3, bad=5, between=(4,))``.
    """

    good: int
    bad: int
    between: tuple[int, ...] = ()


@dataclass(frozen=True, slots=True)
class _Remaining:
    """The variants that may have made the change.

    ``suspects`` is a bit set with their positions. ``changed`` is the earliest suspect known to contain the change. ``parent``
    is the first variant outside the suspects on the path from ``changed`` through first parents, or ``None`` if the path ends.
    """

    changed: int
    suspects: int
    parent: int | None


def bounds(graph: Graph, answers: Mapping[int, Answer]) -> Bounds:
    """Return the last good variant, the first bad variant, and the skipped variants between them.

    ``answers`` has the judged positions, including the first and the last.
    """
    in_time = _in_time(graph, answers)
    remaining = _remaining(graph, in_time)
    between = tuple(position for position in _positions(remaining.suspects) if position != remaining.changed)
    good_ancestors = [
        position
        for position, answer in in_time.items()
        if answer == "good" and _contains(graph.ancestors[remaining.changed], position)
    ]
    nearest = max(
        good_ancestors,
        key=lambda position: (graph.ancestors[position].bit_count(), position),
        default=_start(graph),
    )
    parent = remaining.parent
    unchanged = parent if parent is not None and in_time.get(parent) == "good" else nearest
    return (
        Bounds(remaining.changed, unchanged, between)
        if graph.backwards
        else Bounds(unchanged, remaining.changed, between)
    )


def next_positions(graph: Graph, answers: Mapping[int, Answer], jobs: int = 1) -> tuple[int, ...]:
    """Return at most ``jobs`` positions to judge next, or an empty tuple if the search is done.

    The positions divide the suspects (variants that may have made the change) evenly. Instead of a skipped variant, the nearest
    variant without an answer is judged. When all suspects are judged, the parent of the first bad variant may still lack a run,
    because a good descendant already shows that the parent is good. Then the parent is judged too, because a report compares
    the first bad variant with its parent.

    Example: among 9 variants, 0 is good and 8 is bad. The next position is ``(4,)``, or with three jobs ``(2, 4, 6)``.
    """
    in_time = _in_time(graph, answers)
    remaining = _remaining(graph, in_time)
    weights = {
        position: (graph.ancestors[position] & remaining.suspects).bit_count()
        for position in _positions(remaining.suspects)
        if position not in in_time
    }
    chosen: list[int] = []
    for part in range(1, jobs + 1):
        middle = remaining.suspects.bit_count() * part / (jobs + 1)
        distances = {
            position: (abs(weight - middle), position) for position, weight in weights.items() if position not in chosen
        }
        if distances:
            chosen.append(min(distances, key=distances.__getitem__))
    if not chosen and remaining.parent is not None and remaining.parent not in in_time:
        return (remaining.parent,)
    return tuple(sorted(chosen))


def _in_time(graph: Graph, answers: Mapping[int, Answer]) -> dict[int, Answer]:
    """Return answers in historical order, so "good" means without the change. A backwards search swaps "good" and "bad"."""
    return {position: _OPPOSITE[answer] if graph.backwards else answer for position, answer in answers.items()}


def _start(graph: Graph) -> int:
    """Return the first or last position, whichever is without the change."""
    return len(graph.parents) - 1 if graph.backwards else 0


def _remaining(graph: Graph, in_time: Mapping[int, Answer]) -> _Remaining:
    ancestors = graph.ancestors
    changed = min(
        (position for position, answer in in_time.items() if answer == "bad"),
        key=lambda position: (ancestors[position].bit_count(), position),
    )
    suspects = ancestors[changed]
    for position, answer in in_time.items():
        # If a good variant descends from ``changed``, a later commit compensates for the change. So the ancestors of this good
        # variant stay suspects.
        if answer == "good" and not _contains(ancestors[position], changed):
            suspects &= ~ancestors[position]
    parent: int | None = changed
    while parent is not None and _contains(suspects, parent):
        parent = next(iter(graph.parents[parent]), None)
    return _Remaining(changed, suspects, parent)


def _contains(bits: int, position: int) -> bool:
    return bool(bits >> position & 1)


def _positions(bits: int) -> Iterator[int]:
    """Yield the positions whose bits are set."""
    while bits:
        lowest = bits & -bits
        yield lowest.bit_length() - 1
        bits ^= lowest
