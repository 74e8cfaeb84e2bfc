"""Leave the dispatch mode `HostValues` while autograd's operators run, and enter it again for Python code in backward.

If a dispatch mode is active, torch's derivatives use fewer in-place operators and allocate more (``isTensorSubclassLike`` in
ATen), so the mode would change the measured peaks. Hooks and `torch.autograd.Function` run with the mode, as all other Python
code does.
"""

from __future__ import annotations

import atexit
from contextlib import ExitStack, contextmanager
from functools import wraps
from typing import TYPE_CHECKING, Any

import torch

from pytest_gpumem.emulating.host_values.host_operators import tensors_among
from pytest_gpumem.torch_support.private_api.autograd import engine_run_within, in_backward, replace_python_of_backward
from pytest_gpumem.torch_support.private_api.dispatch import current_dispatch_mode

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator, Sequence

    from pytest_gpumem.emulating.host_values.mode import HostValues

_kept: list[ExitStack] = []
"""The contexts to leave when the interpreter exits."""


def away_in_backward(mode: HostValues) -> None:
    """From now on, run backward without the mode, except for hooks and other Python code."""

    @contextmanager
    def away(roots: Sequence[Any]) -> Iterator[None]:
        if current_dispatch_mode() is not mode:  # another mode is active, for example a FLOP counter
            yield
            return
        nodes = _nodes(roots)
        leaves = [node.variable for node in nodes if node.name().endswith("AccumulateGrad")]
        # Autograd adds to gradients without the mode. So mark the gradients of GPU leaves as unknown, and the gradients of
        # host leaves too if they may follow from unknown values or from the GPU.
        on_host = [leaf for leaf in leaves if not leaf.is_cuda]
        unknown = (
            len(on_host) < len(leaves) or any("Copy" in node.name() for node in nodes) or not _are_known(mode, roots)
        )
        mode.notes.forget(leaf.grad for leaf in leaves if leaf.is_cuda and leaf.grad is not None)
        mode.__exit__(None, None, None)
        try:
            with mode.reads.in_backward():
                yield
        finally:
            mode.__enter__()
            if unknown:
                mode.notes.forget(leaf.grad for leaf in on_host if leaf.grad is not None)

    # `atexit` leaves the context while torch is still loaded. Since Python 3.14, a process forked by multiprocessing drops its
    # exit functions. Without the reference in `_kept`, this would free the context and leave it too early.
    contexts = ExitStack()
    _kept.append(contexts)
    contexts.enter_context(engine_run_within(away))
    atexit.register(contexts.close)
    replace_python_of_backward(
        unpacking=lambda call: _in_mode(mode, call),
        differentiating=lambda call: _in_mode(mode, call, mode.notes.forget),
    )


def _in_mode(
    mode: HostValues, call: Callable[..., Any], take: Callable[[Sequence[torch.Tensor]], None] | None = None
) -> Callable[..., Any]:
    """Return a replacement for a function. When autograd calls the replacement, the function runs with the mode.

    Args:
        mode: The mode to enter.
        call: The original function.
        take: A function to call with the floating-point tensors returned by ``call``. ``take`` marks the tensors as unknown,
            because autograd may add to them later without the mode.
    """

    @wraps(call)
    def run(*args: Any, **named: Any) -> Any:
        if not in_backward() or current_dispatch_mode() is not None:
            return call(*args, **named)
        with mode:
            result = call(*args, **named)
            if take is not None:
                take([tensor for tensor in tensors_among((result,)) if tensor.is_floating_point()])
            return result

    return run


def _nodes(roots: Sequence[Any]) -> set[Any]:
    """Return all nodes in the autograd graph below ``roots``, which are tensors or edges with a node."""
    waiting = [root.grad_fn if isinstance(root, torch.Tensor) else root.node for root in roots]
    seen = set()
    while waiting:
        node = waiting.pop()
        if node is not None and node not in seen:
            seen.add(node)
            waiting += [next_node for next_node, _ in node.next_functions]
    return seen


def _are_known(mode: HostValues, roots: Sequence[Any]) -> bool:
    return all(isinstance(root, torch.Tensor) and not mode.notes.is_unknown(root) for root in roots)
