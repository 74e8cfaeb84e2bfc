"""torch's private names, each behind a function. A test checks each function's behaviour in every supported release."""

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
    """Either kind of profiler: `torch.profiler.profile` wraps `torch.autograd.profiler.profile`."""

P = ParamSpec("P")
R = TypeVar("R")

MODULE_PARTS = {"modules": "_modules", "parameters": "_parameters", "buffers": "_buffers"}
"""The attributes in which a module keeps its parts by name. They are dicts, except in scripted modules."""


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
    """Return the module and name of each torch function to reset a peak on this device type. A release may lack some."""
    public = (f"torch.{device_type}", f"torch.{device_type}.memory", "torch.accelerator", "torch.accelerator.memory")
    private = (f"_{device_type}_resetPeakMemoryStats", "_accelerator_resetPeakStats")
    return [*((module, "reset_peak_memory_stats") for module in public), *(("torch._C", name) for name in private)]


def allocation_events(profiler: Profile) -> list[AllocationEvent]:
    """Return the allocations, in order, from a stopped profiler with ``profile_memory=True``.

    A profile's public views sum up allocations by operator and lose their addresses. The event tree keeps each allocation with
    its address.
    """
    # sorted() is stable and the tree is walked in order, so events at the same nanosecond keep their order.
    return sorted(_allocations(event_tree(profiler)), key=lambda event: event.time_ns)


def event_tree(profiler: Profile) -> list[Any]:
    """Return the event tree of a stopped profiler: operators with their callees and allocations."""
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
            # Each read of an attribute converts the value again.
            fields = event.extra_fields
            if fields.device.type == "cpu":
                yield AllocationEvent(event.start_time_ns, fields.ptr, fields.alloc_size)


def bfloat16_instructions() -> str | None:
    """Return oneDNN's bfloat16 instructions on an x86 CPU, or ``None`` if torch cannot tell.

    oneDNN picks its kernels by these instructions, and the kernels need different workspaces. A bfloat16 training step of the
    example's GPT with checkpointing allocates 27.74 MB with ``AMX``, 27.80 MB with ``AVX512_BF16``, and 29.29 MB with ``none``
    on a CPU with AVX-512.
    """
    import torch

    has_amx = getattr(torch.cpu, "_is_amx_tile_supported", None)
    has_bf16 = getattr(torch.cpu, "_is_avx512_bf16_supported", None)
    if has_amx is None or has_bf16 is None or platform.machine().lower() not in ("x86_64", "amd64"):
        return None
    return "AMX" if has_amx() else "AVX512_BF16" if has_bf16() else "none"


def clear_cublas_workspaces() -> None:
    """Free the workspaces that cuBLAS keeps for each handle and stream (33,554,432 bytes each on an H100).

    Otherwise the first matrix product of a process looks like a leak in its test (pytorch/pytorch#95668).
    """
    import torch

    torch._C._cuda_clearCublasWorkspaces()


