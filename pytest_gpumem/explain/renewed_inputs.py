"""Inputs that a step frees and makes anew, such as ``self.last_output``: which line makes them. Pure."""

from __future__ import annotations

from collections import defaultdict
from dataclasses import replace
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from collections.abc import Iterable

    from pytest_gpumem.explain.lifetimes import Lifetime, Timeline


def renewals(lifetimes: Iterable[Lifetime]) -> list[tuple[Lifetime, Lifetime]]:
    """Return the inputs that a step frees, each with the block that the step leaves in its place.

    Example:
        A step sets ``self.last_output``. At its beginning the attribute has the output of the step before, which is an
        input. At its end it has another tensor of this size.

    Args:
        lifetimes: The blocks of a recorded step.

    Returns:
        Pairs of blocks. The blocks of a size are left out if there are not as many new ones as old ones, or if several
        lines make them, because it would be a guess which line made which.
    """
    freed: dict[int, list[Lifetime]] = defaultdict(list)
    left: dict[int, list[Lifetime]] = defaultdict(list)
    for block in lifetimes:
        if block.label is not None and block.label.category == "input" and block.allocated < 0:
            if block.freed is not None:
                freed[block.nbytes].append(block)
        elif block.label is None and block.allocated >= 0 and block.freed is None:
            left[block.nbytes].append(block)
    return [
        pair
        for nbytes, inputs in freed.items()
        if len(inputs) == len(left[nbytes]) and len({_origin(block) for block in left[nbytes]}) == 1
        for pair in zip(inputs, left[nbytes], strict=True)
    ]


def with_makers_of_inputs(timeline: Timeline) -> Timeline:
    """Return a timeline that has the line and the operator of each input that the step makes anew."""
    makers = {id(old): maker for old, maker in renewals(timeline.lifetimes)}
    lifetimes = (
        replace(block, mark=maker.mark, operator=maker.operator, node=maker.node) if maker is not None else block
        for block, maker in ((block, makers.get(id(block))) for block in timeline.lifetimes)
    )
    return replace(timeline, lifetimes=tuple(lifetimes))


def _origin(block: Lifetime) -> tuple[str, str, str, str]:
    mark = block.mark
    return (block.node or block.operator, *((mark.path, mark.site, mark.library) if mark is not None else ("", "", "")))
