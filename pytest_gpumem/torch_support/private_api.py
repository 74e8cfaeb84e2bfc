"""Private names of torch that measuring needs, each behind a function with a test of its behaviour in any release."""

from __future__ import annotations

import importlib
import os
import platform
import sys
import warnings
from contextlib import contextmanager, nullcontext, suppress
from functools import cache, partial, wraps
from typing import TYPE_CHECKING, Any, ParamSpec, TypeVar, cast

from pytest_gpumem.values.events import AllocationEvent, Threads
from pytest_gpumem.variables import KINETO_LOG_LEVEL

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator, Mapping, Sequence
    from contextlib import AbstractContextManager
    from types import FunctionType
    from typing import TypeAlias

    import torch.autograd.profiler
    import torch.profiler
    from torch.utils.flop_counter import FlopCounterMode

    Profile: TypeAlias = torch.profiler.profile | torch.autograd.profiler.profile
    """The second is what the first wraps."""

P = ParamSpec("P")
R = TypeVar("R")

MODULE_PARTS = {"modules": "_modules", "parameters": "_parameters", "buffers": "_buffers"}
"""The attributes in which a module keeps its parts by name: dicts, but in scripted modules."""


@contextmanager
def replaced(owner: Any, name: str, value: object) -> Iterator[None]:
    """Have an attribute of a module or class be ``value`` within the context."""
    before = getattr(owner, name)
    setattr(owner, name, value)
    try:
        yield
    finally:
        setattr(owner, name, before)


def peak_resets(device_type: str) -> list[tuple[str, str]]:
    """Return modules and names of torch's functions that reset a peak of this type of device; a release may lack some."""
    public = (f"torch.{device_type}", f"torch.{device_type}.memory", "torch.accelerator", "torch.accelerator.memory")
    private = (f"_{device_type}_resetPeakMemoryStats", "_accelerator_resetPeakStats")
    return [*((module, "reset_peak_memory_stats") for module in public), *(("torch._C", name) for name in private)]


def allocation_events(profiler: Profile) -> list[AllocationEvent]:
    """Return the allocations that a stopped profiler recorded with ``profile_memory=True``, in their order.

    The public views of a profile add allocations up by operator and lose their addresses; the event tree has both.
    """
    # sorted() is stable and the tree is walked in order, so that events of the same nanosecond keep theirs.
    return sorted(_allocations(event_tree(profiler)), key=lambda event: event.time_ns)


def event_tree(profiler: Profile) -> list[Any]:
    """Return what a stopped profiler recorded, as a tree: operators, what they called, and allocations within."""
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
            # Each attribute of torch's events is converted anew when it is read.
            fields = event.extra_fields
            if fields.device.type == "cpu":
                yield AllocationEvent(event.start_time_ns, fields.ptr, fields.alloc_size)


def bfloat16_instructions() -> str | None:
    """Return the instructions for bfloat16 that oneDNN finds on an x86 CPU, or ``None`` if torch cannot tell.

    oneDNN picks its kernels by them, and they take different workspaces: a training step of the example's GPT in bfloat16 with
    checkpointing allocates 27.74 MB with ``AMX``, 27.80 MB with ``AVX512_BF16`` and 29.29 MB with ``none`` beside AVX-512.
    """
    import torch

    has_amx = getattr(torch.cpu, "_is_amx_tile_supported", None)
    has_bf16 = getattr(torch.cpu, "_is_avx512_bf16_supported", None)
    if has_amx is None or has_bf16 is None or platform.machine().lower() not in ("x86_64", "amd64"):
        return None
    return "AMX" if has_amx() else "AVX512_BF16" if has_bf16() else "none"


def clear_cublas_workspaces() -> None:
    """Free the workspaces that cuBLAS keeps for each handle and stream (33,554,432 bytes each on an H100).

    Otherwise the first matrix product of a process is taken for a leak of the test that runs it
    (pytorch/pytorch#95668).
    """
    import torch

    torch._C._cuda_clearCublasWorkspaces()