def run_in_backward(call: Callable[[], object], device: torch.device) -> None:
    """Call ``call`` in autograd's backward thread for ``device``, on the current stream, without allocations.

    Afterwards, the thread has released everything from earlier backward passes. At the end of a pass, the thread first wakes
    the waiting threads and then drops the last gradients, always before the next pass.

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
    """Return indices and values of a sparse COO tensor. The public accessors reject an uncoalesced tensor."""
    import torch

    # Use the base class's methods, because a subclass may redefine these names.
    base: Any = torch.Tensor
    return base._indices(tensor), base._values(tensor)


def reduced_with_attribute(
    reduced: tuple[Any, ...], kind: type[torch.Tensor], name: str, value: object
) -> tuple[Any, ...]:
    """Return a tensor's pickled form with an additional attribute, which is set when the tensor is loaded.

    Args:
        reduced: The pickled form from ``__reduce_ex__``.
        kind: The tensor's class.
        name: The attribute's name.
        value: The attribute's value, which `torch.load` must be able to read with ``weights_only``.
    """
    from torch._tensor import _rebuild_from_type_v2

    rebuild, arguments = reduced
    return _rebuild_from_type_v2, (rebuild, kind, arguments, {name: value})


def run_kernel(operator: Any, key: str, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    """Run an operator's kernel, bypassing the modes. The modes still see the operators that the kernel calls.

    For example, ``run_kernel(torch.ops.aten.add.Tensor, "CPU", (x, y), {})`` adds two tensors on the CPU.

    Args:
        operator: An overload of an operator in ``torch.ops``.
        key: The kernel's dispatch key: ``CPU``, ``CUDA``, ``SparseCUDA``, ``SparseCsrCUDA``, or similar.
        args: The operator's positional arguments.
        kwargs: The operator's keyword arguments.

    Returns:
        The kernel's result.
    """
    from torch._C import DispatchKey, DispatchKeySet

    return operator.redispatch(DispatchKeySet(getattr(DispatchKey, key)), *args, **kwargs)


def is_higher_order(operator: object) -> bool:
    """Return whether an operator takes functions as arguments. Examples are `torch.cond` and ``flex_attention``."""
    from torch._ops import HigherOrderOperator

    return isinstance(operator, HigherOrderOperator)


def compiled_graphs() -> int:
    """Return how many graphs torch.compile has compiled in this process, including recompiled graphs."""
    if "torch._dynamo" not in sys.modules:
        return 0
    from torch._dynamo.utils import counters

    return int(counters["stats"]["unique_graphs"])


def activation_memory_budget(fraction: float) -> AbstractContextManager[object]:
    """Limit torch.compile's saved activations to ``fraction`` (0 to 1) of the default."""
    import torch._functorch.config

    return cast("AbstractContextManager[object]", torch._functorch.config.patch(activation_memory_budget=fraction))


def load_compiler() -> None:
    """Load torch.compile's default backend now. Silence the import, because it warns about torch.jit in torch itself."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        importlib.import_module("torch._inductor.compile_fx")


def compiles_within_modes() -> bool:
    """Return whether torch.compile compiles within a dispatch mode that allows it.

    Within such a mode, older releases (2.6) run eagerly.
    """
    from torch.utils._python_dispatch import TorchDispatchMode

    return hasattr(TorchDispatchMode, "ignore_compile_internals")


def never_compiled(function: Callable[P, R]) -> Callable[P, R]:
    """Return a wrapper around ``function`` that torch.compile does not compile, including all callees.

    `torch.compiler.disable` does the same, but loads the compiler at the first call.
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
    """Return torch's FLOP counter, extended by ``custom_mapping``, without loading the compiler.

    torch wraps its mode to keep torch.compile out, and this wrapper would load the compiler at the first call.
    """
    from torch.utils import flop_counter as counters

    mode = getattr(counters, "_FlopCounterMode", None)
    function = getattr(getattr(mode, "__torch_dispatch__", None), "__wrapped__", None)
    if function is not None and not hasattr(function, "__dynamo_disable"):
        function.__dynamo_disable = never_compiled(function)
    return counters.FlopCounterMode(display=False, custom_mapping={**custom_mapping})


def span(name: str) -> AbstractContextManager[object]:
    """Open a span with a name in a profile, invisible to all modes.

    `torch.profiler.record_function` is an operator itself, so selective checkpointing would count it as a cached operator.
    """
    from torch._C._profiler import _RecordFunctionFast

    return cast("AbstractContextManager[object]", _RecordFunctionFast(name))


