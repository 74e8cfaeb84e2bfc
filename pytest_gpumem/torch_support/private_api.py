"""All uses of torch's private names, each in a function. A test checks every function with every supported torch release."""

from __future__ import annotations

import importlib
import os
import platform
import sys
import warnings
from contextlib import contextmanager, nullcontext, suppress
from functools import cache, partial, wraps
from typing import TYPE_CHECKING, Any, ParamSpec, TypeVar, cast

from pytest_gpumem.base.variables import KINETO_LOG_LEVEL
from pytest_gpumem.facts.values.events import AllocationEvent, Threads

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator, Mapping, Sequence
    from contextlib import AbstractContextManager
    from types import FunctionType
    from typing import TypeAlias

    import torch.autograd.profiler
    import torch.profiler
    from torch.utils.flop_counter import FlopCounterMode

    Profile: TypeAlias = torch.profiler.profile | torch.autograd.profiler.profile
    """A profiler of either class. `torch.profiler.profile` contains a `torch.autograd.profiler.profile`."""

P = ParamSpec("P")
R = TypeVar("R")

MODULE_PARTS = {"modules": "_modules", "parameters": "_parameters", "buffers": "_buffers"}
"""The attributes in which a module stores its submodules, parameters and buffers by name. They are dicts, except in
TorchScript modules."""


@contextmanager
def replaced(owner: Any, name: str, value: object) -> Iterator[None]:
    """Set an attribute of a module or class to ``value`` within the context."""
    original = getattr(owner, name)
    setattr(owner, name, value)
    try:
        yield
    finally:
        setattr(owner, name, original)


def peak_resets(device_type: str) -> list[tuple[str, str]]:
    """Return the module and name of each torch function that resets a device type's peak statistics.

    A torch release may lack some of these functions.
    """
    public = (f"torch.{device_type}", f"torch.{device_type}.memory", "torch.accelerator", "torch.accelerator.memory")
    private = (f"_{device_type}_resetPeakMemoryStats", "_accelerator_resetPeakStats")
    return [*((module, "reset_peak_memory_stats") for module in public), *(("torch._C", name) for name in private)]


def allocation_events(profiler: Profile) -> list[AllocationEvent]:
    """Return all allocations and frees in a stopped profiler with ``profile_memory=True``, in order.

    The profiler's public tables add up allocations by operator, without addresses. Its event tree has each allocation with its
    address.
    """
    # The tree is walked in order and sorted() is stable, so events in the same nanosecond are not reordered.
    return sorted(_allocations(event_tree(profiler)), key=lambda event: event.time_ns)


def event_tree(profiler: Profile) -> list[Any]:
    """Return the event tree of a stopped profiler. An operator's children are its calls to other operators, and its
    allocations.
    """
    autograd_profiler: Any = getattr(profiler, "profiler", profiler)
    tree: list[Any] = autograd_profiler.kineto_results.experimental_event_tree()
    return tree


def _allocations(tree: list[Any]) -> Iterator[AllocationEvent]:
    from torch._C._profiler import _EventType

    allocation: Any = _EventType.Allocation
    stack = list(reversed(tree))
    while stack:
        event = stack.pop()
        stack.extend(reversed(event.children))
        if event.tag == allocation:
            # Read each attribute only once, because torch converts its value at every read.
            fields = event.extra_fields
            if fields.device.type == "cpu":
                yield AllocationEvent(event.start_time_ns, fields.ptr, fields.alloc_size)


def bfloat16_instructions() -> str | None:
    """Return the name of the instructions with which oneDNN computes bfloat16 on this x86 CPU: ``AMX``, ``AVX512_BF16`` or
    ``none``.

    ``None`` if torch has no function to ask. oneDNN chooses its kernels by these instructions, and the kernels need different
    workspaces. Example: a bfloat16 training step of the example project's GPT with checkpointing allocates 27.74 MB with
    ``AMX``, 27.80 MB with ``AVX512_BF16``, and 29.29 MB with ``none`` on a CPU with AVX-512.
    """
    import torch

    has_amx = getattr(torch.cpu, "_is_amx_tile_supported", None)
    has_bf16 = getattr(torch.cpu, "_is_avx512_bf16_supported", None)
    if has_amx is None or has_bf16 is None or platform.machine().lower() not in ("x86_64", "amd64"):
        return None
    return "AMX" if has_amx() else "AVX512_BF16" if has_bf16() else "none"


