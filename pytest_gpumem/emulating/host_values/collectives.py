"""Complete collectives between emulated ranks: a rank receives its own values.

The NCCL stand-in computes sums, broadcasts and all-gathers. It does not implement sending from one rank to another rank.
Example: if a rank sends ``[1, 2]`` by ``all_to_all``, it receives ``[1, 2]``.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from pytest_gpumem.emulating.host_values.host_operators import is_small, on_the_same_memory

if TYPE_CHECKING:
    import torch

SENDS_ONLY = frozenset({"send", "barrier", "monitored_barrier_"})
"""Operators in c10d that do not write to their first argument."""
_EXCHANGES = frozenset({"alltoall_", "alltoall_base_", "all_to_all_single"})
_SENT_ONE_BY_ONE = frozenset({"gather_", "scatter_", "recv_", "recv_any_source_", *_EXCHANGES})


def complete(name: str, received: list[torch.Tensor], sent: list[torch.Tensor]) -> bool:
    """Write the values from other ranks, if they follow from the values sent by this rank.

    Args:
        name: The operator in `torch.distributed`.
        received: Tensors written by the operator.
        sent: Tensors read by the operator. All are known.

    Returns:
        True if ``received`` now has the correct values.
    """
    if name not in _SENT_ONE_BY_ONE:
        return True
    if name == "scatter_":
        return bool(sent)  # if this rank scatters, its own part is already written
    sources = sent * len(received) if name == "gather_" else sent
    fits = len(sources) == len(received) and is_small((*received, *sources))
    if not fits or any(target.shape != source.shape for target, source in zip(received, sources, strict=True)):
        return False
    for target, source in zip(received, sources, strict=True):
        on_the_same_memory(target).copy_(on_the_same_memory(source))
    return True
