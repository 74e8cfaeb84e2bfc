"""torch.compile, tracing and TorchScript."""

from __future__ import annotations

import gc
import importlib
import sys
import warnings
from contextlib import ExitStack, contextmanager
from functools import wraps
from typing import TYPE_CHECKING, Any, ParamSpec, TypeVar, cast

from pytest_gpumem.torch_support.private_api.attributes import replaced

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator
    from contextlib import AbstractContextManager
    from types import FunctionType


P = ParamSpec("P")
R = TypeVar("R")


def compiled_graphs() -> int:
    """Return how many graphs torch.compile has compiled in this process. A graph that was compiled again counts again."""
    if "torch._dynamo" not in sys.modules:
        return 0
    from torch._dynamo.utils import counters

    return int(counters["stats"]["unique_graphs"])


_CONTEXTS = "torch._dynamo.eval_frame"
"""The module whose class `OptimizeContext` has an instance for each function or model that torch.compile was given."""


def may_have_compiled() -> bool:
    """Return whether torch.compile was called in this process, and its result is still there."""
    contexts = sys.modules.get(_CONTEXTS)
    if contexts is None:
        return False
    kind = vars(contexts).get("OptimizeContext")
    # The module may still be imported by another thread.
    return kind is None or any(type(value) is kind for value in gc.get_objects())


@contextmanager
def before_compiling(call: Callable[[], None]) -> Iterator[None]:
    """Within the context, call a function when torch.compile is called, before its result runs.

    Other functions that compile, such as ``torch.export.export(strict=True)``, are noticed if the compiler is imported before.
    """
    import torch

    def calling(function: Callable[P, R]) -> Callable[P, R]:
        @wraps(function)
        def run(*args: P.args, **kwargs: P.kwargs) -> R:
            call()
            return function(*args, **kwargs)

        return run

    with ExitStack() as stack:
        stack.enter_context(replaced(torch, "compile", calling(torch.compile)))
        kind = vars(sys.modules.get(_CONTEXTS, object)).get("OptimizeContext")
        if kind is not None:
            stack.enter_context(replaced(kind, "__init__", calling(kind.__init__)))
        yield


def activation_memory_budget(fraction: float) -> AbstractContextManager[object]:
    """Return a context in which torch.compile saves at most a share of its default activations for backward: 0.5 for half."""
    import torch._functorch.config

    return cast("AbstractContextManager[object]", torch._functorch.config.patch(activation_memory_budget=fraction))


def load_compiler() -> None:
    """Import torch.compile's default backend now. Ignore the warnings about torch's own use of torch.jit."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        importlib.import_module("torch._inductor.compile_fx")


def compiles_within_modes() -> bool:
    """Return whether torch.compile compiles models while a dispatch mode with ``ignore_compile_internals`` is active.

    Older releases (2.6) run a model uncompiled while any dispatch mode is active.
    """
    from torch.utils._python_dispatch import TorchDispatchMode

    return hasattr(TorchDispatchMode, "ignore_compile_internals")


def never_compiled(function: Callable[P, R]) -> Callable[P, R]:
    """Return a wrapper around a function. torch.compile does not compile the wrapper, the function or the function's callees.

    `torch.compiler.disable` does the same, but imports the compiler at the first call.
    """
    from torch._C._dynamo import eval_frame

    frames: Any = eval_frame
    switch = frames.set_eval_frame

    @wraps(function)
    def run(*args: P.args, **kwargs: P.kwargs) -> R:
        compiling = switch(None)
        try:
            return function(*args, **kwargs)
        finally:
            switch(compiling)

    itself = cast("FunctionType", run).__code__
    if hasattr(frames, "skip_code"):  # torch 2.6
        frames.skip_code(itself)
    else:
        only_this = frames._FrameExecStrategy(frames._FrameAction.SKIP, frames._FrameAction.DEFAULT)
        frames.set_code_exec_strategy(itself, only_this)
    return run


def is_tracing() -> bool:
    """Return whether `torch.jit.trace` currently records operators in this thread."""
    import torch

    return torch._C._get_tracing_state() is not None


@contextmanager
def untraced() -> Iterator[Callable[[Callable[P, R]], Callable[P, R]]]:
    """Do not let `torch.jit.trace` record the torch calls within the context.

    While `torch.jit.trace` records, sizes are tensors. A comparison such as ``tensor.numel() == 0`` would therefore add
    operators to the trace and call ``Tensor.__bool__``.

    Yields:
        A decorator for the program's own functions. While such a function runs, it is traced again.
    """
    import torch

    core: Any = torch._C
    state = core._get_tracing_state()
    included, excluded = core._dispatch_tls_local_include_set(), core._dispatch_tls_local_exclude_set()
    # Within an operator, the dispatch key "Tracer" is excluded. While it is excluded, the tracing state cannot be changed, so
    # include this key again.
    tracer = core.DispatchKeySet(core._parse_dispatch_key("Tracer"))

    def traced(function: Callable[P, R]) -> Callable[P, R]:
        @wraps(function)
        def run(*args: P.args, **kwargs: P.kwargs) -> R:
            core._set_tracing_state(state)
            try:
                return function(*args, **kwargs)
            finally:
                core._set_tracing_state(None)

        return run

    with core._ForceDispatchKeyGuard(included - tracer, excluded - tracer):
        core._set_tracing_state(None)
        try:
            yield traced
        finally:
            core._set_tracing_state(state)


def script_as(function: Callable[..., object], operator: str) -> None:
    """Let TorchScript compile calls to a Python function as calls to the built-in ``operator``."""
    from torch.jit import _builtins

    builtins: Any = _builtins
    builtins._register_builtin(function, f"aten::{operator}")


def around_scripts(around: Callable[[Any, tuple[Any, ...]], AbstractContextManager[object]]) -> None:
    """From now on, let TorchScript functions and methods run within a context when Python code calls them.

    Args:
        around: A function that returns the context. Its arguments are the TorchScript function and the tuple of the call's
            arguments.
    """
    import torch

    def within(call: Callable[..., Any]) -> Callable[..., Any]:
        @never_compiled
        def call_within(script: Any, *args: Any, **kwargs: Any) -> Any:
            with around(script, (*args, *kwargs.values())):
                return call(script, *args, **kwargs)

        return call_within

    for kind in (torch._C.ScriptFunction, torch._C.ScriptMethod):
        kind.__call__ = within(kind.__call__)  # type: ignore[method-assign]


def lists_of_script(script: Any) -> list[str]:
    """Return the type of each list from ``tolist`` in a TorchScript function: ``["List[int]"]``."""
    graph = script.inlined_graph  # without this reference, the nodes would be freed
    return [str(node.output().type()) for node in graph.findAllNodes("prim::tolist", True)]