def clear_cublas_workspaces() -> None:
    """Free the workspaces that cuBLAS allocates once for each handle and stream (33,554,432 bytes each on an H100).

    Otherwise the first matrix product in a process would look like a leak in the test that runs it (pytorch/pytorch#95668).
    """
    import torch

    torch._C._cuda_clearCublasWorkspaces()


def run_in_backward(call: Callable[[], object], device: torch.device) -> None:
    """Call a function in autograd's backward thread for a device, on the current stream, without any allocation.

    When this function returns, the backward thread has released all gradients from earlier passes. At the end of a pass, the
    backward thread first wakes the waiting threads and only then releases the last gradients, but always before the next pass.

    For example, ``run_in_backward(lambda: None, device)`` waits until the gradients of the previous pass are released.

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


def parts_of_coo(tensor: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """Return the indices and the values of a sparse COO tensor. torch's public methods raise an exception for an uncoalesced
    tensor.
    """
    import torch

    # Call the methods of `torch.Tensor`, because a subclass may override them.
    base: Any = torch.Tensor
    return base._indices(tensor), base._values(tensor)


def reduced_with_attribute(
    reduced: tuple[Any, ...], kind: type[torch.Tensor], name: str, value: object
) -> tuple[Any, ...]:
    """Add an attribute to the pickled form of a tensor. torch sets this attribute when it loads the tensor.

    Args:
        reduced: The pickled form, as ``__reduce_ex__`` returned it.
        kind: The tensor's class.
        name: The attribute's name.
        value: The attribute's value. Its type must be allowed by ``torch.load(..., weights_only=True)``.
    """
    from torch._tensor import _rebuild_from_type_v2

    rebuild, arguments = reduced
    return _rebuild_from_type_v2, (rebuild, kind, arguments, {name: value})


def run_kernel(operator: Any, key: str, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    """Run an operator's kernel without the active dispatch modes. The modes still intercept the operators that the kernel
    calls.

    For example, ``run_kernel(torch.ops.aten.add.Tensor, "CPU", (x, y), {})`` adds two tensors on the CPU.

    Args:
        operator: An operator overload, such as ``torch.ops.aten.add.Tensor``.
        key: The kernel's dispatch key, for example ``"CPU"``, ``"CUDA"``, ``"SparseCUDA"`` or ``"SparseCsrCUDA"``.
        args: The operator's positional arguments.
        kwargs: The operator's keyword arguments.

    Returns:
        The operator's result.
    """
    from torch._C import DispatchKey, DispatchKeySet

    return operator.redispatch(DispatchKeySet(getattr(DispatchKey, key)), *args, **kwargs)


def is_higher_order(operator: object) -> bool:
    """Return whether an operator has functions as arguments, as `torch.cond` and ``flex_attention`` have."""
    from torch._ops import HigherOrderOperator

    return isinstance(operator, HigherOrderOperator)


def compiled_graphs() -> int:
    """Return how many graphs torch.compile has compiled in this process. A graph that was compiled again counts again."""
    if "torch._dynamo" not in sys.modules:
        return 0
    from torch._dynamo.utils import counters

    return int(counters["stats"]["unique_graphs"])


def activation_memory_budget(fraction: float) -> AbstractContextManager[object]:
    """Return a context in which torch.compile saves at most a share of its default activations for backward: 0.5 for half."""
    import torch._functorch.config

    return cast("AbstractContextManager[object]", torch._functorch.config.patch(activation_memory_budget=fraction))


def load_compiler() -> None:
    """Import torch.compile's default backend now. Its warnings about torch's own use of torch.jit are ignored."""
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


def flop_counter(custom_mapping: Mapping[Any, Callable[..., int]]) -> FlopCounterMode:
    """Return torch's FLOP counter, but changed so its first call does not import the compiler.

    ``custom_mapping`` contains a formula for each further operator, by operator.
    """
    from torch.utils import flop_counter as counters

    mode = getattr(counters, "_FlopCounterMode", None)
    function = getattr(getattr(mode, "__torch_dispatch__", None), "__wrapped__", None)
    if function is not None and not hasattr(function, "__dynamo_disable"):
        function.__dynamo_disable = never_compiled(function)
    return counters.FlopCounterMode(display=False, custom_mapping={**custom_mapping})


def span(name: str) -> AbstractContextManager[object]:
    """Return a context that a profile shows as a span with a name. Dispatch modes do not intercept it.

    The public `torch.profiler.record_function` is an operator itself, so selective checkpointing would cache its result.
    """
    from torch._C._profiler import _RecordFunctionFast

    return cast("AbstractContextManager[object]", _RecordFunctionFast(name))


def watched_operators(
    called: Callable[[Any, tuple[Any, ...], dict[str, Any], Callable[[], Any]], Any],
) -> AbstractContextManager[object]:
    """Return a context in which every operator below autograd calls ``called`` instead.

    Enter this context before `flop_counter`, because the counter keeps torch.compile from compiling ``called``. torch's
    documentation recommends the mode used here, although its module is private.

    Args:
        called: A function with the parameters ``(operator, args, kwargs, run)``. ``run()`` runs the operator. The program gets
            ``called``'s result as the operator's result. For example, ``lambda operator, args, kwargs, run: run()`` changes
            nothing.
    """
    from torch.utils._python_dispatch import TorchDispatchMode

    class Watch(TorchDispatchMode):  # type: ignore[no-untyped-call]
        supports_higher_order_operators = True

        @classmethod
        def _should_skip_dynamo(cls) -> bool:
            return False  # otherwise torch would add a wrapper, which imports the compiler

        def __torch_dispatch__(
            self, func: Any, _types: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
        ) -> Any:
            kwargs = kwargs or {}
            return called(func, args, kwargs, lambda: func(*args, **kwargs))

    mode: AbstractContextManager[object] = Watch()  # type: ignore[no-untyped-call]
    return mode


def outside_torch_function() -> AbstractContextManager[object]:
    """Return a context in which torch does not call ``__torch_function__``, neither on modes nor on tensor subclasses."""
    import torch

    return cast("AbstractContextManager[object]", torch._C.DisableTorchFunction())


def takes_numbers_for_tensors(name: str) -> bool:
    """Return whether an operator accepts Python numbers for tensor arguments, as ``mul`` does: ``torch.ops.aten.mul(tensor,
    2)``.
    """
    import torch

    return bool(torch._C._should_allow_numbers_as_tensors(name))


def unwrapped(tensor: torch.Tensor) -> torch.Tensor:
    """Return the innermost tensor in a wrapper from `torch.func` or `torch.export`. Wrappers have no storage themselves."""
    import torch
    from torch._C import _functorch

    while True:
        if _functorch.is_functorch_wrapped_tensor(tensor):
            tensor = _functorch.get_unwrapped(tensor)
        elif torch._is_functional_tensor(tensor):
            tensor = torch._from_functional_tensor(tensor)
        else:
            return tensor


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
        A decorator for the program's own functions, which are traced again while they run.
    """
    import torch

    core: Any = torch._C
    state = core._get_tracing_state()
    included, excluded = core._dispatch_tls_local_include_set(), core._dispatch_tls_local_exclude_set()
    # Within an operator, the dispatch key "Tracer" is excluded. While it is excluded, the tracing state cannot be changed.
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


