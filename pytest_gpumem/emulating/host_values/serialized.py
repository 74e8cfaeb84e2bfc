"""Keep the notes about known and unknown tensors when tensors are pickled, saved, sent to another process or moved to shared
memory.

A pickled tensor may have attributes, which torch sets when it loads the tensor. The attribute `MARK` says whether the tensor's
values are unknown. It passes through `torch.save`, `pickle`, queues and `DataLoader` workers, including other processes.
"""

from __future__ import annotations

from functools import partial, wraps
from multiprocessing.reduction import ForkingPickler
from typing import TYPE_CHECKING, Any

import torch
from torch.multiprocessing import reductions

from pytest_gpumem.emulating.host_values.host_operators import has_storage, is_ordinary
from pytest_gpumem.torch_support.private_api import never_compiled, outside_torch_function, reduced_with_attribute

if TYPE_CHECKING:
    from collections.abc import Callable

    from pytest_gpumem.emulating.host_values.mode import HostValues

MARK = "_gpumem_not_computed"
"""The attribute on a pickled tensor. Without an emulated GPU, the loaded tensor only has an additional attribute."""


def follow_serialized(mode: HostValues, is_unknown: Callable[[Any], bool]) -> None:
    """Mark tensors as known or unknown when they are pickled, and restore the notes when they are loaded or moved.

    Args:
        mode: The mode with the notes.
        is_unknown: Returns True for a tensor with uncomputed values.
    """

    def marked(reduce: Callable[..., Any], *, also_known: bool = False) -> Callable[..., Any]:
        @never_compiled
        @wraps(reduce)
        def reduce_it(tensor: torch.Tensor, *args: Any) -> Any:
            reduced = reduce(tensor, *args)
            if is_unknown(tensor):
                return reduced_with_attribute(reduced, type(tensor), MARK, True)
            is_marked = also_known and _is_gpus(tensor)
            return reduced_with_attribute(reduced, type(tensor), MARK, False) if is_marked else reduced

        return reduce_it

    def moving(move: Callable[..., Any]) -> Callable[..., Any]:
        @wraps(move)
        def move_it(storage: torch.UntypedStorage, *args: Any) -> Any:
            if storage.device.type != "cpu":
                return move(storage, *args)
            old_address = storage.data_ptr()
            result = move(storage, *args)
            mode.has_moved(old_address, storage)
            return result

        return move_it

    setattr(torch.Tensor, MARK, property(lambda _: False, partial(_read, mode)))
    torch.Tensor.__reduce_ex__ = marked(torch.Tensor.__reduce_ex__, also_known=True)  # type: ignore[method-assign]
    torch.UntypedStorage.share_memory_ = moving(torch.UntypedStorage.share_memory_)  # type: ignore[method-assign]

    def sent(tensor: torch.Tensor, *args: Any) -> Any:
        if is_unknown(tensor):
            mode.reads.of_float()  # reads in the other process are not recorded
        return reductions.reduce_tensor(tensor, *args)  # type: ignore[no-untyped-call]

    for kind in (torch.Tensor, torch.nn.Parameter):
        ForkingPickler.register(kind, marked(sent))
    ForkingPickler.register(torch.UntypedStorage, moving(reductions.reduce_storage))


def _is_gpus(tensor: torch.Tensor) -> bool:
    """Return whether `pickle` loads a tensor into GPU memory, which no operator shows."""
    with outside_torch_function():
        return is_ordinary(type(tensor)) and tensor.is_cuda and has_storage(tensor)


def _read(mode: HostValues, tensor: torch.Tensor, not_computed: bool) -> None:
    if not_computed:
        mode.note_unknown(tensor)
    elif _is_gpus(tensor):
        mode.note_known(tensor)