def watched_operators(
    called: Callable[[Any, tuple[Any, ...], dict[str, Any], Callable[[], Any]], Any],
) -> AbstractContextManager[object]:
    """Call ``called`` in place of every operator below autograd.

    Enter this context before `flop_counter`, which keeps torch.compile out of ``called``. The mode's module is private,
    although torch's documentation recommends the mode for this purpose.

    Args:
        called: Called as ``called(operator, args, kwargs, run)``, where ``run()`` runs the operator. Its result replaces the
            operator's result. For example, ``lambda operator, args, kwargs, run: run()`` changes nothing.
    """
    from torch.utils._python_dispatch import TorchDispatchMode

    class Watch(TorchDispatchMode):  # type: ignore[no-untyped-call]
        supports_higher_order_operators = True

        @classmethod
        def _should_skip_dynamo(cls) -> bool:
            return False  # the code that keeps the compiler out would load the compiler

        def __torch_dispatch__(
            self, func: Any, _types: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
        ) -> Any:
            kwargs = kwargs or {}
            return called(func, args, kwargs, lambda: func(*args, **kwargs))

    mode: AbstractContextManager[object] = Watch()  # type: ignore[no-untyped-call]
    return mode


def outside_torch_function() -> AbstractContextManager[object]:
    """Bypass every `TorchFunctionMode` and tensor subclass for torch functions called within the context."""
    import torch

    return cast("AbstractContextManager[object]", torch._C.DisableTorchFunction())


def takes_numbers_for_tensors(name: str) -> bool:
    """Return whether an operator (``"mul"``) accepts numbers in place of tensors: ``torch.ops.aten.mul(tensor, 2)``."""
    import torch

    return bool(torch._C._should_allow_numbers_as_tensors(name))


def unwrapped(tensor: torch.Tensor) -> torch.Tensor:
    """Return the tensor inside the wrappers of `torch.func` and `torch.export`, because wrappers have no storage."""
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
    """Return whether `torch.jit.trace` records this thread's operators."""
    import torch

    return torch._C._get_tracing_state() is not None


@contextmanager
def untraced() -> Iterator[Callable[[Callable[P, R]], Callable[P, R]]]:
    """Keep torch calls within the context out of `torch.jit.trace`'s trace.

    A trace turns sizes into tensors. ``tensor.numel() == 0`` then calls ``Tensor.__bool__``, and adds operators to the trace.

    Yields:
        A wrapper for the program's own functions. A wrapped function is traced again.
    """
    import torch

    core: Any = torch._C
    state = core._get_tracing_state()
    included, excluded = core._dispatch_tls_local_include_set(), core._dispatch_tls_local_exclude_set()
    # The tracing state cannot be changed within an operator, because the tracer's key is excluded there.
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
    """Run torch within the context below all function modes, dispatch modes and tensor subclasses."""
    import torch

    with torch._C.DisableTorchFunction(), torch._C._DisableTorchDispatch():
        yield


@contextmanager
def engine_run_within(around: Callable[[Sequence[Any]], AbstractContextManager[object]]) -> Iterator[None]:
    """Run autograd's engine within ``around(roots)``, so a `TorchFunctionMode` sees the Python functions in backward.

    ``backward`` and ``grad`` are overridable functions themselves, and a mode is off while handling such a function. If a
    release lacks the replaced name, backward runs without the mode.

    Args:
        around: Returns a context. Its argument is the list of the graph's roots, which are tensors or edges with a node.
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
    """Return whether `engine_run_within` has an effect. A release may lack the replaced name."""
    import torch

    return hasattr(torch.autograd, _ENGINE_RUN)


def replace_python_of_backward(
    *,
    differentiating: Callable[[Callable[..., Any]], Callable[..., Any]],
    unpacking: Callable[[Callable[..., Any]], Callable[..., Any]],
) -> None:
    """Wrap all Python functions that autograd's engine calls, until the process ends.

    For example, ``tensor.register_hook(hook)`` then registers ``differentiating(hook)``.

    Args:
        differentiating: Wraps tensor hooks, node hooks (module hooks use them), ``apply`` of `torch.autograd.Function` in
            backward, and callbacks at the end of backward.
        unpacking: Wraps hooks that unpack saved tensors.
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
    """Return ``register`` with its hook wrapped."""

    @wraps(register)
    def register_wrapped(self: object, hook: Callable[..., Any]) -> Any:
        return register(self, wrap(hook))

    return register_wrapped