@contextmanager
def beneath_modes() -> Iterator[None]:
    """Disable all function modes, dispatch modes and tensor subclasses for torch calls within the context."""
    import torch

    with torch._C.DisableTorchFunction(), torch._C._DisableTorchDispatch():
        yield


@contextmanager
def engine_run_within(around: Callable[[Sequence[Any]], AbstractContextManager[object]]) -> Iterator[None]:
    """Within the context, let every backward pass run in the context ``around(roots)``, which can enter a `TorchFunctionMode`
    again.

    Such a mode handles calls to ``backward`` and ``grad`` like other functions, and torch disables a mode while it handles a
    call. So the mode would miss the Python functions called in backward. If a torch release lacks the private function to
    replace, ``around`` is never called.

    Args:
        around: A function that returns a context for a backward pass. Its argument is the list of the graph's roots, which are
            tensors or edges with a node.
    """
    import torch

    original = getattr(torch.autograd, _ENGINE_RUN, None)
    if original is None:
        yield
        return

    @never_compiled
    def run(roots: Sequence[Any], *args: object, **kwargs: object) -> object:
        with around(roots):
            return original(roots, *args, **kwargs)

    with replaced(torch.autograd, _ENGINE_RUN, run):
        yield


_ENGINE_RUN = "_engine_run_backward"


def engine_run_is_seen() -> bool:
    """Return whether `engine_run_within` has an effect, because this torch release has the private function to replace."""
    import torch

    return hasattr(torch.autograd, _ENGINE_RUN)


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
        # Do not wrap a graph module as a hook, because torch.compile inlines it.
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
    """Return the name of the currently running autograd node in this thread: ``"ProdBackward0"``; ``None`` outside
    backward.
    """
    import torch

    node = torch._C._current_autograd_node()
    return None if node is None else str(node.name())


