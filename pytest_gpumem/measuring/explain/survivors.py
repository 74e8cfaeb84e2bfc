"""Find the survivors of a recorded step: blocks allocated by the step and not freed by a following step.

All functions are pure.
"""

from __future__ import annotations

from collections import Counter
from dataclasses import dataclass, replace
from itertools import pairwise
from typing import TYPE_CHECKING, NamedTuple

if TYPE_CHECKING:
    from collections.abc import Iterable, Iterator, Mapping, Sequence

    from pytest_gpumem.measuring.explain.blocks import Lifetime, Timeline

Place = tuple[str, ...]
"""The module, the lines and the operator of an allocation."""


class AmbiguousBlocks(NamedTuple):
    """Blocks with the same size. The step keeps ``number`` of these blocks. The other blocks replace older blocks.

    Example:
        A step appends a tensor to a list, and replaces the oldest of 100 tensors with the same size. So ``blocks`` contains two
        blocks, and ``number`` is 1.
    """

    blocks: tuple[Lifetime, ...]
    number: int


class Replacement(NamedTuple):
    """A block that replaces a smaller block, for example a longer cache from ``torch.cat``."""

    block: Lifetime
    nbytes: int
    """The difference between the two sizes, or the average difference if each step replaces the block."""
    latest: tuple[Lifetime, ...]
    """The live blocks from the same line and operator at the end of the recording."""


@dataclass(frozen=True, slots=True)
class Survivors:
    """The blocks kept by a step after its end.

    Example:
        A step appends its output to a list, and replaces a target with the same size. The following steps free the target,
        so ``blocks`` contains the output only.
    """

    blocks: tuple[Lifetime, ...] = ()
    """The blocks certainly kept by the step."""
    ambiguous: tuple[AmbiguousBlocks, ...] = ()
    replacements: tuple[Replacement, ...] = ()
    step: int = 0
    """0 if these are the recorded step's blocks, 1 for the first following step, and so on."""

    @property
    def nbytes(self) -> int:
        """The bytes kept by the step."""
        ambiguous = sum(_bytes_of(pool.blocks[: pool.number]) for pool in self.ambiguous)
        return _bytes_of(self.blocks) + ambiguous + self.difference

    @property
    def difference(self) -> int:
        """The bytes by which replacements are larger than the replaced blocks."""
        return sum(replacement.nbytes for replacement in self.replacements)


def survivors_of(timeline: Timeline, growth: int = 0) -> Survivors:
    """Return the blocks kept by a step.

    A step keeps a block if the following steps do not free the block. Some blocks survive all recorded steps although a later
    step would free these blocks, for example an entry in a list of the latest ten. So the older blocks freed by the step are
    subtracted: first blocks with the same owner, then blocks with the same size.

    Args:
        timeline: The recorded step and the following steps.
        growth: The measured bytes kept by each step; 0 for a step that runs once. If this is more than 0, a following step is
            used if the recorded step keeps nothing, or if its survivors are ambiguous.
    """
    steps = (timeline, *timeline.following)
    numbers = range(max(1, len(steps) - 1)) if growth else (0,)
    by_step = [_survivors_of_step(replace(steps[n], following=steps[n + 1 :]), growth, n) for n in numbers]
    keeping = [survivors for survivors in by_step if survivors.nbytes] or [Survivors()]
    # If every fifth step replaces a target network, only this step is ambiguous, and the other steps are certain.
    certain = (survivors for survivors in keeping if not survivors.ambiguous and survivors.nbytes >= growth)
    return next(certain, keeping[0])


def _survivors_of_step(timeline: Timeline, growth: int, number: int) -> Survivors:
    remaining = [block for block in timeline.lifetimes if outlives_step(block, timeline)]
    replaced = _ReplacedBlocks(timeline, [block for block in remaining if block.is_kept is False])
    blocks: list[Lifetime] = []
    ambiguous = []
    for pool, replacing in replaced.pools([block for block in remaining if block.is_kept is not False]):
        if replacing <= 0:
            blocks += pool
        elif len({place_of(block) for block in pool}) == 1:
            blocks += pool[replacing:]
        elif replacing < len(pool):
            ambiguous.append(AmbiguousBlocks(tuple(pool), len(pool) - replacing))
    if timeline.following and not ambiguous and len({place_of(block) for block in blocks}) == 1:
        larger = replaced.replacement(blocks)
        if larger is not None:
            return Survivors(replacements=(larger,), step=number)
    survivors = Survivors(tuple(blocks), tuple(ambiguous), step=number)
    if survivors.nbytes >= growth:
        return survivors
    return replace(survivors, replacements=tuple(_replacements(timeline)))


def outlives_step(block: Lifetime, timeline: Timeline) -> bool:
    """Return whether the step allocated the block and the block survives garbage collection."""
    return not block.is_older and block.freed is None and not is_workspace(block, timeline)


