"""Boundaries between the steps of a loop: the optimizer that stepped first steps again."""

from __future__ import annotations

import os
import threading
from contextlib import ExitStack, contextmanager
from typing import TYPE_CHECKING, Any

from pytest_gpumem.torch_support.private_api import in_backward, replaced

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator

    import torch


class StepBoundaries:
    """Finds the boundaries of a loop's steps, and calls ``boundary()`` at each.

    The first optimizer's first step is one. From then on a step ends with the first optimizer to step a second time since the
    last boundary: a pair of networks with an optimizer each makes one step of both. An optimizer that steps within
    ``backward()`` (one for each parameter, in hooks) ends the step before the next call of a module, as there is no way out of
    ``backward()``.
    """

    def __init__(self, boundary: Callable[[], None]) -> None:
        self._boundary = boundary
        self._stepped: set[int] = set()
        """Optimizers that have stepped since the last boundary, by identity."""
        self._is_due = False
        self._thread, self._process = threading.get_ident(), os.getpid()
        self.optimizers: list[torch.optim.Optimizer] = []
        """The optimizers that have stepped, in this order."""
        self.stepped_in_other_thread = False
        """True if one has stepped in another thread."""
        self._stack = ExitStack()

    @contextmanager
    def watched(self) -> Iterator[None]:
        """Find the boundaries of what runs within."""
        from torch.optim.optimizer import register_optimizer_step_pre_hook

        # What ends a recording at a boundary must not be within a span of it: optimizers make one around their steps.
        with self._stack, without_record_functions():
            self._stack.callback(register_optimizer_step_pre_hook(self._steps).remove)
            yield

    def _steps(self, optimizer: torch.optim.Optimizer, _args: Any, _kwargs: Any) -> None:
        if not any(known is optimizer for known in self.optimizers):
            self.optimizers.append(optimizer)
            # Its own, not one for all: torch goes through those for all while they are called, and what measures a step adds
            # and removes some.
            self._stack.callback(optimizer.register_step_post_hook(self._stepped_by).remove)

    def _stepped_by(self, optimizer: torch.optim.Optimizer, _args: Any, _kwargs: Any) -> None:
        if os.getpid() != self._process:
            return
        if self._stepped and id(optimizer) not in self._stepped:
            self._stepped.add(id(optimizer))
            return
        self._stepped = {id(optimizer)}
        if in_backward():
            # It may run in a thread of autograd's.
            self._await_module()
        elif threading.get_ident() == self._thread:
            self._is_due = False
            self._boundary()
        else:
            self.stepped_in_other_thread = True
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
    """Let ``record_function`` mark nothing within the context.

    A span writes its end into the recording that it began in, whose memory is gone if another recording has begun meanwhile.
    """
    from torch.autograd.profiler import record_function

    leave = record_function.__exit__

    def marks_nothing(self: Any) -> Any:
        return self

    def leaves(self: Any, *error: Any) -> Any:
        # One that was entered before has a record to end.
        return None if self.record is None else leave(self, *error)

    with replaced(record_function, "__enter__", marks_nothing), replaced(record_function, "__exit__", leaves):
        yield
