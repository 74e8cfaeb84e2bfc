"""Scope of the mode that computes values: the whole process, except backward outside of modules.

The mode (`HostValues`) is entered once for good in the thread that imports torch. Autograd's threads inherit it, others do not.
"""

from __future__ import annotations

import atexit
from contextlib import ExitStack, contextmanager
from threading import local
from typing import TYPE_CHECKING

import torch
from torch.nn.modules.module import register_module_forward_hook, register_module_forward_pre_hook

from pytest_gpumem.emulation.host_values import HostValues
from pytest_gpumem.torch_support.private_api import (
    current_dispatch_mode,
    engine_run_within,
    in_backward,
    print_by_way_of_the_host,
)

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator

_mode: HostValues | None = None


def begin() -> HostValues:
    """Enter the mode for good, when torch has been imported."""
    global _mode
    if _mode is None:
        _mode = HostValues()
        _mode.__enter__()
        # What is computed on the host is small, and threads that share a core wait for one another 40 times as long.
        torch.set_num_threads(1)
        _watch_integers(_mode)
        print_by_way_of_the_host()
        _away_in_backward(_mode)
    return _mode


def current() -> HostValues | None:
    """Return the mode of this process."""
    return _mode


def _away_in_backward(mode: HostValues) -> None:
    """Run backward without the mode, but for modules that are computed again in it.

    With any dispatch mode, torch's derivatives avoid operators in place and without one allocate less
    (``isTensorSubclassLike`` in ATen): the mode would change the peaks that it is there for.
    """

    @contextmanager
    def away() -> Iterator[None]:
        if current_dispatch_mode() is not mode:  # another mode is active, such as one that counts operators
            yield
            return
        mode.__exit__(None, None, None)
        try:
            with _back_in_modules(mode):
                yield
        finally:
            mode.__enter__()

    # Entered for good, and left while torch is still there.
    entered = ExitStack()
    entered.enter_context(engine_run_within(away))
    atexit.register(entered.close)


@contextmanager
def _back_in_modules(mode: HostValues) -> Iterator[None]:
    """Run modules that backward calls in the mode. Within a context: torch.compile warns of such hooks in forward."""
    depth = local()

    def called(module: torch.nn.Module, args: object) -> None:
        if torch.compiler.is_compiling():
            return
        inside = getattr(depth, "modules", 0)
        if inside or (in_backward() and current_dispatch_mode() is None):
            depth.modules = inside + 1
            if not inside:
                mode.__enter__()

    def ended(module: torch.nn.Module, args: object, result: object) -> None:
        if torch.compiler.is_compiling():
            return
        inside = getattr(depth, "modules", 0)
        if inside:
            depth.modules = inside - 1
            if inside == 1:
                mode.__exit__(None, None, None)

    hooks = register_module_forward_pre_hook(called), register_module_forward_hook(ended, always_call=True)
    try:
        yield
    finally:
        for hook in hooks:
            hook.remove()


def _watch_integers(mode: HostValues) -> None:
    """Set the mode's ``as_integer`` while a float is converted to an integer."""
    for name in ("__int__", "__index__"):
        original = getattr(torch.Tensor, name)
        setattr(torch.Tensor, name, _as_integer(mode, original))


def _as_integer(mode: HostValues, original: Callable[[torch.Tensor], int]) -> Callable[[torch.Tensor], int]:
    def read(self: torch.Tensor) -> int:
        mode.as_integer = True
        try:
            return original(self)
        finally:
            mode.as_integer = False

    read.__name__ = original.__name__
    return read
