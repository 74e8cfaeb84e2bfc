"""Let a tensor remain known or unknown when it is pickled, saved, sent to another process or moved to shared memory.

The pickled form of a tensor may contain attributes, which torch sets when the tensor is loaded. Here the attribute `MARK` says
whether the tensor's values are unknown. So the mark survives `torch.save`, `pickle`, queues and `DataLoader` workers, even in
other processes.
"""

from __future__ import annotations

from functools import partial, wraps
from multiprocessing.reduction import ForkingPickler
from typing import TYPE_CHECKING, Any

import torch
from torch.multiprocessing import reductions

from pytest_gpumem.emulating.host_values.host_operators import has_storage, is_ordinary
from pytest_gpumem.torch_support.private_api.compiler import never_compiled
from pytest_gpumem.torch_support.private_api.dispatch import outside_torch_function
from pytest_gpumem.torch_support.private_api.tensors import reduced_with_attribute

if TYPE_CHECKING:
    from collections.abc import Callable

    from pytest_gpumem.emulating.host_values.mode import HostValues

MARK = "_gpumem_not_computed"
"""The name of the attribute in a tensor's pickled form. If the tensor is loaded without an emulated GPU, the attribute is an
ordinary attribute without an effect."""


def follow_serialized(mode: HostValues, is_unknown: Callable[[Any], bool]) -> None:
    """From now on, add `MARK` to pickled tensors, and restore the notes about tensors that are loaded or moved.

    Args:
        mode: The mode with the notes about tensors.
        is_unknown: A function that returns True for a tensor with uncomputed values.
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
            mode.notes.has_moved(old_address, storage)
            return result

        return move_it

    setattr(torch.Tensor, MARK, property(lambda _: False, partial(_read, mode)))
    torch.Tensor.__reduce_ex__ = marked(torch.Tensor.__reduce_ex__, also_known=True)  # type: ignore[method-assign]
    torch.UntypedStorage.share_memory_ = moving(torch.UntypedStorage.share_memory_)  # type: ignore[method-assign]

    def sent(tensor: torch.Tensor, *args: Any) -> Any:
        if is_unknown(tensor):
            mode.reads.of_float()  # count a read, because the other process will not record its reads
        return reductions.reduce_tensor(tensor, *args)  # type: ignore[no-untyped-call]

    for kind in (torch.Tensor, torch.nn.Parameter):
        ForkingPickler.register(kind, marked(sent))
    ForkingPickler.register(torch.UntypedStorage, moving(reductions.reduce_storage))


def _is_gpus(tensor: torch.Tensor) -> bool:
    """Return whether `pickle` restores a tensor to GPU memory. No operator does this, so `HostValues` cannot intercept it."""
    with outside_torch_function():
        return is_ordinary(type(tensor)) and tensor.is_cuda and has_storage(tensor)


def _read(mode: HostValues, tensor: torch.Tensor, not_computed: bool) -> None:
    if not_computed:
        mode.notes.note_unknown(tensor)
    elif _is_gpus(tensor):
        mode.notes.note_known(tensor)