def _wrapping_unpack_hook(
    register: Callable[..., Any], wrap: Callable[[Callable[..., Any]], Callable[..., Any]]
) -> Callable[..., Any]:
    """Return ``register`` with the second of its two hooks wrapped."""
    import torch

    def register_wrapped(self: object, pack_hook: Callable[..., Any], unpack_hook: Callable[..., Any]) -> Any:
        # torch.compile inlines a hook that is a graph, so leave graphs unwrapped.
        return register(self, pack_hook, unpack_hook if isinstance(unpack_hook, torch.nn.Module) else wrap(unpack_hook))

    return register_wrapped


def saved_by(node: Any) -> list[Any]:
    """Return the tensors that an autograd node saved for backward, in their packed form if there was a pack hook.

    Nothing is unpacked, so no hook runs. The list is empty if backward has freed the tensors, or if ``SavedTensor`` has no
    ``data`` in this torch release.

    For example, the node of ``(x * y).sum()``'s product saved ``x`` and ``y``.
    """
    saved: list[Any] = [getattr(node, "variable", None)]  # set on the node that accumulates a leaf's gradient
    for name in dir(type(node)):
        if not name.startswith("_raw_saved_"):
            continue
        with suppress(RuntimeError):
            raw = getattr(node, name)
            saved += (getattr(value, "data", None) for value in (raw if type(raw) in (tuple, list) else (raw,)))
    return saved


def next_nodes(node: Any) -> list[Any]:
    """Return the autograd nodes that follow a node in backward."""
    return [other for other, _ in node.next_functions if other is not None]


def next_node_number() -> int:
    """Return autograd's number for this thread's next node."""
    import torch

    return int(torch.autograd._get_sequence_nr())  # type: ignore[attr-defined]


def running_node_number() -> int | None:
    """Return the number of this thread's running autograd node; ``None`` outside of backward."""
    import torch

    node = torch._C._current_autograd_node()
    return None if node is None else int(node._sequence_nr())


def running_node_name() -> str | None:
    """Return the name of this thread's running autograd node (``"ProdBackward0"``); ``None`` outside of backward."""
    import torch

    node = torch._C._current_autograd_node()
    return None if node is None else str(node.name())


@contextmanager
def outside_autocast(device_type: str) -> Iterator[None]:
    """Leave all surrounding autocast contexts within this context, with autocast off.

    torch caches cast weights and frees them when the outermost autocast ends. Inside another autocast the copies
    would outlive a forward pass.
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

    Since torch 2.9 each backend has its own setting. This context also sets the older common settings to the same value first,
    because reading a common setting raises an error if a backend's setting differs. Models read common settings around a loss
    with ``torch.backends.cudnn.flags``.
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
    """Return a common setting; ``None`` if the backends' settings differ, so there is no common value."""
    try:
        return setting()
    except RuntimeError:
        return None


@contextmanager
def quiet_kineto() -> Iterator[None]:
    """Keep Kineto from writing to stderr at every start and stop. Kineto reads its log level's variable at its first use."""
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
    """Record no operators in a profiler that starts within the context, only allocations.

    There are many more operators than allocations, so recording and reading them takes most of a reading's time. torch records
    allocations separately from operators.
    """
    import torch.autograd.profiler
    from torch._C._profiler import RecordScope

    profiler: Any = torch.autograd.profiler
    enable = profiler._enable_profiler
    scopes: Any = RecordScope
    # An empty set would mean all scopes. This scope only has the Static Runtime's operators, and no step uses this runtime.
    with replaced(profiler, "_enable_profiler", partial(enable, scopes={scopes.STATIC_RUNTIME_MODEL})):
        yield


def threads_of_spans(profiler: Profile) -> dict[int, Threads]:
    """Return the threads for a stopped profiler's events, by start time in nanoseconds.

    The event tree lacks the thread that created an autograd node.
    """
    autograd_profiler: Any = getattr(profiler, "profiler", profiler)
    threads: dict[int, Threads] = {}
    for event in autograd_profiler.kineto_results.events():
        threads.setdefault(event.start_ns(), Threads(event.start_thread_id(), event.fwd_thread_id()))
    return threads


