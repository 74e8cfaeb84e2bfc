"""Unknown tensors that are pickled, saved, sent to another process or moved to shared memory stay unknown.

A pickled tensor may have attributes, and torch sets them when it reads it. One of them says here that its values were not
computed: it comes through `torch.save`, `pickle`, queues and the workers of a `DataLoader`, into other processes as well.
"""

from __future__ import annotations

from functools import wraps
from multiprocessing.reduction import ForkingPickler
from typing import TYPE_CHECKING, Any

import torch
from torch.multiprocessing import reductions

from pytest_gpumem.torch_support.private_api import never_compiled, reduced_with_attribute

if TYPE_CHECKING:
    from collections.abc import Callable

    from pytest_gpumem.emulation.host_values import HostValues

MARK = "_gpumem_not_computed"
"""The attribute of a pickled tensor. Where nothing is emulated, what reads it has a tensor with an attribute more."""


def follow_serialized(mode: HostValues, is_unknown: Callable[[Any], bool]) -> None:
    """Mark unknown tensors when they are pickled and note them when they are read, and those that move to shared memory."""

    def marked(reduce: Callable[..., Any]) -> Callable[..., Any]:
        @never_compiled
        @wraps(reduce)
        def reduce_it(tensor: torch.Tensor, *args: Any) -> Any:
            reduced = reduce(tensor, *args)
            return reduced_with_attribute(reduced, type(tensor), MARK, True) if is_unknown(tensor) else reduced

        return reduce_it

    def moving(move: Callable[..., Any]) -> Callable[..., Any]:
        @wraps(move)
        def move_it(storage: torch.UntypedStorage, *args: Any) -> Any:
            if storage.device.type != "cpu":
                return move(storage, *args)
            where = storage.data_ptr()
            result = move(storage, *args)
            mode.has_moved(where, storage)
            return result

        return move_it

    def read(tensor: torch.Tensor, _: bool) -> None:
        mode.note_unknown(tensor)

    setattr(torch.Tensor, MARK, property(lambda _: False, read))
    torch.Tensor.__reduce_ex__ = marked(torch.Tensor.__reduce_ex__)  # type: ignore[method-assign]
    torch.UntypedStorage.share_memory_ = moving(torch.UntypedStorage.share_memory_)  # type: ignore[method-assign]

    def sent(tensor: torch.Tensor, *args: Any) -> Any:
        if is_unknown(tensor):
            mode.reads.of_float()  # another process takes it, and what that reads is not seen
        return reductions.reduce_tensor(tensor, *args)  # type: ignore[no-untyped-call]

    for kind in (torch.Tensor, torch.nn.Parameter):
        ForkingPickler.register(kind, marked(sent))
    ForkingPickler.register(torch.UntypedStorage, moving(reductions.reduce_storage))
