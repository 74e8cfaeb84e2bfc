"""Backward on an emulated GPU, which runs without the mode that computes values, except for modules."""

from __future__ import annotations

import atexit
from contextlib import ExitStack, contextmanager
from threading import local
from typing import TYPE_CHECKING

import torch
from torch.nn.modules.module import register_module_forward_hook, register_module_forward_pre_hook

from pytest_gpumem.torch_support.private_api import current_dispatch_mode, engine_run_within, in_backward

if TYPE_CHECKING:
    from collections.abc import Iterator

    from pytest_gpumem.emulation.host_values import HostValues


def away_in_backward(mode: HostValues) -> None:
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
