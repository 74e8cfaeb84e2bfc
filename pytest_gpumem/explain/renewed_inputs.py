"""Inputs that a step frees and makes anew, such as ``self.last_output``: which line makes them. Pure."""

from __future__ import annotations

from collections import defaultdict
from dataclasses import replace
from typing import TYPE_CHECKING, NamedTuple

from pytest_gpumem.explain.survivors import outlives_step, place_of

if TYPE_CHECKING:
    from collections.abc import Sequence

    from pytest_gpumem.explain.blocks import Lifetime, Timeline


class Renewal(NamedTuple):
    """An input that a step frees, and the block that the step leaves in its place."""

    freed: Lifetime
    made: Lifetime
    latest: Lifetime | None
    """The block in its place at the end of the recording, as the following steps make it anew, too; ``None`` if not known."""


def renewals(timeline: Timeline) -> list[Renewal]:
    """Return the inputs that a step frees, each with the block that the step leaves in its place.

    Example:
        A step sets ``self.last_output``. At its beginning the attribute has the output of the step before, which is an
        input. At its end it has another tensor of this size.

    Args:
        timeline: The recorded step and the following steps. A block that these keep is no renewed input.

    Returns:
        The blocks of a size are left out if there are not as many new ones as old ones, or if several lines make them,
        because it would be a guess which line made which.
    """
    freed: dict[int, list[Lifetime]] = defaultdict(list)
    left: dict[int, list[Lifetime]] = defaultdict(list)
    for block in timeline.lifetimes:
        if block.label is not None and block.label.category == "input" and block.is_older:
            if block.freed is not None:
                freed[block.nbytes].append(block)
        elif block.label is None and not block.is_older and block.freed is None and block.lasts is not True:
            left[block.nbytes].append(block)
    return [
        Renewal(*pair)
        for nbytes, inputs in freed.items()
        if len(inputs) == len(left[nbytes]) and len({place_of(block) for block in left[nbytes]}) == 1
        for pair in zip(inputs, left[nbytes], _latest(left[nbytes], timeline), strict=True)
    ]


def _latest(made: Sequence[Lifetime], timeline: Timeline) -> Sequence[Lifetime | None]:
    """Return the blocks that the last following step makes in the place of the blocks ``made`` by the recorded step."""
    if not timeline.following:
        return made
    last = timeline.following[-1]
    latest = [
        block
        for block in last.lifetimes
        if outlives_step(block, last) and block.nbytes == made[0].nbytes and place_of(block) == place_of(made[0])
    ]
    return latest if len(latest) == len(made) else [None] * len(made)


def with_makers_of_inputs(timeline: Timeline) -> Timeline:
    """Return a timeline that has the line and the operator of each input that the step makes anew."""
    makers = {id(renewal.freed): renewal.made for renewal in renewals(timeline)}
    lifetimes = (
        replace(block, mark=maker.mark, operator=maker.operator, node=maker.node) if maker is not None else block
        for block, maker in ((block, makers.get(id(block))) for block in timeline.lifetimes)
    )
    return replace(timeline, lifetimes=tuple(lifetimes))
