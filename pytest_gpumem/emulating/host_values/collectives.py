"""Write the results of collectives that send values from one rank to another, as if all ranks had the same values.

NCCL's stand-in on an emulated GPU computes only sums, broadcasts and all-gathers. This module writes the results of the other
collectives. Example: if a rank sends ``[1, 2]`` by ``all_to_all``, the functions here write ``[1, 2]`` to the tensor in which
the rank receives.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from pytest_gpumem.emulating.host_values.host_operators import is_small, on_the_same_memory

if TYPE_CHECKING:
    import torch

SENDS_ONLY = frozenset({"send", "barrier", "monitored_barrier_"})
"""Operators in `torch.distributed` that read their first argument. All other operators there write to their first argument."""
_EXCHANGES = frozenset({"alltoall_", "alltoall_base_", "all_to_all_single"})
_SENT_ONE_BY_ONE = frozenset({"gather_", "scatter_", "recv_", "recv_any_source_", *_EXCHANGES})


def complete(name: str, received: list[torch.Tensor], sent: list[torch.Tensor]) -> bool:
    """Write the received values, if they follow from the values sent by this rank.

    Args:
        name: The operator's name in `torch.distributed`: ``"alltoall_"``.
        received: The tensors to which the operator writes.
        sent: The tensors from which the operator reads. Their values are known.

    Returns:
        True if all tensors in ``received`` have the correct values now.
    """
    if name not in _SENT_ONE_BY_ONE:
        return True
    if name == "scatter_":
        return bool(sent)  # if this rank scatters, NCCL's stand-in has already written the rank's own part
    sources = sent * len(received) if name == "gather_" else sent
    fits = len(sources) == len(received) and is_small((*received, *sources))
    if not fits or any(target.shape != source.shape for target, source in zip(received, sources, strict=True)):
        return False
    for target, source in zip(received, sources, strict=True):
        on_the_same_memory(target).copy_(on_the_same_memory(source))
    return True
