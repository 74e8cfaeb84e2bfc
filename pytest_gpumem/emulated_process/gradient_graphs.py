"""Memory that graphs of gradients can keep in a program that never runs a backward: inference without ``torch.no_grad()``."""

from __future__ import annotations

import gc
import sys
from contextlib import ExitStack, nullcontext
from traceback import walk_stack
from typing import TYPE_CHECKING, Any

import torch

from pytest_gpumem.torch_support.private_api import engine_run_is_seen, engine_run_within, outside_torch_function
from pytest_gpumem.torch_support.reachability import alive
from pytest_gpumem.torch_support.static_access import named_variables_of, tensor_property

if TYPE_CHECKING:
    from collections.abc import Iterator, Sequence
    from contextlib import AbstractContextManager


class BackwardWatch:
    """Notes for the rest of the process whether autograd's engine ran."""

    def __init__(self) -> None:
        self._may_have_run = not engine_run_is_seen()
        self._entered = ExitStack()
        self._entered.enter_context(engine_run_within(self._note))

    def _note(self, _roots: Sequence[Any]) -> AbstractContextManager[object]:
        self._may_have_run = True
        return nullcontext()

    def bytes_without_tensor(self, device: int, allocated: int) -> int | None:
        """Return how many allocated bytes no tensor of the program holds, if graphs of gradients are what can hold them.

        A tensor that only a graph saved has no Python object, or no object of Python refers to that. Workspaces count as well.

        Args:
            device: The number of the device.
            allocated: The bytes that are allocated on the device.

        Returns:
            ``None`` if a backward ran, if the program has an optimizer and so may train, if gradients are not recorded in this
            thread, or if no tensor on the device has a graph.
        """
        if self._may_have_run or not torch.is_grad_enabled() or alive(torch.optim.Optimizer):
            return None
        objects = gc.get_objects()
        referred = {*map(id, gc.get_referents(*objects)), *map(id, _locals())}
        with outside_torch_function():
            # By the class's own methods: a subclass may have code of its own for these.
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
    """Yield the local variables of all threads: the collector does not go through a frame that runs."""
    for thread in sys._current_frames().values():  # noqa: SLF001 -- the interpreter's, documented
        for frame, _ in walk_stack(thread):
            if frame.f_globals is not globals():
                yield from named_variables_of(frame).values()