@contextmanager
def outside_autocast(device_type: str) -> Iterator[None]:
    """Switch autocast off within the context, as if no autocast context surrounded it.

    An autocast context caches its cast weights, and torch frees the cache when the outermost autocast context ends. Within a
    surrounding autocast context, a step's cached weights would therefore outlive the step's forward pass.
    """
    import torch

    enabled = torch.is_autocast_enabled(device_type)
    depth = torch.autocast_increment_nesting() - 1
    for _ in range(depth + 1):
        torch.autocast_decrement_nesting()
    torch.set_autocast_enabled(device_type, False)
    torch.clear_autocast_cache()
    try:
        yield
    finally:
        torch.clear_autocast_cache()
        torch.set_autocast_enabled(device_type, enabled)
        for _ in range(depth):
            torch.autocast_increment_nesting()


@contextmanager
def tf32_allowed(allowed: bool) -> Iterator[None]:
    """Allow or forbid TF32 for float32 matrix products, convolutions and recurrent layers on a GPU.

    Since torch 2.9 each backend has its own setting. This context first sets the older settings, which are common to all
    backends, to the same value. Otherwise reading a common setting would raise an error, because a backend's setting differs.
    For example, ``torch.backends.cudnn.flags`` reads a common setting, and some models call it.
    """
    import torch

    cudnn, matmul = torch.backends.cudnn, torch.backends.cuda.matmul
    common = _read_setting(torch.get_float32_matmul_precision), _read_setting(lambda: cudnn.allow_tf32)
    backends: list[Any] = [matmul, cudnn.conv, cudnn.rnn] if hasattr(matmul, "fp32_precision") else []  # type: ignore[attr-defined]
    precisions = [backend.fp32_precision for backend in backends]
    try:
        torch.set_float32_matmul_precision("high" if allowed else "highest")
        cudnn.allow_tf32 = allowed
        for backend in backends:
            backend.fp32_precision = "tf32" if allowed else "ieee"
        yield
    finally:
        products, convolutions = common
        if products is not None:
            torch.set_float32_matmul_precision(products)
        if convolutions is not None:
            cudnn.allow_tf32 = convolutions
        for backend, precision in zip(backends, precisions, strict=True):
            backend.fp32_precision = precision


def _read_setting(setting: Callable[[], R]) -> R | None:
    """Return the value of a setting common to all backends; ``None`` if the backends' own settings differ."""
    try:
        return setting()
    except RuntimeError:
        return None


@contextmanager
def quiet_kineto() -> Iterator[None]:
    """Prevent Kineto (torch's profiler library) from writing to stderr whenever a profiler starts or stops.

    Kineto reads its log level from an environment variable when it is used for the first time.
    """
    if KINETO_LOG_LEVEL in os.environ:
        yield
        return
    os.environ[KINETO_LOG_LEVEL] = "99"
    try:
        yield
    finally:
        del os.environ[KINETO_LOG_LEVEL]


@contextmanager
def recording_no_operators() -> Iterator[None]:
    """Let profilers that start within the context record only allocations, and no operators.

    A step runs many more operators than it makes allocations, so recording operators would take most of the profiler's time.
    """
    import torch.autograd.profiler
    from torch._C._profiler import RecordScope

    profiler: Any = torch.autograd.profiler
    enable = profiler._enable_profiler
    scopes: Any = RecordScope
    # An empty set of scopes would mean all scopes. So name a scope without operators: steps do not use the Static Runtime.
    with replaced(profiler, "_enable_profiler", partial(enable, scopes={scopes.STATIC_RUNTIME_MODEL})):
        yield


def threads_of_spans(profiler: Profile) -> dict[int, Threads]:
    """Return the threads of each event in a stopped profiler, by the event's start time in nanoseconds.

    The event tree (`event_tree`) does not contain the thread in which forward created an autograd node.
    """
    autograd_profiler: Any = getattr(profiler, "profiler", profiler)
    threads: dict[int, Threads] = {}
    for event in autograd_profiler.kineto_results.events():
        threads.setdefault(event.start_ns(), Threads(event.start_thread_id(), event.fwd_thread_id()))
    return threads


def cuda_has_allocated(index: int) -> bool:
    """Return whether this process has ever allocated memory with the CUDA allocator on a GPU, even if it was freed.

    torch's public function for statistics is slower, because it flattens and sorts them all. Any of the four counters may have
    been reset to 0, so all are checked.
    """
    import torch

    return any(torch._C._cuda_memoryStats(index)["allocated_bytes"]["all"].values())


