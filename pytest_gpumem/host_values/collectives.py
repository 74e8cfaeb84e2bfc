"""Collectives of emulated ranks: a rank receives what it sends itself.

NCCL's stand-in computes sums, broadcasts and what all ranks gather. What goes from one rank to one other is not sent.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from pytest_gpumem.host_values.host_operators import is_small, on_the_same_memory

if TYPE_CHECKING:
    import torch

SENDS_ONLY = frozenset({"send", "barrier", "monitored_barrier_"})
"""Operators of c10d whose first argument is not what they write to."""
_EXCHANGES = frozenset({"alltoall_", "alltoall_base_", "all_to_all_single"})
_SENT_ONE_BY_ONE = frozenset({"gather_", "scatter_", "recv_", "recv_any_source_", *_EXCHANGES})


def complete(name: str, received: list[torch.Tensor], sent: list[torch.Tensor]) -> bool:
    """Write what other ranks send to this one where it follows from what this one sends, and return whether it does.

    Args:
        name: The operator of `torch.distributed`.
        received: Small known tensors or others that it writes to.
        sent: What it reads, all known.
    """
    if name not in _SENT_ONE_BY_ONE:
        return True
    if name == "scatter_":
        return bool(sent)  # this rank scatters, and has kept its own part
    sources = sent * len(received) if name == "gather_" else sent
    fits = len(sources) == len(received) and is_small((*received, *sources))
    if not fits or any(one.shape != other.shape for one, other in zip(received, sources, strict=True)):
        return False
    for one, other in zip(received, sources, strict=True):
        on_the_same_memory(one).copy_(on_the_same_memory(other))
    return True
