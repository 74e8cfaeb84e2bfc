"""Memory blocks in a recorded step, from allocation to free, as frozen values."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from collections.abc import Mapping

    from pytest_gpumem.facts.values.layers import Numbers
    from pytest_gpumem.facts.values.module_calls import Caller, ModuleCalls
    from pytest_gpumem.measuring.explain.trace import Label, Mark


@dataclass(frozen=True, slots=True)
class Lifetime:
    """A block from its allocation to its free. Moments are token indices, and -1 is before the recording.

    `lifetimes` has an example.
    """

    address: int
    nbytes: int
    allocated: int
    freed: int | None = None
    """``None`` if the block outlived the recording."""
    own: bool = True
    """True if the step allocated the block, or held it at the step's beginning."""
    phase: str = ""
    """The step's phase. For code without phases: ``forward``, ``backward`` or ``optimizer``."""
    operator: str = ""
    node: str = ""
    """The autograd node that allocated the block; empty if Python code allocated the block."""
    in_optimizer: bool = False
    recomputed: bool = False
    """True if Python code allocated the block during backward, so the code was recomputed."""
    mark: Mark | None = None
    """The innermost mark around the allocation. In backward, the mark around the operator that created the node. ``None`` if
    there is no mark."""
    call_ended: int | None = None
    """The moment when the innermost torch function, node or operator around the allocation ended."""
    module_ended: int | None = None
    """The moment when the innermost module call around the allocation ended; ``None`` outside of modules."""
    tensor: str = ""
    label: Label | None = None
    is_kept: bool | None = None
    """For a block that outlives the step: True if all following steps keep it, False if a following step frees it.

    ``None`` if no following step was recorded.
    """
    matched: Lifetime | None = None
    """For a leftover from an earlier step: the block with equal size that this step made in the same way, and left."""

    @property
    def is_older(self) -> bool:
        """True if the block existed before the recording."""
        return self.allocated < 0


@dataclass(frozen=True, slots=True)
class Timeline:
    """Live bytes and block lifetimes in a recording. Live bytes count from the beginning, and moments are token indices.

    `lifetimes` has an example.
    """

    live: tuple[int, ...]
    """The live bytes after each token."""
    peak: int
    """The moment of the peak; -1 if live bytes never rose above the beginning."""
    peak_bytes: int
    lifetimes: tuple[Lifetime, ...]
    recomputed: Mapping[str, int]
    nodes: tuple[int, ...] = ()
    """The moments at which autograd nodes began to run."""
    step_ended: int | None = None
    garbage: tuple[int, int] | None = None
    """The first and last moment of the cycle collection after the step."""
    workspaces: tuple[int, int] | None = None
    """The first and last moment of the backend's workspace release after the step."""
    no_grad: ModuleCalls = field(default_factory=dict)
    """The number of calls with grad mode off, for each module and function (`GraphCalls`)."""
    no_backward: ModuleCalls = field(default_factory=dict)
    """The number of forward calls for which no node ran in backward, for each module (`GraphCalls`)."""
    callers: Mapping[str, tuple[Caller, ...]] = field(default_factory=dict)
    """The callers of modules and functions with grad mode on, by folded path."""
    function_at: Mapping[str, str] = field(default_factory=dict)
    """The function that contains each line, for lines that ran with grad mode on."""
    layers: Mapping[str, frozenset[Numbers]] = field(default_factory=dict)
    """Each module's layer numbers, by folded path."""
    phases: Mapping[str, int] = field(default_factory=dict)
    """The moment of each phase's peak, for phases that allocated memory."""
    following: tuple[Timeline, ...] = ()
    """The steps recorded right after this step. Their older blocks are all blocks live at their beginning, with any owner."""

    def at(self, moment: int) -> list[Lifetime]:
        """Return the blocks live right after a moment."""
        return [
            block
            for block in self.lifetimes
            if block.allocated <= moment and (block.freed is None or block.freed > moment)
        ]
