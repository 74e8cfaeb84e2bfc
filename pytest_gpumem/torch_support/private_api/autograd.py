"""Autograd's graph, its nodes, and code that runs in backward."""

from __future__ import annotations

import sys
from contextlib import contextmanager, suppress
from functools import cache, wraps
from traceback import walk_stack
from typing import TYPE_CHECKING, Any

from pytest_gpumem.torch_support.private_api.attributes import replaced
from pytest_gpumem.torch_support.private_api.compiler import never_compiled

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator, Sequence
    from contextlib import AbstractContextManager

    import torch.autograd.profiler
    import torch.profiler


def run_in_backward(call: Callable[[], object], device: torch.device) -> None:
    """Call a function in autograd's backward thread for a device, on the current stream, without any allocation.

    When this function returns, the backward thread has released all gradients from earlier passes. At the end of a pass, this
    thread first wakes the waiting threads, and only then releases the last gradients, before it begins another pass. For
    example, ``run_in_backward(lambda: None, device)`` waits until the previous pass's gradients are released.

    Args:
        call: The function to call.
        device: The device whose backward thread runs the function.
    """
    import torch

    with torch.inference_mode(False), torch.enable_grad():
        empty = torch.empty(0, device=device, requires_grad=True)
        result: Any = _calling_node().apply(empty, call)
        torch.autograd.backward([result], [result.detach()])


@cache
def _calling_node() -> Any:
    import torch

    class CallInBackward(torch.autograd.Function):
        @staticmethod
        def forward(ctx: Any, tensor: torch.Tensor, call: Callable[[], object]) -> torch.Tensor:
            ctx.call = call
            return tensor.view_as(tensor)

        @staticmethod
        def backward(ctx: Any, *_: torch.Tensor) -> tuple[None, None]:
            ctx.call()
            return None, None

    return CallInBackward


@contextmanager
def engine_run_within(around: Callable[[Sequence[Any]], AbstractContextManager[object]]) -> Iterator[None]:
    """Within the context, let every backward pass run in the context ``around(roots)``.

    For example, ``around`` can enter a `TorchFunctionMode` again. Torch disables such a mode while the mode handles a call, and
    a mode also handles calls to ``backward`` and ``grad``. So without ``around``, the mode would miss the Python functions
    called in backward. If a torch release lacks the private function to replace, ``around`` is never called.

    Args:
        around: A function that returns a context for a backward pass. Its argument is the list of the graph's roots, which are
            tensors or edges with a node.
    """
    import torch

    original = getattr(torch.autograd, ENGINE_RUN, None)
    if original is None:
        yield
        return

    @never_compiled
    def run(roots: Sequence[Any], *args: object, **kwargs: object) -> object:
        with around(roots):
            return original(roots, *args, **kwargs)

    with replaced(torch.autograd, ENGINE_RUN, run):
        yield


ENGINE_RUN = "_engine_run_backward"


def backward_runs() -> bool:
    """Return whether any thread runs a backward pass that Python code began."""
    frames = (frame for innermost in sys._current_frames().values() for frame, _ in walk_stack(innermost))
    return any(frame.f_code.co_name == ENGINE_RUN for frame in frames)


def engine_run_is_seen() -> bool:
    """Return whether `engine_run_within` has an effect, because this torch release has the private function to replace."""
    import torch

    return hasattr(torch.autograd, ENGINE_RUN)


