"""Find memory that autograd graphs may keep alive, although the program never runs backward.

For example, inference without ``torch.no_grad()`` builds needless graphs.
"""

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
    """Notices whether this process has run a backward pass."""

    def __init__(self) -> None:
        self._may_have_run = not engine_run_is_seen()
        self._entered = ExitStack()
        self._entered.enter_context(engine_run_within(self._note))

    def _note(self, _roots: Sequence[Any]) -> AbstractContextManager[object]:
        self._may_have_run = True
        return nullcontext()

    def bytes_without_tensor(self, device: int, allocated: int) -> int | None:
        """Return the allocated bytes outside the program's own tensors, if autograd graphs may keep these bytes alive.

        Such bytes belong to tensors saved by a graph only: they have no Python object, or no variable refers to their Python
        object. Workspaces are included as well.

        Args:
            device: Index of the GPU.
            allocated: Allocated bytes on the GPU.

        Returns:
            The bytes. ``None`` if graphs are not the reason: a backward pass has run, the program has an optimizer (so it may
            train), gradients are disabled in this thread, or no tensor on the GPU has a graph.
        """
        if self._may_have_run or not torch.is_grad_enabled() or alive(torch.optim.Optimizer):
            return None
        objects = gc.get_objects()
        referred = {*map(id, gc.get_referents(*objects)), *map(id, _locals())}
        with outside_torch_function():
            # Call the methods through `torch.Tensor`, because subclasses in the program may override them.
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
    """Yield the values of local variables in all threads. The garbage collector does not know about running functions."""
    for thread in sys._current_frames().values():  # noqa: SLF001 -- documented in spite of the underscore
        for frame, _ in walk_stack(thread):
            if frame.f_globals is not globals():
                yield from named_variables_of(frame).values()