def is_workspace(block: Lifetime, timeline: Timeline) -> bool:
    """Return whether the block was freed when the backend released its workspaces after the step."""
    if timeline.workspaces is None or block.freed is None:
        return False
    begin, end = timeline.workspaces
    return begin <= block.freed <= end


def place_of(block: Lifetime) -> Place:
    """Return the module, the lines and the operator of a block's allocation."""
    mark = block.mark
    lines = ("", "", "") if mark is None else (mark.path, mark.site, mark.library)
    return (*lines, block.node or block.operator)


class _ReplacedBlocks:
    """Older blocks freed by the step, which the step's survivors may replace.

    ``passing`` are blocks made by the step and freed by a following step. They replace older blocks too, so fewer older blocks
    remain for the survivors.
    """

    def __init__(self, timeline: Timeline, passing: Sequence[Lifetime]) -> None:
        older = [
            block
            for block in timeline.lifetimes
            # If code runs once, no steps follow. Then blocks from the measured run are older too, but not the step's own, and
            # do not count.
            if block.is_older
            and block.freed is not None
            and (block.own or timeline.following)
            and not is_workspace(block, timeline)
        ]
        self._sizes = Counter(block.nbytes for block in older)
        self._owners = Counter(_owner_and_size(block) for block in older if block.label is not None)
        self._sizes.subtract(block.nbytes for block in passing)
        self._owners.subtract(_owner_and_size(block) for block in passing if block.label is not None)

    def pools(self, blocks: Iterable[Lifetime]) -> Iterator[tuple[list[Lifetime], int]]:
        """Group the blocks by size. Yield each group, and how many older blocks with this size the step freed.

        A block is left out if it replaces an older block with the same owner, for example a new gradient.
        """
        by_size: dict[int, list[Lifetime]] = {}
        for block in blocks:
            owner = _owner_and_size(block)
            if block.label is not None and self._owners[owner] > 0 and self._sizes[block.nbytes] > 0:
                self._owners[owner] -= 1
                self._sizes[block.nbytes] -= 1
            else:
                by_size.setdefault(block.nbytes, []).append(block)
        for nbytes, pool in by_size.items():
            replacing = self._sizes[nbytes]
            self._sizes[nbytes] -= max(0, min(replacing, len(pool)))
            yield pool, replacing

    def replacement(self, blocks: Sequence[Lifetime]) -> Replacement | None:
        """Return ``blocks`` as the replacement for smaller blocks. Call this after all pools from `pools` were used.

        Example:
            A buffer with 400 bytes doubles: the step allocates 800 bytes and frees 400 bytes. The difference is 400 bytes.

        Returns:
            ``None`` if the step freed no other block or did not allocate more than it freed, or if another block may have
            replaced the freed block.
        """
        if min(self._sizes.values(), default=0) < 0:
            return None
        freed = sum(nbytes * number for nbytes, number in self._sizes.items())
        difference = _bytes_of(blocks) - freed
        largest = max(blocks, key=lambda block: block.nbytes)
        return Replacement(largest, difference, tuple(blocks)) if freed and difference > 0 else None


def _owner_and_size(block: Lifetime) -> tuple[int, str, str]:
    label = block.label
    return (block.nbytes, "", "") if label is None else (block.nbytes, label.category, label.module)


def _replacements(timeline: Timeline) -> Iterator[Replacement]:
    """Yield a replacement for each place (line and operator) at which every step replaces blocks with larger blocks.

    The sizes must rise in every step, because sizes that depend on random batches sometimes fall. The last step does not
    count, because no further step shows which blocks are freed.
    """
    steps = [timeline, *timeline.following]
    passing = [_by_place(block for block in step.lifetimes if _passes(block, step)) for step in steps[:-1]]
    latest = _by_place(block for block in steps[-1].lifetimes if outlives_step(block, steps[-1]))
    for place, first in passing[0].items() if passing else ():
        sizes = [_bytes_of(blocks.get(place, ())) for blocks in passing]
        if len(sizes) > 1 and all(size < larger for size, larger in pairwise(sizes)):
            largest = max(first, key=lambda block: block.nbytes)
            yield Replacement(largest, (sizes[-1] - sizes[0]) // (len(sizes) - 1), tuple(latest.get(place, ())))


def _passes(block: Lifetime, timeline: Timeline) -> bool:
    return outlives_step(block, timeline) and block.is_kept is False


def _by_place(blocks: Iterable[Lifetime]) -> Mapping[Place, list[Lifetime]]:
    by_place: dict[Place, list[Lifetime]] = {}
    for block in blocks:
        by_place.setdefault(place_of(block), []).append(block)
    return by_place


def _bytes_of(blocks: Iterable[Lifetime]) -> int:
    return sum(block.nbytes for block in blocks)
