"""Backward on an emulated GPU: autograd's operators run without the mode that computes values, Python that it calls with it.

With any dispatch mode, torch's derivatives avoid operators in place and without one allocate less (``isTensorSubclassLike`` in
ATen): the mode would change the peaks that it is there for. Hooks and functions in Python are run as the rest of a program is.
"""

from __future__ import annotations

import atexit
from contextlib import ExitStack, contextmanager
from functools import wraps
from typing import TYPE_CHECKING, Any

import torch

from pytest_gpumem.host_values.host_operators import tensors_among
from pytest_gpumem.torch_support.private_api import (
    current_dispatch_mode,
    engine_run_within,
    in_backward,
    replace_python_of_backward,
)

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator, Sequence

    from pytest_gpumem.host_values.mode import HostValues

_kept: list[ExitStack] = []
"""The contexts that are entered for as long as the process lives."""


def away_in_backward(mode: HostValues) -> None:
    """Run backward without the mode, but for the Python that it calls."""

    @contextmanager
    def away(roots: Sequence[Any]) -> Iterator[None]:
        if current_dispatch_mode() is not mode:  # another mode is active, such as one that counts operators
            yield
            return
        nodes = _nodes(roots)
        leaves = [node.variable for node in nodes if node.name().endswith("AccumulateGrad")]
        # What is added to gradients is not seen. Those of leaves on the host may be made of what is not known, or on the GPU.
        on_host = [leaf for leaf in leaves if not leaf.is_cuda]
        unknown = (
            len(on_host) < len(leaves) or any("Copy" in node.name() for node in nodes) or not _are_known(mode, roots)
        )
        mode.forget(leaf.grad for leaf in leaves if leaf.is_cuda and leaf.grad is not None)
        mode.__exit__(None, None, None)
        try:
            with mode.reads.in_backward():
                yield
        finally:
            mode.__enter__()
            if unknown:
                mode.forget(leaf.grad for leaf in on_host if leaf.grad is not None)

    # Entered for good, and left while torch is still there. From Python 3.14 on a process that multiprocessing forks drops what
    # is to be called at the end, and what nothing else holds would be left then.
    entered = ExitStack()
    _kept.append(entered)
    entered.enter_context(engine_run_within(away))
    atexit.register(entered.close)
    replace_python_of_backward(
        unpacking=lambda call: _in_mode(mode, call), differentiating=lambda call: _in_mode(mode, call, mode.forget)
    )


def _in_mode(
    mode: HostValues, call: Callable[..., Any], take: Callable[[Sequence[torch.Tensor]], None] | None = None
) -> Callable[..., Any]:
    """Return a function that autograd calls as one that runs in the mode, and whose results it may ``take`` to add to them."""

    @wraps(call)
    def run(*args: Any, **named: Any) -> Any:
        if not in_backward() or current_dispatch_mode() is not None:
            return call(*args, **named)
        with mode:
            result = call(*args, **named)
            if take is not None:
                take([one for one in tensors_among((result,)) if one.is_floating_point()])
            return result

    return run


def _nodes(roots: Sequence[Any]) -> set[Any]:
    """Return the nodes of a graph, of which ``roots`` are tensors, or edges with a node."""
    waiting = [root.grad_fn if isinstance(root, torch.Tensor) else root.node for root in roots]
    seen = set()
    while waiting:
        node = waiting.pop()
        if node is not None and node not in seen:
            seen.add(node)
            waiting += [before for before, _ in node.next_functions]
    return seen


def _are_known(mode: HostValues, roots: Sequence[Any]) -> bool:
    return all(isinstance(root, torch.Tensor) and not mode.is_unknown(root) for root in roots)