def cuda_has_allocated(index: int) -> bool:
    """Return whether this process has ever allocated with the CUDA allocator on a GPU, including freed bytes.

    The public statistics sort and flatten everything at each call. All four counters are checked, because each can be reset.
    """
    import torch

    return any(torch._C._cuda_memoryStats(index)["allocated_bytes"]["all"].values())


def cuda_history_is_on() -> bool:
    """Return whether torch records the CUDA caching allocator's history."""
    import torch

    return bool(torch._C._cuda_isHistoryEnabled())


def cublas_workspace_sizes() -> frozenset[int]:
    """Return the current sizes of cuBLAS's and cuBLASLt's workspaces in bytes; empty if the release does not expose them."""
    import torch

    names = ("_cuda_getCublasWorkspaceSize", "_cuda_getCublasLtWorkspaceSize")
    sizes = (getattr(torch._C, name, int)() for name in names)
    return frozenset(size for size in sizes if size)


MOST_ENTRIES = 2**20
"""The most entries in a history without frames. Older entries are lost."""


def start_cuda_history(*, frames: bool = True) -> None:
    """Record every allocation and free in the CUDA caching allocator.

    Frees are recorded without frames. Memory may be freed while an exception propagates, for example when checkpointing stops
    early. If torch 2.11 reads frames at that time, the exception is lost (``SystemError: ... returned NULL without setting``).

    Args:
        frames: Whether to record the allocations' Python frames.
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
    """Return the CUDA caching allocator's state and history, as in ``torch.cuda.memory._dump_snapshot``.

    The call adds an entry to the history.
    """
    import torch

    return cast("dict[str, Any]", torch.cuda.memory._snapshot())


def allocate_on_cuda(nbytes: int, device: torch.device) -> int:
    """Allocate a block with the CUDA caching allocator and return its address. Raises ``torch.OutOfMemoryError``."""
    import torch

    return int(torch.cuda.caching_allocator_alloc(nbytes, device))


def free_on_cuda(address: int) -> None:
    """Return a block to the CUDA caching allocator."""
    import torch

    torch.cuda.caching_allocator_delete(address)  # type: ignore[no-untyped-call]


def current_dispatch_mode() -> object | None:
    """Return this thread's innermost dispatch mode; ``None`` if no mode is active."""
    from torch.utils._python_dispatch import _get_current_dispatch_mode

    mode: object | None = _get_current_dispatch_mode()
    return mode


def in_backward() -> bool:
    """Return whether this thread runs a backward pass."""
    import torch

    return torch._C._current_graph_task_id() != -1


def when_cuda_begins(call: Callable[[], None]) -> None:
    """Call ``call`` when this process first uses CUDA, or now if already in use. A forking process must not use CUDA."""
    import torch

    torch.cuda._lazy_call(call)  # type: ignore[no-untyped-call]


def observe_out_of_memory(call: Callable[[int, int, int, int], None]) -> None:
    """Call ``call`` each time that an allocation is about to fail.

    The call happens in the allocating thread, before the error is raised. CUDA must be initialised, or about to be
    (`when_cuda_begins`). The driver's allocator, ``cudaMallocAsync``, has no such observer.

    Args:
        call: Called as ``call(device, requested, total, free)``, with sizes in bytes.
    """
    import torch

    if torch.cuda.get_allocator_backend() == "native":
        torch._C._cuda_attach_out_of_memory_observer(call)  # type: ignore[attr-defined]


def expandable_segments_are_on() -> bool:
    """Return whether the CUDA caching allocator uses expandable segments, independently of how this was set."""
    import torch

    if torch.cuda.get_allocator_backend() != "native":
        return False
    return bool(cuda_snapshot().get("allocator_settings", {}).get("expandable_segments", False))


