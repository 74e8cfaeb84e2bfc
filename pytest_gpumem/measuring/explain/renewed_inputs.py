"""Find inputs that a step frees and creates again, such as ``self.last_output``. All functions are pure."""

from __future__ import annotations

from collections import defaultdict
from dataclasses import replace
from typing import TYPE_CHECKING, NamedTuple

from pytest_gpumem.measuring.explain.survivors import outlives_step, place_of

if TYPE_CHECKING:
    from collections.abc import Sequence

    from pytest_gpumem.measuring.explain.blocks import Lifetime, Timeline


class Renewal(NamedTuple):
    """An input freed by a step, and the block created to replace the input."""

    freed: Lifetime
    created: Lifetime
    latest: Lifetime | None
    """The block that replaces the input in the last of the following steps, because each of them replaces the input again.
    Without following steps, this is ``created``. ``None`` if unknown."""


def renewals(timeline: Timeline) -> list[Renewal]:
    """Return the inputs freed by a step, each with the block created to replace the input.

    Example:
        A step sets ``self.last_output``. At the beginning, the attribute contains the previous step's output, which counts as
        an input. At the end, the attribute contains another tensor with the same size.

    Args:
        timeline: The recorded step and the following steps. A block that all following steps keep is not a renewed input.

    Returns:
        The renewals. Freed inputs and new blocks are paired by size. A size is left out if the two numbers differ, or if
        several lines create the new blocks, because the pairs would be guesses.
    """
    freed: dict[int, list[Lifetime]] = defaultdict(list)
    left: dict[int, list[Lifetime]] = defaultdict(list)
    for block in timeline.lifetimes:
        if block.label is not None and block.label.category == "input" and block.is_older:
            if block.freed is not None:
                freed[block.nbytes].append(block)
        elif block.label is None and not block.is_older and block.freed is None and block.is_kept is not True:
            left[block.nbytes].append(block)
    return [
        Renewal(*pair)
        for nbytes, inputs in freed.items()
        if len(inputs) == len(left[nbytes]) and len({place_of(block) for block in left[nbytes]}) == 1
        for pair in zip(inputs, left[nbytes], _latest(left[nbytes], timeline), strict=True)
    ]


def _latest(recorded_blocks: Sequence[Lifetime], timeline: Timeline) -> Sequence[Lifetime | None]:
    """Return each recorded block's counterpart in the last of the following steps.

    The recorded blocks all have the same size, module and line, and so do their counterparts. Without following steps, return
    the recorded blocks. If the last following step has more or fewer such blocks than the recorded step, all entries are
    ``None``.
    """
    if not timeline.following:
        return recorded_blocks
    last = timeline.following[-1]
    latest = [
        block
        for block in last.lifetimes
        if outlives_step(block, last)
        and block.nbytes == recorded_blocks[0].nbytes
        and place_of(block) == place_of(recorded_blocks[0])
    ]
    return latest if len(latest) == len(recorded_blocks) else [None] * len(recorded_blocks)


def with_makers_of_inputs(timeline: Timeline) -> Timeline:
    """Return the timeline, with the creating line and operator for each renewed input."""
    makers = {id(renewal.freed): renewal.created for renewal in renewals(timeline)}
    lifetimes = (
        replace(block, mark=maker.mark, operator=maker.operator, node=maker.node) if maker is not None else block
        for block, maker in ((block, makers.get(id(block))) for block in timeline.lifetimes)
    )
    return replace(timeline, lifetimes=tuple(lifetimes))
