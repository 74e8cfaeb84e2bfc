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
    """A memory block from its allocation to its free.

    A moment is an index into the recording's tokens: allocations, frees, and the beginnings and ends of spans. -1 means before
    the recording. The module `lifetimes` has an example.
    """

    address: int
    nbytes: int
    allocated: int
    freed: int | None = None
    """The moment of the free; ``None`` if the block was still live at the end of the recording."""
    own: bool = True
    """True if the step allocated the block, or if the block belonged to the step before the recording, for example a weight."""
    phase: str = ""
    """The phase that allocated the block. In code without marked phases: ``forward``, ``backward`` or ``optimizer``."""
    operator: str = ""
    node: str = ""
    """The autograd node that allocated the block; empty if Python code allocated the block."""
    in_optimizer: bool = False
    recomputed: bool = False
    """True if forward code allocated the block while backward ran this code again, for example in a checkpointed layer."""
    mark: Mark | None = None
    """The innermost module or call mark around the allocation. For a block from an autograd node, the mark around the forward
    operator that created this node. ``None`` if there is no mark."""
    call_ended: int | None = None
    """The moment when the innermost torch function, node or operator around the allocation ended."""
    module_ended: int | None = None
    """The moment when the innermost module call around the allocation ended; ``None`` outside of modules."""
    tensor: str = ""
    label: Label | None = None
    is_kept: bool | None = None
    """For a block that outlives the step: True if all following steps keep the block, False if a following step frees it.

    ``None`` if no following step was recorded.
    """
    matched: Lifetime | None = None
    """Only for a leftover, which is a block left behind by an earlier step: the recorded step's block with the same size, made
    in the same way. This block shows the line that made the leftover."""

    @property
    def is_older(self) -> bool:
        """True if the block existed before the recording."""
        return self.allocated < 0


@dataclass(frozen=True, slots=True)
class Timeline:
    """Live bytes and block lifetimes in a recording.

    Live bytes are the change since the beginning of the recording. A moment is an index into the recording's tokens. The module
    `lifetimes` has an example.
    """

    live: tuple[int, ...]
    """The live bytes after each token."""
    peak: int
    """The moment of the peak; -1 if live bytes were never higher than at the beginning."""
    peak_bytes: int
    lifetimes: tuple[Lifetime, ...]
    recomputed: Mapping[str, int]
    nodes: tuple[int, ...] = ()
    """The moments at which autograd nodes began to run."""
    step_ended: int | None = None
    garbage: tuple[int, int] | None = None
    """The first and last moment of the garbage collection after the step."""
    workspaces: tuple[int, int] | None = None
    """The first and last moment at which the backend (cuBLAS) frees its workspaces after the step."""
    no_grad: ModuleCalls = field(default_factory=dict)
    """The number of calls with grad mode off, for each module and function (`GraphCalls`)."""
    no_backward: ModuleCalls = field(default_factory=dict)
    """The number of each module's forward calls whose autograd nodes did not run in backward (`GraphCalls`)."""
    callers: Mapping[str, tuple[Caller, ...]] = field(default_factory=dict)
    """The callers of modules and functions that ran with grad mode on, by folded path, for example ``blocks.*.attention``."""
    function_at: Mapping[str, str] = field(default_factory=dict)
    """The function that contains each line, for lines that ran with grad mode on."""
    layers: Mapping[str, frozenset[Numbers]] = field(default_factory=dict)
    """The layer numbers in each module's paths, by folded path: ``{"blocks.*": {(0,), (1,)}}`` for two blocks."""
    phases: Mapping[str, int] = field(default_factory=dict)
    """The moment of each phase's peak, for phases that allocated memory."""
    following: tuple[Timeline, ...] = ()
    """The steps recorded right after this step. A following step's timeline counts all blocks from before that step as older
    blocks, even blocks made by the recorded step."""

    def at(self, moment: int) -> list[Lifetime]:
        """Return the blocks live right after the token at ``moment``."""
        return [
            block
            for block in self.lifetimes
            if block.allocated <= moment and (block.freed is None or block.freed > moment)
        ]
