"""Boundaries between the steps of a training loop: a step ends when the same optimizer steps again."""

from __future__ import annotations

import os
import threading
from contextlib import ExitStack, contextmanager
from typing import TYPE_CHECKING, Any

from pytest_gpumem.torch_support.private_api.attributes import replaced
from pytest_gpumem.torch_support.private_api.autograd import in_backward

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator

    import torch


class StepBoundaries:
    """Find the boundaries between a loop's steps, and call ``boundary()`` at each boundary.

    The first ``optimizer.step()`` in the loop is a boundary. The next boundary follows when an optimizer steps that has already
    stepped since the last boundary.

    Example:
        A loop trains a generator and a discriminator, each with its own optimizer. The optimizers step in this order: G, D,
        G, D, G. There are boundaries after each G, so a step contains one D and one G.

    Some programs have an optimizer for each parameter, and call ``step()`` in hooks within ``backward()``. Control cannot leave
    ``backward()``, so the boundary comes later, before the next module call.
    """

    def __init__(self, boundary: Callable[[], None]) -> None:
        self._boundary = boundary
        self._stepped: set[int] = set()
        """Ids of optimizers that have stepped since the last boundary."""
        self._is_due = False
        self._thread, self._process = threading.get_ident(), os.getpid()
        self.optimizers: list[torch.optim.Optimizer] = []
        """All optimizers seen so far, ordered by their first steps."""
        self.has_stepped_in_other_thread = False
        """True if an optimizer has stepped in another thread."""
        self._stack = ExitStack()

    @contextmanager
    def watched(self) -> Iterator[None]:
        """Find the boundaries while the loop runs within the context."""
        from torch.optim.optimizer import register_optimizer_step_pre_hook

        # Optimizers open a `record_function` span around their steps. A recording may end at a boundary, but must not end
        # within a span.
        with self._stack, without_record_functions():
            self._stack.callback(register_optimizer_step_pre_hook(self._steps).remove)
            yield

    def _steps(self, optimizer: torch.optim.Optimizer, _args: Any, _kwargs: Any) -> None:
        if not any(earlier is optimizer for earlier in self.optimizers):
            self.optimizers.append(optimizer)
            # Do not use a global hook here. torch iterates over the global hooks while it calls them, and during this call the
            # measuring code adds and removes global hooks.
            self._stack.callback(optimizer.register_step_post_hook(self._stepped_by).remove)

    def _stepped_by(self, optimizer: torch.optim.Optimizer, _args: Any, _kwargs: Any) -> None:
        if os.getpid() != self._process:
            return
        if self._stepped and id(optimizer) not in self._stepped:
            self._stepped.add(id(optimizer))
            return
        self._stepped = {id(optimizer)}
        if in_backward():
            # Hooks in backward may run in an autograd thread, so wait for the next module call.
            self._await_module()
        elif threading.get_ident() == self._thread:
            self._is_due = False
            self._boundary()
        else:
            self.has_stepped_in_other_thread = True
            self._await_module()

    def _await_module(self) -> None:
        from torch.nn.modules.module import register_module_forward_pre_hook

        if not self._is_due:
            self._is_due = True
            self._handle = register_module_forward_pre_hook(self._module_begins)
            self._stack.callback(self._handle.remove)

    def _module_begins(self, _module: torch.nn.Module, _args: Any) -> None:
        if self._is_due and threading.get_ident() == self._thread and not in_backward():
            self._is_due = False
            self._handle.remove()
            self._boundary()


@contextmanager
def without_record_functions() -> Iterator[None]:
    """Disable ``record_function`` within the context.

    A span writes its end into the profiler's recording in which the span began. If another recording begins before the span
    ends, the first recording's memory is already freed, and the span would write into freed memory.
    """
    from torch.autograd.profiler import record_function

    original_exit = record_function.__exit__

    def enter(self: Any) -> Any:
        return self

    def exit_span(self: Any, *error: Any) -> Any:
        # If a span began before this context, it has a record, and this record must be ended.
        return None if self.record is None else original_exit(self, *error)

    with replaced(record_function, "__enter__", enter), replaced(record_function, "__exit__", exit_span):
        yield
