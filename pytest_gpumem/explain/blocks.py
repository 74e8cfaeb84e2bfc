"""Blocks of memory in a recorded step, from their allocation to their free: frozen values."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from collections.abc import Mapping

    from pytest_gpumem.explain.trace import Label, Mark
    from pytest_gpumem.values.layers import Numbers
    from pytest_gpumem.values.module_calls import ModuleCalls


@dataclass(frozen=True, slots=True)
class Lifetime:
    """A block from its allocation to its free. Moments are indices of tokens; -1 is before the recording."""

    address: int
    nbytes: int
    allocated: int
    freed: int | None = None
    """``None`` when it outlived the recording."""
    own: bool = True
    """True if it is the step's: allocated by it, or held when it began."""
    phase: str = ""
    """The step's phase; of code that has none, ``forward``, ``backward`` or ``optimizer``."""
    operator: str = ""
    node: str = ""
    """Node of the autograd graph that allocated it; empty where Python code of the step or of a module did."""
    in_optimizer: bool = False
    recomputed: bool = False
    """True if Python code allocated it during backward: recomputed code."""
    mark: Mark | None = None
    """The innermost mark around its allocation; in backward that around the operator that made the node."""
    call_ended: int | None = None
    """The end of the innermost call that allocated it: of a torch function, a node, or an operator."""
    module_ended: int | None = None
    """The end of the innermost module that allocated it; ``None`` outside of modules."""
    tensor: str = ""
    label: Label | None = None
    lasts: bool | None = None
    """For a block that outlives the step: True if all following steps keep it, False if a following step frees it.

    ``None`` if no following step was recorded.
    """
    matched: Lifetime | None = None
    """For a block that an earlier step left: the block of its size that this step leaves, which was made in the same way."""

    @property
    def is_older(self) -> bool:
        """True if it was there before the recording."""
        return self.allocated < 0


@dataclass(frozen=True, slots=True)
class Timeline:
    """Live bytes over a recording, less what was live when it began: after each token, and the highest of them.

    Moments are indices of tokens.
    """

    live: tuple[int, ...]
    peak: int
    """Moment of the peak; -1 when live bytes never exceeded those of the beginning."""
    peak_bytes: int
    lifetimes: tuple[Lifetime, ...]
    recomputed: Mapping[str, int]
    nodes: tuple[int, ...] = ()
    """The moments at which nodes of the autograd graph began to run."""
    step_ended: int | None = None
    garbage: tuple[int, int] | None = None
    """First and last moment of the collection of cycles, after the step."""
    workspaces: tuple[int, int] | None = None
    """First and last moment of the release of the backend's workspaces, after the step."""
    no_grad: ModuleCalls = field(default_factory=dict)
    no_backward: ModuleCalls = field(default_factory=dict)
    """Calls of modules with grad mode off, and without a part in backward: see `GraphCalls`."""
    layers: Mapping[str, frozenset[Numbers]] = field(default_factory=dict)
    """The layers that there are of each module, by its folded path."""
    phases: Mapping[str, int] = field(default_factory=dict)
    """Moment of the peak of each phase in which anything was allocated."""
    following: tuple[Timeline, ...] = ()
    """The steps recorded right after this step. Their older blocks are all live blocks, from any owner."""

    def at(self, moment: int) -> list[Lifetime]:
        """Return the blocks that are live right after a moment."""
        return [
            block
            for block in self.lifetimes
            if block.allocated <= moment and (block.freed is None or block.freed > moment)
        ]