def cuda_history_is_on() -> bool:
    """Return whether torch currently records the history of the CUDA caching allocator."""
    import torch

    return bool(torch._C._cuda_isHistoryEnabled())


def cublas_workspace_sizes() -> frozenset[int]:
    """Return the sizes of a cuBLAS workspace and a cuBLASLt workspace in bytes; empty if the torch release does not report
    them.
    """
    import torch

    names = ("_cuda_getCublasWorkspaceSize", "_cuda_getCublasLtWorkspaceSize")
    sizes = (getattr(torch._C, name, int)() for name in names)
    return frozenset(size for size in sizes if size)


MOST_ENTRIES = 2**20
"""A history without Python frames contains at most this many entries. Older entries are lost."""


def start_cuda_history(*, frames: bool = True) -> None:
    """Start to record every allocation and free in the CUDA caching allocator.

    Frees are recorded without Python frames, because memory may be freed while an exception propagates, for example when
    checkpointing stops early. If torch 2.11 reads frames at that moment, the exception is lost (``SystemError: ... returned
    NULL without setting``).

    Args:
        frames: Whether to record the Python frames of each allocation.
    """
    import torch

    record = torch.cuda.memory._record_memory_history
    if frames:
        record("all", context="alloc", stacks="python")
    else:
        record("all", context=None, stacks="python", max_entries=MOST_ENTRIES)


def stop_cuda_history() -> None:
    """Stop recording the CUDA caching allocator's history, and delete it."""
    import torch

    torch.cuda.memory._record_memory_history(None)


def cuda_snapshot() -> dict[str, Any]:
    """Return the state and the recorded history of the CUDA caching allocator, as ``torch.cuda.memory._dump_snapshot`` writes
    them.

    This call itself adds an entry to the history.
    """
    import torch

    return cast("dict[str, Any]", torch.cuda.memory._snapshot())


def allocate_on_cuda(nbytes: int, device: torch.device) -> int:
    """Allocate a block with the CUDA caching allocator and return its address. Raise ``torch.OutOfMemoryError`` if memory runs
    out.
    """
    import torch

    return int(torch.cuda.caching_allocator_alloc(nbytes, device))


def free_on_cuda(address: int) -> None:
    """Return a block to the CUDA caching allocator."""
    import torch

    torch.cuda.caching_allocator_delete(address)  # type: ignore[no-untyped-call]


def current_dispatch_mode() -> object | None:
    """Return the innermost active dispatch mode in this thread; ``None`` if no dispatch mode is active."""
    from torch.utils._python_dispatch import _get_current_dispatch_mode

    mode: object | None = _get_current_dispatch_mode()
    return mode


def in_backward() -> bool:
    """Return whether this thread currently runs a backward pass."""
    import torch

    return torch._C._current_graph_task_id() != -1


def when_cuda_begins(call: Callable[[], None]) -> None:
    """Call a function when this process uses CUDA for the first time, or now if it already uses CUDA.

    So a process can prepare something for CUDA, and still fork before it uses CUDA.
    """
    import torch

    torch.cuda._lazy_call(call)  # type: ignore[no-untyped-call]


def observe_out_of_memory(call: Callable[[int, int, int, int], None]) -> None:
    """From now on, call a function in the allocating thread just before an allocation raises an out-of-memory error.

    Call this after CUDA is initialised, or in `when_cuda_begins`. With the driver's allocator, ``cudaMallocAsync``, the
    function is never called.

    Args:
        call: A function with the parameters ``(device, requested, total, free)``. The last three are sizes in bytes.
    """
    import torch

    if torch.cuda.get_allocator_backend() == "native":
        torch._C._cuda_attach_out_of_memory_observer(call)  # type: ignore[attr-defined]


def expandable_segments_are_on() -> bool:
    """Return whether the CUDA caching allocator uses expandable segments, from its current settings and not from the
    environment.
    """
    import torch

    if torch.cuda.get_allocator_backend() != "native":
        return False
    return bool(cuda_snapshot().get("allocator_settings", {}).get("expandable_segments", False))


