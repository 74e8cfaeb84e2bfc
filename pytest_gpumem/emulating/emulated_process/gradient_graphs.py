"""Find memory that gradient graphs may keep in a program without a backward pass: inference without ``torch.no_grad()``."""

from __future__ import annotations

import gc
import sys
from contextlib import ExitStack, nullcontext
from traceback import walk_stack
from typing import TYPE_CHECKING, Any

import torch

from pytest_gpumem.torch_support.private_api.autograd import engine_run_is_seen, engine_run_within
from pytest_gpumem.torch_support.private_api.dispatch import outside_torch_function
from pytest_gpumem.torch_support.reachability import alive
from pytest_gpumem.torch_support.static_access import named_variables_of, tensor_property

if TYPE_CHECKING:
    from collections.abc import Iterator, Sequence
    from contextlib import AbstractContextManager


class BackwardWatch:
    """Records whether autograd's engine has run in this process."""

    def __init__(self) -> None:
        self._may_have_run = not engine_run_is_seen()
        self._entered = ExitStack()
        self._entered.enter_context(engine_run_within(self._note))

    def _note(self, _roots: Sequence[Any]) -> AbstractContextManager[object]:
        self._may_have_run = True
        return nullcontext()

    def bytes_without_tensor(self, device: int, allocated: int) -> int | None:
        """Return the allocated bytes that belong to no tensor in the program, if gradient graphs may keep them.

        If only a graph saves a tensor, the tensor has no Python object, or nothing refers to the object. Workspaces are
        included.

        Args:
            device: Index of the device.
            allocated: Allocated bytes on the device.

        Returns:
            ``None`` if a backward pass has run, if the program has an optimizer (it may train), if this thread records no
            gradients, or if no tensor on the device has a graph.
        """
        if self._may_have_run or not torch.is_grad_enabled() or alive(torch.optim.Optimizer):
            return None
        objects = gc.get_objects()
        referred = {*map(id, gc.get_referents(*objects)), *map(id, _locals())}
        with outside_torch_function():
            # Call the methods of `torch.Tensor` itself, because a subclass may override them.
            tensors = [
                value
                for value in objects
                if issubclass(type(value), torch.Tensor)
                and tensor_property(value, "is_cuda")
                and torch.Tensor.get_device(value) == device
            ]
            if all(tensor_property(tensor, "grad_fn") is None for tensor in tensors):
                return None
            storages = [torch.Tensor.untyped_storage(tensor) for tensor in tensors if id(tensor) in referred]
            held: dict[int, int] = {storage.data_ptr(): storage.nbytes() for storage in storages}
        return max(0, allocated - sum(held.values()))


def _locals() -> Iterator[object]:
    """Yield the local variables of all threads, because the garbage collector does not visit running frames."""
    for thread in sys._current_frames().values():  # noqa: SLF001 -- the interpreter's, documented
        for frame, _ in walk_stack(thread):
            if frame.f_globals is not globals():
                yield from named_variables_of(frame).values()
