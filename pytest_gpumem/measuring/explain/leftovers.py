"""Match leftovers, which are older blocks from earlier steps, with the recorded step's blocks. All functions are pure."""

from __future__ import annotations

from collections import Counter
from dataclasses import replace
from itertools import cycle
from typing import TYPE_CHECKING

from pytest_gpumem.measuring.explain.survivors import survivors_of

if TYPE_CHECKING:
    from collections.abc import Iterable, Iterator, Sequence

    from pytest_gpumem.measuring.explain.blocks import Lifetime, Timeline


_MOST_PLACES = 4
"""If there are more than 4 blocks without an owner for each input of the same size, the inputs are not leftovers, and only the
blocks without an owner are (`_Matches.is_leftover`)."""


def with_leftovers(timeline: Timeline, own_bytes: int) -> tuple[Lifetime, ...]:
    """Return a timeline's blocks. Each leftover is matched with a block made by the recorded step in the same way.

    ``own_bytes`` are the step's own bytes when it was measured. Leftovers count as the step's own until the step's older blocks
    together reach ``own_bytes``. Any further leftovers come from steps between the measurement and the recording, and do not
    count.

    Example:
        Each step appends 40 bytes to a list. The recorded step finds 3 older blocks with 40 bytes, and ``own_bytes`` are 80.
        So 2 of the 3 blocks are the step's own, and their row shows the line that appends. The third block was appended after
        the measurement.
    """
    matches = _Matches(timeline)
    lifetimes = timeline.lifetimes
    room = own_bytes - sum(
        block.nbytes for block in lifetimes if block.is_older and block.own and not matches.is_leftover(block)
    )
    blocks = [block for block in lifetimes if not matches.is_leftover(block)]
    for block in _in_turn(filter(matches.is_leftover, lifetimes), matches):
        # A block that this step frees is not a leak from a step after the measurement. So it counts even beyond ``own_bytes``.
        if block.nbytes <= room or (block.own and block.freed is not None):
            room -= block.nbytes
            blocks.append(replace(block, own=True, matched=matches.next_for(block)))
        else:
            blocks.append(replace(block, own=False))
    if timeline.following:
        blocks = _without_later_leaks(blocks, own_bytes)
    return tuple(sorted(blocks, key=lambda block: (block.allocated, block.address)))


class _Matches:
    """Finds a block of equal size in the recorded step for a leftover from an earlier step.

    If no recorded step frees a leftover, it matches a block kept by all following steps. Otherwise it matches a block
    that a following step frees.
    """

    def __init__(self, timeline: Timeline) -> None:
        remaining = [block for block in timeline.lifetimes if not block.is_older and block.freed is None]
        later = [
            block
            for step in timeline.following
            for block in step.lifetimes
            if not block.is_older and block.freed is None and block.is_kept
        ]
        # Following steps may keep blocks with other sizes, for example batches with other lengths.
        self._lasting = {**_by_size(later), **_by_size(block for block in remaining if block.is_kept)}
        for pool in survivors_of(timeline).ambiguous if timeline.following else ():
            # It is unknown which blocks of this size are kept, so an older kept block cannot be matched with any of these.
            self._lasting.pop(pool.blocks[0].nbytes, None)
        self._passing = _by_size(block for block in remaining if not block.is_kept and block.label is None)
        self._turns: dict[int, Iterator[Lifetime]] = {}
        older = [block for block in timeline.lifetimes if block.is_older and block.is_kept]
        self._inputs = Counter(block.nbytes for block in older if _is_lasting_input(block))
        self._without_owner = Counter(block.nbytes for block in older if block.label is None)

    def is_leftover(self, block: Lifetime) -> bool:
        """Return whether an earlier step may have left a block behind.

        An input may be a leftover, because all tensors in reach of the step's function count as inputs. But if few inputs and
        many blocks without an owner have the same size, the inputs are not leftovers, because a leak consists of many blocks.
        For example, a batch is an input, and a module keeps 30 leaked tensors with the batch's size. In contrast, if a step
        leaks tensors into a closure and into a module, there are many inputs and many blocks without an owner.
        """
        has_owner = block.label is not None and not (_is_lasting_input(block) and self._many_inputs(block.nbytes))
        return block.is_older and not has_owner and bool(self._matching(block))

    def _many_inputs(self, nbytes: int) -> bool:
        inputs, unowned = self._inputs[nbytes], self._without_owner[nbytes]
        return inputs > unowned or (inputs > 1 and inputs * _MOST_PLACES >= unowned)

    def each_step(self, nbytes: int, freed: int) -> int:
        """Return how many blocks of a size each step keeps. The recorded step frees ``freed`` older blocks of this size."""
        if nbytes in self._lasting:
            return len(self._lasting[nbytes])
        return max(1, len(self._passing[nbytes]) - freed)

    def next_for(self, block: Lifetime) -> Lifetime:
        """Return the recorded step's block for a leftover. If several blocks have the leftover's size, use each in turn."""
        blocks = self._matching(block)
        return next(self._turns.setdefault(id(blocks), cycle(blocks)))

    def _matching(self, block: Lifetime) -> Sequence[Lifetime]:
        lasting = self._lasting.get(block.nbytes, ())
        return lasting if block.is_kept else self._passing.get(block.nbytes, lasting)


def _is_lasting_input(block: Lifetime) -> bool:
    return block.label is not None and block.label.category == "input" and bool(block.is_kept)


def _by_size(blocks: Iterable[Lifetime]) -> dict[int, list[Lifetime]]:
    by_size: dict[int, list[Lifetime]] = {}
    for block in blocks:
        by_size.setdefault(block.nbytes, []).append(block)
    return by_size


def _without_later_leaks(blocks: list[Lifetime], own_bytes: int) -> list[Lifetime]:
    """Return the blocks, with at most ``own_bytes`` of older blocks as the step's own.

    Older blocks beyond these bytes come from steps after the peak's measurement. Blocks with the most frequent size are
    excluded first, because a leak consists of many blocks with the same size.
    """
    excess = sum(block.nbytes for block in blocks if block.is_older and block.own) - own_bytes
    may_be_later = [
        block
        for block in blocks
        if block.is_older and block.own and block.is_kept and (block.label is None or block.label.category == "input")
    ]
    number = Counter(block.nbytes for block in may_be_later)
    dropped: set[int] = set()
    for block in sorted(may_be_later, key=lambda block: (-number[block.nbytes], block.nbytes, -block.address)):
        if excess <= 0:
            break
        excess -= block.nbytes
        dropped.add(block.address)
    return [replace(block, own=False) if block.is_older and block.address in dropped else block for block in blocks]


def _in_turn(leftovers: Iterable[Lifetime], matches: _Matches) -> list[Lifetime]:
    """Return leftovers in the order in which they become the step's own. The order does not depend on addresses.

    Leftovers freed by the step come first, because these are no leaks from steps after the measurement. The other leftovers
    follow in groups, and each group has as many blocks of each size as a step keeps. Among blocks with the same size, blocks
    already counted as the step's own come first.
    """
    ordered = sorted(leftovers, key=lambda block: (block.freed is None, not block.own))
    freed = Counter(block.nbytes for block in ordered if block.freed is not None)
    seen: Counter[int] = Counter()
    turns = []
    for block in ordered:
        if block.freed is not None:
            turns.append(-1)
            continue
        turns.append(seen[block.nbytes] // matches.each_step(block.nbytes, freed[block.nbytes]))
        seen[block.nbytes] += 1
    return [block for _, block in sorted(zip(turns, ordered, strict=True), key=lambda pair: pair[0])]