def print_by_way_of_the_host(within: Callable[[], AbstractContextManager[object]] = nullcontext) -> None:
    """From now on, let torch print a GPU tensor from a copy on the host.

    torch's own code for printing disables dispatch modes and then selects elements on the GPU. So the dispatch mode for
    emulated GPUs would miss these operators.

    Args:
        within: A function that returns a context, in which tensors are printed.
    """
    import torch

    original = cast("Callable[[torch.Tensor, int], str]", torch._tensor_str._tensor_str)

    def printed(tensor: torch.Tensor, indent: int) -> str:
        with within():
            return original(tensor.detach().cpu() if tensor.is_cuda else tensor, indent)

    torch._tensor_str._tensor_str = printed


def remember_functions_that_take_a_device() -> None:
    """Make torch build its set of functions with a ``device`` argument now, before this package replaces some of them.

    A default device (``with torch.device("cuda"):``) applies only to functions in this set, which torch otherwise builds at
    the first use.
    """
    from torch.utils import _device

    _device._device_constructors()


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


@contextmanager
def around_collectives(
    waited: Callable[[], None], broadcasting: Callable[[], AbstractContextManager[object]]
) -> Iterator[None]:
    """Within the context, call functions when Python waits for a collective, or broadcasts several tensors at once.

    `DistributedDataParallel` makes such broadcasts. In backward, `DistributedDataParallel` waits for other ranks in C++, and
    these waits are not reported.

    Args:
        waited: A function to call after Python has waited for a collective.
        broadcasting: A function that returns a context, in which torch broadcasts the tensors.
    """
    import torch.distributed as dist

    if not dist.is_available():
        yield
        return
    from torch.distributed import _functional_collectives as functional

    def observed(wait: Callable[P, R]) -> Callable[P, R]:
        @wraps(wait)
        def wait_and_report(*args: P.args, **kwargs: P.kwargs) -> R:
            result = wait(*args, **kwargs)
            waited()
            return result

        return wait_and_report

    def within(broadcast: Callable[P, R]) -> Callable[P, R]:
        @wraps(broadcast)
        def broadcast_within(*args: P.args, **kwargs: P.kwargs) -> R:
            with broadcasting():
                return broadcast(*args, **kwargs)

        return broadcast_within

    private_names: Any = dist
    with (
        replaced(dist.Work, "wait", observed(dist.Work.wait)),
        replaced(functional, "wait_tensor", observed(functional.wait_tensor)),
        replaced(dist, "_broadcast_coalesced", within(private_names._broadcast_coalesced)),
    ):
        yield


FAKE = "fake"
"""The name of torch's process group backend without real other ranks."""


def store_of_nobody() -> Any:
    """Return a store with which a process can initialise a process group of the backend `FAKE`, without other ranks.

    Collectives in such a group return at once. Depending on the torch release, a collective copies this rank's part in place
    of the other ranks' parts, or does not change its output.
    """
    from torch.testing._internal.distributed.fake_pg import FakeStore

    return FakeStore()


def forget_meshes() -> None:
    """Clear torch's caches of device meshes after their process groups have ended. Otherwise a later, equal mesh would reuse
    them.
    """
    from torch.distributed import device_mesh

    forget_operators_of_meshes()
    resources = getattr(device_mesh, "_mesh_resources", None)
    for name in ("child_to_root_mapping", "root_to_flatten_mapping"):
        mapping = getattr(resources, name, None)
        if isinstance(mapping, dict):
            mapping.clear()


def forget_operators_of_meshes() -> None:
    """Clear torch's cache of decisions about sharded operators, because its keys contain meshes whose process groups have
    ended.
    """
    from torch.distributed.tensor import DTensor, debug

    clear = getattr(debug, "_clear_sharding_prop_cache", None)
    if clear is None:
        clear = DTensor._op_dispatcher.sharding_propagator.propagate_op_sharding.cache.cache_clear
    clear()


@contextmanager
def gpu_unseen() -> Iterator[None]:
    """Hide all GPUs from modules that are imported within the context, so this process can fork later.

    A process must not use CUDA before it forks, but some libraries do so when they are imported. Even counting the GPUs is a
    use (``register_fork_handler_for_device_init``). When the context ends, caches in torch and transformers are cleared,
    because they may contain "no GPU". For example, ``torch.utils._triton`` checks only once whether the GPU supports Triton.
    """
    import torch

    # The compiler counts the GPUs only once, when it is imported. Let it count a single GPU.
    with replaced(torch.cuda, "is_available", lambda: False), replaced(torch.cuda, "device_count", lambda: 1):
        try:
            yield
        finally:
            for name in ("torch.utils._triton", "transformers.utils.import_utils"):
                for function in vars(sys.modules.get(name, object)).values():
                    if hasattr(function, "cache_clear"):
                        function.cache_clear()