def print_by_way_of_the_host(within: Callable[[], AbstractContextManager[object]] = nullcontext) -> None:
    """Print GPU tensors from a copy on the host, until the process ends.

    Printing switches dispatch modes off and selects elements on the GPU. An emulated GPU would not see these operators.

    Args:
        within: Returns a context for all printing.
    """
    import torch

    original = cast("Callable[[torch.Tensor, int], str]", torch._tensor_str._tensor_str)

    def printed(tensor: torch.Tensor, indent: int) -> str:
        with within():
            return original(tensor.detach().cpu() if tensor.is_cuda else tensor, indent)

    torch._tensor_str._tensor_str = printed


def remember_functions_that_take_a_device() -> None:
    """Have a default device apply to torch's current functions, even if they are replaced later.

    ``torch.device`` as a context and ``torch.set_default_device`` look functions up in a set that torch builds at first use.
    """
    from torch.utils import _device

    _device._device_constructors()


def script_as(function: Callable[..., object], operator: str) -> None:
    """Let TorchScript compile a Python function as the built-in ``operator`` that it replaces."""
    from torch.jit import _builtins

    builtins: Any = _builtins
    builtins._register_builtin(function, f"aten::{operator}")


def around_scripts(around: Callable[[Any, tuple[Any, ...]], AbstractContextManager[object]]) -> None:
    """Run TorchScript functions and methods within a context when Python calls them, until the process ends.

    Args:
        around: Returns the context. Its arguments are the function or method, and the tuple of call arguments.
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
    """Return the list types that a TorchScript function or method creates with ``tolist``: ``List[int]``."""
    graph = script.inlined_graph  # this reference keeps the graph's nodes alive
    return [str(node.output().type()) for node in graph.findAllNodes("prim::tolist", True)]


@contextmanager
def around_collectives(
    waited: Callable[[], None], broadcasting: Callable[[], AbstractContextManager[object]]
) -> Iterator[None]:
    """Observe collectives within the context.

    `DistributedDataParallel` joins many tensors and broadcasts them at once. It waits for other ranks in C++, and this function
    cannot observe these waits.

    Args:
        waited: Called after Python has waited for a collective.
        broadcasting: Returns a context for each broadcast of many tensors.
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
"""The backend for a process group without real other ranks."""


def store_of_nobody() -> Any:
    """Return the store for a process group with the backend `FAKE`, whose collectives return at once.

    Depending on the release, a collective returns this rank's own parts in place of the other ranks' parts, or leaves its
    output unchanged.
    """
    from torch.testing._internal.distributed.fake_pg import FakeStore

    return FakeStore()


def forget_meshes() -> None:
    """Forget device meshes whose process groups have ended. Otherwise torch would reuse them for equal meshes later."""
    from torch.distributed import device_mesh

    forget_operators_of_meshes()
    resources = getattr(device_mesh, "_mesh_resources", None)
    for name in ("child_to_root_mapping", "root_to_flatten_mapping"):
        mapping = getattr(resources, name, None)
        if isinstance(mapping, dict):
            mapping.clear()


def forget_operators_of_meshes() -> None:
    """Clear torch's cache for sharded operators. Its keys are meshes, and their process groups may have ended."""
    from torch.distributed.tensor import DTensor, debug

    clear = getattr(debug, "_clear_sharding_prop_cache", None)
    if clear is None:
        clear = DTensor._op_dispatcher.sharding_propagator.propagate_op_sharding.cache.cache_clear
    clear()


@contextmanager
def gpu_unseen() -> Iterator[None]:
    """Hide all GPUs from modules that are imported within the context.

    Some libraries use the GPU when they are imported, and a process that forks later must not. Counting GPUs is already a use
    (``register_fork_handler_for_device_init``). At the end, torch and transformers forget that they found no GPU. For example,
    ``torch.utils._triton`` checks only once whether a GPU has Triton.
    """
    import torch

    # The compiler counts the GPUs only once, when it is loaded. Let it count a single GPU.
    with replaced(torch.cuda, "is_available", lambda: False), replaced(torch.cuda, "device_count", lambda: 1):
        try:
            yield
        finally:
            for name in ("torch.utils._triton", "transformers.utils.import_utils"):
                for function in vars(sys.modules.get(name, object)).values():
                    if hasattr(function, "cache_clear"):
                        function.cache_clear()