def replace_python_of_backward(
    *,
    differentiating: Callable[[Callable[..., Any]], Callable[..., Any]],
    unpacking: Callable[[Callable[..., Any]], Callable[..., Any]],
) -> None:
    """From now on, wrap all Python functions passed to autograd.

    For example, ``tensor.register_hook(hook)`` then registers ``differentiating(hook)``.

    Args:
        differentiating: A decorator for tensor hooks, node hooks (module hooks use them), the ``backward`` of a
            `torch.autograd.Function`, and callbacks at the end of backward.
        unpacking: A decorator for hooks that unpack saved tensors.
    """
    import torch
    from torch.autograd.function import BackwardCFunction, _HookMixin
    from torch.autograd.graph import saved_tensors_hooks

    tensor: Any = torch.Tensor
    for name in ("register_hook", "register_post_accumulate_grad_hook"):
        setattr(tensor, name, _wrapping_hook(getattr(tensor, name), differentiating))
    mixin: Any = _HookMixin
    register_of_node = mixin._register_hook

    @staticmethod  # type: ignore[misc]
    @wraps(register_of_node)
    def register_hook(hooks: Any, hook: Callable[..., Any]) -> Any:
        return register_of_node(hooks, differentiating(hook))

    mixin._register_hook = register_hook
    function: Any = BackwardCFunction
    function.apply = differentiating(function.apply)
    variable: Any = torch.autograd.Variable
    engine = type(variable._execution_engine)

    class Engine(engine):  # type: ignore[misc,valid-type]
        def queue_callback(self, callback: Callable[[], object]) -> None:
            super().queue_callback(differentiating(callback))

    variable._execution_engine = Engine()

    saved: Any = torch._C._autograd.SavedTensor
    for cls, name in ((saved_tensors_hooks, "__init__"), (saved, "register_hooks")):
        setattr(cls, name, _wrapping_unpack_hook(getattr(cls, name), unpacking))


def _wrapping_hook(
    register: Callable[..., Any], wrap: Callable[[Callable[..., Any]], Callable[..., Any]]
) -> Callable[..., Any]:
    """Return a replacement for ``register`` that registers ``wrap(hook)`` in place of ``hook``."""

    @wraps(register)
    def register_wrapped(self: object, hook: Callable[..., Any]) -> Any:
        return register(self, wrap(hook))

    return register_wrapped


def _wrapping_unpack_hook(
    register: Callable[..., Any], wrap: Callable[[Callable[..., Any]], Callable[..., Any]]
) -> Callable[..., Any]:
    """Return a replacement for ``register`` that registers ``pack_hook`` and ``wrap(unpack_hook)``."""
    import torch

    def register_wrapped(self: object, pack_hook: Callable[..., Any], unpack_hook: Callable[..., Any]) -> Any:
        # Do not wrap a hook that is a graph module, because torch.compile inlines such a hook.
        return register(self, pack_hook, unpack_hook if isinstance(unpack_hook, torch.nn.Module) else wrap(unpack_hook))

    return register_wrapped


def saved_by(node: Any) -> list[Any]:
    """Return the tensors saved by an autograd node for backward. If a pack hook ran, return its results instead.

    The tensors are not unpacked, so no hook runs. The list is empty if backward has already freed the tensors, or if this
    torch release gives no access to them (``SavedTensor`` has no ``data``).

    For example, in the graph of ``(x * y).sum()``, the node ``MulBackward0`` saved ``x`` and ``y``.
    """
    saved: list[Any] = [getattr(node, "variable", None)]  # the leaf tensor, on a node that accumulates its gradient
    for name in dir(type(node)):
        if not name.startswith("_raw_saved_"):
            continue
        with suppress(RuntimeError):
            raw = getattr(node, name)
            saved += (getattr(value, "data", None) for value in (raw if type(raw) in (tuple, list) else (raw,)))
    return saved


def next_nodes(node: Any) -> list[Any]:
    """Return the autograd nodes to which backward goes from a node."""
    return [other for other, _ in node.next_functions if other is not None]


def next_node_number() -> int:
    """Return autograd's sequence number for the next node created in this thread."""
    import torch

    return int(torch.autograd._get_sequence_nr())  # type: ignore[attr-defined]


def running_node_number() -> int | None:
    """Return the sequence number of the currently running autograd node in this thread; ``None`` outside backward."""
    import torch

    node = torch._C._current_autograd_node()
    return None if node is None else int(node._sequence_nr())


def running_node_name() -> str | None:
    """Return the name of this thread's running autograd node, such as ``"ProdBackward0"``; ``None`` outside backward."""
    import torch

    node = torch._C._current_autograd_node()
    return None if node is None else str(node.name())


def in_backward() -> bool:
    """Return whether this thread currently runs a backward pass."""
    import torch

    return torch._C._current_graph_task_id() != -1