def run_in_backward(call: Callable[[], object], device: torch.device) -> None:
    """Call ``call`` in the thread in which autograd runs backward of tensors on ``device``, on the current stream.

    It allocates nothing. When it returns, that thread has let go of what earlier passes left it: it drops a pass's last
    gradients only after it has woken whoever waits for them, and takes up the next one afterwards.
    """
    import torch

    with torch.inference_mode(False), torch.enable_grad():
        empty = torch.empty(0, device=device, requires_grad=True)
        result: Any = _node_that_calls().apply(empty, call)
        torch.autograd.backward([result], [result.detach()])


@cache
def _node_that_calls() -> Any:
    import torch

    class Calling(torch.autograd.Function):
        @staticmethod
        def forward(ctx: Any, tensor: torch.Tensor, call: Callable[[], object]) -> torch.Tensor:
            ctx.call = call
            return tensor.view_as(tensor)

        @staticmethod
        def backward(ctx: Any, *_: torch.Tensor) -> tuple[None, None]:
            ctx.call()
            return None, None

    return Calling


def parts_of_coo(tensor: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """Return indices and values of a sparse COO tensor, coalesced or not; the public accessors refuse the latter."""
    import torch

    # The base class's methods: a subclass may have others of these names.
    base: Any = torch.Tensor
    return base._indices(tensor), base._values(tensor)


def reduced_with_attribute(
    reduced: tuple[Any, ...], kind: type[torch.Tensor], name: str, value: object
) -> tuple[Any, ...]:
    """Return what a tensor of a class is pickled as so that an attribute is set when it is read.

    Args:
        reduced: Its pickled form, as ``__reduce_ex__`` returns it.
        kind: Its class.
        name: The attribute, to which ``value`` is assigned.
        value: What `torch.load` reads with ``weights_only``, too.
    """
    from torch._tensor import _rebuild_from_type_v2

    rebuild, arguments = reduced
    return _rebuild_from_type_v2, (rebuild, kind, arguments, {name: value})


def run_kernel(operator: Any, key: str, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    """Run an operator's kernel past the modes: those see the operators that the kernel calls.

    Args:
        operator: An operator of ``torch.ops``, one overload of it.
        key: The dispatch key that names the kernel: ``CPU``, ``CUDA``, ``SparseCUDA``, ``SparseCsrCUDA``, or the like.
        args: What the operator is given.
        kwargs: What it is given by name.

    Returns:
        What the kernel returns.
    """
    from torch._C import DispatchKey, DispatchKeySet

    return operator.redispatch(DispatchKeySet(getattr(DispatchKey, key)), *args, **kwargs)


def is_higher_order(operator: object) -> bool:
    """Return whether an operator takes functions: `torch.cond`, ``while_loop`` and ``flex_attention`` do."""
    from torch._ops import HigherOrderOperator

    return isinstance(operator, HigherOrderOperator)


def compiled_graphs() -> int:
    """Return how many graphs torch.compile has compiled in this process, recompiled ones included."""
    if "torch._dynamo" not in sys.modules:
        return 0
    from torch._dynamo.utils import counters

    return int(counters["stats"]["unique_graphs"])


def activation_memory_budget(fraction: float) -> AbstractContextManager[object]:
    """Limit what torch.compile saves to ``fraction`` (0 to 1) of the activations that it saves by default."""
    import torch._functorch.config

    return cast("AbstractContextManager[object]", torch._functorch.config.patch(activation_memory_budget=fraction))


def load_compiler() -> None:
    """Load torch.compile's default backend now, quietly: the import warns of torch's own use of torch.jit."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        importlib.import_module("torch._inductor.compile_fx")


def compiles_within_modes() -> bool:
    """Return whether torch.compile compiles within a dispatch mode that allows it: older releases (2.6) run all eagerly."""
    from torch.utils._python_dispatch import TorchDispatchMode

    return hasattr(TorchDispatchMode, "ignore_compile_internals")


def never_compiled(function: Callable[P, R]) -> Callable[P, R]:
    """Return ``function`` as one that torch.compile runs as it is, with all that it calls.

    As ``torch.compiler.disable`` does it, which loads the compiler with the first call.
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
    """Return torch's counter of FLOPs, which also knows these operators, and does not load the compiler.

    torch keeps torch.compile out of its mode by a wrapper, which loads the compiler with the first call.
    """
    from torch.utils import flop_counter as counters

    mode = getattr(counters, "_FlopCounterMode", None)
    function = getattr(getattr(mode, "__torch_dispatch__", None), "__wrapped__", None)
    if function is not None and not hasattr(function, "__dynamo_disable"):
        function.__dynamo_disable = never_compiled(function)
    return counters.FlopCounterMode(display=False, custom_mapping={**custom_mapping})


def span(name: str) -> AbstractContextManager[object]:
    """Open a span of that name in a profile, which no mode sees.

    `torch.profiler.record_function` is an operator itself: selective checkpointing counts it among those that it caches.
    """
    from torch._C._profiler import _RecordFunctionFast

    return cast("AbstractContextManager[object]", _RecordFunctionFast(name))


def watched_operators(
    called: Callable[[Any, tuple[Any, ...], dict[str, Any], Callable[[], Any]], Any],
) -> AbstractContextManager[object]:
    """Call ``called(operator, args, kwargs, run)`` in the place of every operator below autograd, which ``run()`` runs.

    It has to be entered before `flop_counter`, which keeps torch.compile out of what is called here. Private: the module of
    the mode, although its documentation recommends it for this.
    """
    from torch.utils._python_dispatch import TorchDispatchMode

    class Watch(TorchDispatchMode):  # type: ignore[no-untyped-call]
        supports_higher_order_operators = True

        @classmethod
        def _should_skip_dynamo(cls) -> bool:
            return False  # what keeps the compiler out would load it

        def __torch_dispatch__(
            self, func: Any, _types: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
        ) -> Any:
            kwargs = kwargs or {}
            return called(func, args, kwargs, lambda: func(*args, **kwargs))

    mode: AbstractContextManager[object] = Watch()  # type: ignore[no-untyped-call]
    return mode


def outside_torch_function() -> AbstractContextManager[object]:
    """Call torch functions within the context past every `TorchFunctionMode` and subclass of a tensor."""
    import torch

    return cast("AbstractContextManager[object]", torch._C.DisableTorchFunction())


def takes_numbers_for_tensors(name: str) -> bool:
    """Return whether an operator (``"mul"``) takes numbers for its tensors: ``torch.ops.aten.mul(tensor, 2)``."""
    import torch

    return bool(torch._C._should_allow_numbers_as_tensors(name))


def unwrapped(tensor: torch.Tensor) -> torch.Tensor:
    """Return the tensor within the wrappers of `torch.func`'s transformations and of `torch.export`, which have no storage."""
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
    """Return whether `torch.jit.trace` records the operators of this thread."""
    import torch

    return torch._C._get_tracing_state() is not None


@contextmanager
def untraced() -> Iterator[Callable[[Callable[P, R]], Callable[P, R]]]:
    """Keep torch calls within the context out of the trace that `torch.jit.trace` records.

    A trace turns sizes into tensors: ``tensor.numel() == 0`` then calls ``Tensor.__bool__``, and adds operators to the trace.

    Yields:
        A wrapper for the program's own functions, which it runs as a part of the trace again.
    """
    import torch

    core: Any = torch._C
    state = core._get_tracing_state()
    included, excluded = core._dispatch_tls_local_include_set(), core._dispatch_tls_local_exclude_set()
    # The state cannot be changed within an operator, where the tracer's key is excluded.
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
    """Run torch within the context beneath all modes and subclasses of a tensor, of functions and of operators."""
    import torch

    with torch._C.DisableTorchFunction(), torch._C._DisableTorchDispatch():
        yield


@contextmanager
def engine_run_within(around: Callable[[Sequence[Any]], AbstractContextManager[object]]) -> Iterator[None]:
    """Run autograd's engine in ``around(roots)``: what backward calls in Python is then under a `TorchFunctionMode` again.

    ``backward`` and ``grad`` are overridable functions themselves, and while a mode handles one it is off. Where a release
    has no such name, backward runs without the mode. The roots of the graph are tensors, or edges with a node.
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
    """Return whether `engine_run_within` has an effect: a release may lack the name that it replaces."""
    import torch

    return hasattr(torch.autograd, _ENGINE_RUN)


def replace_python_of_backward(
    *,
    differentiating: Callable[[Callable[..., Any]], Callable[..., Any]],
    unpacking: Callable[[Callable[..., Any]], Callable[..., Any]],
) -> None:
    """Replace, for good, each function in Python that autograd's engine is given to call by what is returned for it.

    Args:
        differentiating: Given hooks of tensors and of nodes of the graph (by which those of modules are made), ``apply`` of
            `torch.autograd.Function` in backward, and what is called when backward is done.
        unpacking: Given hooks that unpack saved tensors.
    """
    import torch
    from torch.autograd.function import BackwardCFunction, _HookMixin
    from torch.autograd.graph import saved_tensors_hooks

    tensor: Any = torch.Tensor
    for name in ("register_hook", "register_post_accumulate_grad_hook"):
        setattr(tensor, name, _registering(getattr(tensor, name), differentiating))
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
        setattr(cls, name, _registering_pairs(getattr(cls, name), unpacking))


def _registering(
    register: Callable[..., Any], by: Callable[[Callable[..., Any]], Callable[..., Any]]
) -> Callable[..., Any]:
    @wraps(register)
    def register_it(self: object, hook: Callable[..., Any]) -> Any:
        return register(self, by(hook))

    return register_it


def _registering_pairs(
    register: Callable[..., Any], by: Callable[[Callable[..., Any]], Callable[..., Any]]
) -> Callable[..., Any]:
    import torch

    def register_them(self: object, pack_hook: Callable[..., Any], unpack_hook: Callable[..., Any]) -> Any:
        # torch.compile takes graphs into its own.
        return register(self, pack_hook, unpack_hook if isinstance(unpack_hook, torch.nn.Module) else by(unpack_hook))

    return register_them


def saved_by(node: Any) -> list[Any]:
    """Return what a node of the autograd graph saved for backward: tensors, or what a pack hook made of them.

    Nothing is unpacked, so no hook runs. The list is empty if backward has freed the tensors, or if ``SavedTensor`` has no
    ``data`` in this release of torch.
    """
    saved: list[Any] = [getattr(node, "variable", None)]  # of the node that accumulates a leaf's gradient
    for name in dir(type(node)):
        if not name.startswith("_raw_saved_"):
            continue
        with suppress(RuntimeError):
            raw = getattr(node, name)
            saved += (getattr(one, "data", None) for one in (raw if type(raw) in (tuple, list) else (raw,)))
    return saved


def next_nodes(node: Any) -> list[Any]:
    """Return the nodes that a node of the autograd graph leads to."""
    return [other for other, _ in node.next_functions if other is not None]


def next_node_number() -> int:
    """Return the number that autograd gives to the next node of the graph that this thread makes."""
    import torch

    return int(torch.autograd._get_sequence_nr())  # type: ignore[attr-defined]


def running_node_number() -> int | None:
    """Return the number of the node of the graph that runs in this thread; ``None`` outside of backward."""
    import torch

    node = torch._C._current_autograd_node()
    return None if node is None else int(node._sequence_nr())


def running_node_name() -> str | None:
    """Return the name of the node of the graph that runs in this thread (``"ProdBackward0"``); ``None`` outside of backward."""
    import torch

    node = torch._C._current_autograd_node()
    return None if node is None else str(node.name())


@contextmanager
def outside_autocast(device_type: str) -> Iterator[None]:
    """Run as outside of any autocast: neither switched on, nor one at whose end cached casts would be freed.

    torch frees the copies when the outermost autocast ends, so within another one they would outlive a forward pass.
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
    """Allow or forbid TF32 in float32 matrix products, convolutions and recurrent layers of a GPU, within the context.

    Since torch 2.9 each backend has a setting of its own. The older, common ones are set to the same before: to ask for one
    that differs fails, and ``torch.backends.cudnn.flags`` asks, which models use around a loss.
    """
    import torch

    cudnn, matmul = torch.backends.cudnn, torch.backends.cuda.matmul
    common = _asked(torch.get_float32_matmul_precision), _asked(lambda: cudnn.allow_tf32)
    own: list[Any] = [matmul, cudnn.conv, cudnn.rnn] if hasattr(matmul, "fp32_precision") else []  # type: ignore[attr-defined]
    before = [holder.fp32_precision for holder in own]
    try:
        torch.set_float32_matmul_precision("high" if allowed else "highest")
        cudnn.allow_tf32 = allowed
        for holder in own:
            holder.fp32_precision = "tf32" if allowed else "ieee"
        yield
    finally:
        products, convolutions = common
        if products is not None:
            torch.set_float32_matmul_precision(products)
        if convolutions is not None:
            cudnn.allow_tf32 = convolutions
        for holder, precision in zip(own, before, strict=True):
            holder.fp32_precision = precision


def _asked(setting: Callable[[], R]) -> R | None:
    """Return a common setting; ``None`` where it has no value, as those of its parts differ."""
    try:
        return setting()
    except RuntimeError:
        return None


@contextmanager
def quiet_kineto() -> Iterator[None]:
    """Keep Kineto from writing to stderr at every start and stop, by the variable that it reads when first used."""
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
    """Let a profiler that is started within the context record no operators, of which there are more than allocations.

    Recording them and reading the profile take most of a reading's time. Allocations are recorded by another way.
    """
    import torch.autograd.profiler
    from torch._C._profiler import RecordScope

    profiler: Any = torch.autograd.profiler
    enable = profiler._enable_profiler
    scopes: Any = RecordScope
    # None would be all. In this one is only what runs in the Static Runtime, where no step does.
    with replaced(profiler, "_enable_profiler", partial(enable, scopes={scopes.STATIC_RUNTIME_MODEL})):
        yield


def threads_of_spans(profiler: Profile) -> dict[int, Threads]:
    """Return the threads of what a stopped profiler recorded, by the time (ns) at which it began.

    The event tree does not have the thread that made a node of the autograd graph.
    """
    autograd_profiler: Any = getattr(profiler, "profiler", profiler)
    threads: dict[int, Threads] = {}
    for event in autograd_profiler.kineto_results.events():
        threads.setdefault(event.start_ns(), Threads(event.start_thread_id(), event.fwd_thread_id()))
    return threads


def cuda_has_allocated(index: int) -> bool:
    """Return whether the CUDA allocator has given bytes on a GPU to this process so far, freed or not.

    The public statistics are sorted and flattened each time. All four of this one are looked at, as each can be reset.
    """
    import torch

    return any(torch._C._cuda_memoryStats(index)["allocated_bytes"]["all"].values())


def cuda_history_is_on() -> bool:
    """Return whether the history of the CUDA caching allocator is being recorded."""
    import torch

    return bool(torch._C._cuda_isHistoryEnabled())


def cublas_workspace_sizes() -> frozenset[int]:
    """Return the bytes of cuBLAS's and cuBLASLt's workspaces as they are set now; none where a release does not tell."""
    import torch

    names = ("_cuda_getCublasWorkspaceSize", "_cuda_getCublasLtWorkspaceSize")
    sizes = (getattr(torch._C, name, int)() for name in names)
    return frozenset(size for size in sizes if size)


MOST_ENTRIES = 2**20
"""The number of allocations and frees that a history without frames keeps: the latest."""


def start_cuda_history(*, frames: bool = True) -> None:
    """Record every allocation and free of the CUDA caching allocator, allocations with the Python ``frames`` that made them.

    Not the frames of frees: memory is freed while an exception is on its way, by which checkpointing stops early, for one, and
    torch 2.11 loses the exception when it reads the frames then (``SystemError: ... returned NULL without setting``).
    """
    import torch

    record = torch.cuda.memory._record_memory_history
    if frames:
        record("all", context="alloc", stacks="python")
    else:
        record("all", context=None, stacks="python", max_entries=MOST_ENTRIES)


def stop_cuda_history() -> None:
    """Stop recording the history of the CUDA caching allocator, and forget it."""
    import torch

    torch.cuda.memory._record_memory_history(None)


def cuda_snapshot() -> dict[str, Any]:
    """Return the state and the history of the CUDA caching allocator, as ``torch.cuda.memory._dump_snapshot`` writes it.

    Taking it is an entry of the history, too.
    """
    import torch

    return cast("dict[str, Any]", torch.cuda.memory._snapshot())


def allocate_on_cuda(nbytes: int, device: torch.device) -> int:
    """Return the address of a new block of the CUDA caching allocator. Raises ``torch.OutOfMemoryError``."""
    import torch

    return int(torch.cuda.caching_allocator_alloc(nbytes, device))


def free_on_cuda(address: int) -> None:
    """Give a block back to the CUDA caching allocator."""
    import torch

    torch.cuda.caching_allocator_delete(address)  # type: ignore[no-untyped-call]


def current_dispatch_mode() -> object | None:
    """Return the innermost dispatch mode of this thread."""
    from torch.utils._python_dispatch import _get_current_dispatch_mode

    mode: object | None = _get_current_dispatch_mode()
    return mode


def in_backward() -> bool:
    """Return whether this thread is running a backward pass."""
    import torch

    return torch._C._current_graph_task_id() != -1


def when_cuda_begins(call: Callable[[], None]) -> None:
    """Call ``call`` when this process first uses CUDA, or now if it has: a process that forks must not have."""
    import torch

    torch.cuda._lazy_call(call)  # type: ignore[no-untyped-call]


def observe_out_of_memory(call: Callable[[int, int, int, int], None]) -> None:
    """Call ``call(device, requested, total, free)`` (bytes) each time that an allocation is about to fail for good.

    It runs in the thread that allocates, before the error is raised. CUDA must have begun, or be about to
    (`when_cuda_begins`). The driver's allocator, ``cudaMallocAsync``, has no such observer.
    """
    import torch

    if torch.cuda.get_allocator_backend() == "native":
        torch._C._cuda_attach_out_of_memory_observer(call)  # type: ignore[attr-defined]


def expandable_segments_are_on() -> bool:
    """Return whether the CUDA caching allocator now uses expandable segments, however that was set."""
    import torch

    if torch.cuda.get_allocator_backend() != "native":
        return False
    return bool(cuda_snapshot().get("allocator_settings", {}).get("expandable_segments", False))


def print_by_way_of_the_host(within: Callable[[], AbstractContextManager[object]] = nullcontext) -> None:
    """Print tensors of a GPU from a copy on the host, and all in the context ``within()``.

    Printing switches dispatch modes off and selects elements on the GPU, and an emulated one does not count them.
    """
    import torch

    original = cast("Callable[[torch.Tensor, int], str]", torch._tensor_str._tensor_str)

    def printed(tensor: torch.Tensor, indent: int) -> str:
        with within():
            return original(tensor.detach().cpu() if tensor.is_cuda else tensor, indent)

    torch._tensor_str._tensor_str = printed


def remember_functions_that_take_a_device() -> None:
    """Have a default device apply to torch's functions, although others stand in their place from now on.

    ``torch.device`` as a context and ``torch.set_default_device`` look a function up in a set that torch makes at first use.
    """
    from torch.utils import _device

    _device._device_constructors()


def script_as(function: Callable[..., object], operator: str) -> None:
    """Let TorchScript take a Python function that stands in the place of a built-in one for that ``operator``."""
    from torch.jit import _builtins

    builtins: Any = _builtins
    builtins._register_builtin(function, f"aten::{operator}")


def around_scripts(around: Callable[[Any, tuple[Any, ...]], AbstractContextManager[object]]) -> None:
    """Have TorchScript's functions and methods run within a context when Python calls them, for good.

    Args:
        around: Is given the function or method, and what it is called with.
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
    """Return the types of the lists that a function or method of TorchScript makes by ``tolist``, such as ``List[int]``."""
    graph = script.inlined_graph  # its nodes last no longer
    return [str(node.output().type()) for node in graph.findAllNodes("prim::tolist", True)]


@contextmanager
def around_collectives(
    waited: Callable[[], None], broadcasting: Callable[[], AbstractContextManager[object]]
) -> Iterator[None]:
    """Have ``waited`` run when Python has waited for a collective, and broadcasts of many tensors run within a context.

    `DistributedDataParallel` makes those, of tensors that it joins meanwhile. It waits for others in C++, which is not seen.
    """
    import torch.distributed as dist

    if not dist.is_available():
        yield
        return
    from torch.distributed import _functional_collectives as functional

    def followed(wait: Callable[P, R]) -> Callable[P, R]:
        @wraps(wait)
        def wait_and_tell(*args: P.args, **kwargs: P.kwargs) -> R:
            result = wait(*args, **kwargs)
            waited()
            return result

        return wait_and_tell

    def within(broadcast: Callable[P, R]) -> Callable[P, R]:
        @wraps(broadcast)
        def broadcast_within(*args: P.args, **kwargs: P.kwargs) -> R:
            with broadcasting():
                return broadcast(*args, **kwargs)

        return broadcast_within

    anything: Any = dist
    with (
        replaced(dist.Work, "wait", followed(dist.Work.wait)),
        replaced(functional, "wait_tensor", followed(functional.wait_tensor)),
        replaced(dist, "_broadcast_coalesced", within(anything._broadcast_coalesced)),
    ):
        yield


FAKE = "fake"
"""The backend of a process group whose other ranks are not there."""


def store_of_nobody() -> Any:
    """Return the store of a process group of backend `FAKE`, whose collectives return at once.

    Each returns this rank's own parts in place of the others', or leaves the output as it was, by release.
    """
    from torch.testing._internal.distributed.fake_pg import FakeStore

    return FakeStore()


def forget_meshes() -> None:
    """Forget device meshes whose process groups are gone: torch would take them for equal ones that come later."""
    from torch.distributed import device_mesh

    forget_operators_of_meshes()
    resources = getattr(device_mesh, "_mesh_resources", None)
    for name in ("child_to_root_mapping", "root_to_flatten_mapping"):
        known = getattr(resources, name, None)
        if isinstance(known, dict):
            known.clear()


def forget_operators_of_meshes() -> None:
    """Forget how operators were run on tensors of a mesh, which torch remembers by mesh, whose process group may be gone."""
    from torch.distributed.tensor import DTensor, debug

    clear = getattr(debug, "_clear_sharding_prop_cache", None)
    if clear is None:
        clear = DTensor._op_dispatcher.sharding_propagator.propagate_op_sharding.cache.cache_clear
    clear()


@contextmanager
def gpu_unseen() -> Iterator[None]:
    """Have what is imported within find no GPU, as some libraries begin to use it at once: a forked process cannot, then.

    Counting GPUs is such a use, too (``register_fork_handler_for_device_init``). What torch and transformers
    have kept of that they found none is forgotten: ``torch.utils._triton`` asks once whether a GPU has Triton.
    """
    import torch

    # The compiler knows as many by their number as are counted when it is loaded.
    with replaced(torch.cuda, "is_available", lambda: False), replaced(torch.cuda, "device_count", lambda: 1):
        try:
            yield
        finally:
            for name in ("torch.utils._triton", "transformers.utils.import_utils"):
                for function in vars(sys.modules.get(name, object)).values():
                    if hasattr(function, "cache_clear"):
                        function.cache_clear()
