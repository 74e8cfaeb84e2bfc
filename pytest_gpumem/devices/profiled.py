"""Recordings of torch's profiler: allocations among operators, nodes and marks, and CUDA's kernel launches."""

from __future__ import annotations

import re
from collections import Counter
from contextlib import contextmanager, suppress
from typing import TYPE_CHECKING, Any

from pytest_gpumem.devices.cuda_history import numbered_by_thread
from pytest_gpumem.measurement import MeasuringError
from pytest_gpumem.torch_support.private_api import event_tree, quiet_kineto, span, threads_of_spans
from pytest_gpumem.values.events import AllocationEvent, Close, Open, Seen

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Iterator

    import torch
    from torch.profiler import profile

    from pytest_gpumem.torch_support.private_api import Profile
    from pytest_gpumem.values.events import Token


MARK_PREFIX = "gpumem#"
"""A span of this name and a number is a mark."""

_NODE = "autograd::engine::evaluate_function: "
_ENGINE = "torch::autograd::"
# The call of a dispatch mode, since torch 2.8 or so: neither an operator nor a mark.
_DISPATCH_MODE = "PythonDispatchMode"


def tokens_of(profiler: Profile, device: torch.device) -> list[Token]:
    """Return the tokens of one thread that a stopped profiler recorded with ``profile_memory=True``.

    With ``record_shapes=True`` they include the tensors that operators took.

    The tree is private to torch, as in `allocation_events`; the public views lose addresses, nesting and order.
    """
    tokens: list[Token] = []
    stack: list[Any] = sorted(event_tree(profiler), key=lambda event: event.start_time_ns)[::-1]
    while stack:
        event = stack.pop()
        if isinstance(event, Close):
            tokens.append(event)
            continue
        kind = event.tag.name
        if kind == "Allocation":
            fields = event.extra_fields
            if fields.device.type == device.type and device.index in (None, fields.device.index):
                tokens.append(AllocationEvent(event.start_time_ns, fields.ptr, fields.alloc_size))
            continue
        if kind == "TorchOp" and event.name != _DISPATCH_MODE and not _is_of_measured_code(event):
            tokens.append(_opened(event))
            tokens.extend(_inputs(event.extra_fields.inputs))
            stack.append(Close(event.end_time_ns))
        stack.extend(reversed(event.children))
    return tokens


def _is_of_measured_code(event: Any) -> bool:
    """Return whether it is a `record_function` of the measured code, or of an optimizer: a name, and no operator."""
    return event.extra_fields.scope.name == "USER_SCOPE" and not event.name.startswith(MARK_PREFIX)


def _opened(event: Any) -> Open:
    name, sequence = event.name, event.extra_fields.sequence_number
    if name.startswith(MARK_PREFIX):
        return Open(event.start_time_ns, "mark", "", mark=int(name.removeprefix(MARK_PREFIX)))
    if name.startswith(_NODE):
        return Open(event.start_time_ns, "node", name.removeprefix(_NODE).removeprefix(_ENGINE), _sequence_of(event))
    # What a node runs has its number, too, and is not what made it.
    return Open(event.start_time_ns, "operator", name, -1 if _is_backward(event) else sequence)


def _sequence_of(node: Any) -> int:
    """Return the number of a node. It is that of its function, which torch only looks for right after the node's beginning."""
    functions = (child for child in node.children if child.tag.name == "TorchOp" and _is_backward(child))
    function = next(functions, node)
    return int(function.extra_fields.sequence_number)


def _is_backward(event: Any) -> bool:
    return bool(event.extra_fields.scope.name == "BACKWARD_FUNCTION")


def _inputs(inputs: list[Any]) -> list[Seen]:
    seen = []
    for value in inputs:
        for tensor in value if isinstance(value, list) else (value,):
            address = getattr(tensor, "storage_data_ptr", None)
            if address:
                seen.append(Seen(address, str(tensor.dtype).removeprefix("torch."), tuple(tensor.sizes)))
    return seen


_END = -1
"""The mark at the end of every recording: a recording that lacks it has lost what came before, too."""
_CUT_SHORT = (
    "the recording of GPU allocations was cut short: only one profiler can run at a time, "
    "and the measured code started or stopped another"
)


@contextmanager
def profiled(tokens: list[Token], device: torch.device, *, operands: bool = True) -> Iterator[list[Profile]]:
    """Record operators and the allocations on a device; ``tokens`` has them in the end.

    With ``operands`` torch's profiler refers weakly to each tensor that an operator takes, until the profile is deleted. A
    weak reference frees a plain tensor's storage, but not a tensor within another: the inner one of `torch.vmap` and
    `torch.func`, or the values of a sparse CSR tensor. Example: ``torch.vmap(lambda row: (row * 2 + 1).square())(rows)``
    has 3 results alive at its end instead of 2.

    Yields:
        A list with the profile, which keeps those tensors alive.

    Raises:
        MeasuringError: Another profiler came in between.
    """
    # torch.profiler.profile, which wraps it, is in a reference cycle, so deleting it would free nothing.
    from torch.autograd.profiler import profile

    profiler: Any = profile(use_kineto=True, profile_memory=True, record_shapes=operands)
    with quiet_kineto():
        profiler.__enter__()
    try:
        yield [profiler]
        with span(f"{MARK_PREFIX}{_END}"):
            pass
    except BaseException:
        with suppress(RuntimeError):
            profiler.__exit__(None, None, None)
        raise
    found: list[Token] = []
    # torch 2.6 refuses to stop what other code has stopped; later ones give no events.
    with suppress(RuntimeError):
        profiler.__exit__(None, None, None)
        found = numbered_by_thread(tokens_of(profiler, device), threads_of_spans(profiler))
    ends = [
        n for n, token in enumerate(found) if isinstance(token, Open) and (token.kind, token.mark) == ("mark", _END)
    ]
    if not ends:
        raise MeasuringError(_CUT_SHORT)
    (end,) = ends
    tokens.extend(found[:end] + found[end + 2 :])


def check_change(tokens: Iterable[Token], change: int, device: str, counter: str) -> None:
    """Raise `MeasuringError` when what was recorded of ``device`` does not change what is live as its ``counter`` has it."""
    recorded = sum(token.nbytes for token in tokens if isinstance(token, AllocationEvent))
    if recorded != change:
        raise MeasuringError(
            f"what was recorded of {device} changes what is live by {recorded} bytes, and {counter} by {change}"
        )


_NO_KERNELS = (
    "Memcpy",
    "Memset",
    "Unknown",
    "Driver Compiler",
    "Buffer Flush",
    "Instrumentation",
    "Resource",
    "Runtime Triggered Module Loading",
    "Lazy Function Loading",
    "Command Buffer Full",
    "Activity Buffer Request",
    "UVM Activity Init",
)
"""Prefixes of the names of other events of CUPTI: copies, fills, and its own work (``CUpti_ActivityOverheadKind``).

Such as ``Memcpy DtoH (Device -> Pageable)``. Which of them come depends on what the driver happens to do.
"""


_FUNCTOR = re.compile(r"\w*(?:[Ff]unctor|_kernel_cuda|_kernel_impl)\w*|cutlass_\w+")
"""Names of template arguments that say what a kernel of ATen computes."""
_LONGEST_NAME = 100


def launches_of(run: Callable[[], object], synchronize: Callable[[], None]) -> Counter[str] | None:
    """Return the kernels that ``run`` put on the GPU, by name; ``None`` without CUPTI, when it is not run, or without events.

    Only one profiler can run at a time: where ``run`` starts one of its own there are no events, either.
    """
    from torch.profiler import ProfilerActivity, profile, supported_activities

    if ProfilerActivity.CUDA not in supported_activities():  # type: ignore[no-untyped-call]
        return None
    profiler = profile(activities=[ProfilerActivity.CUDA], acc_events=True)
    with quiet_kineto():
        profiler.start()
    try:
        run()
        synchronize()
    finally:
        # torch 2.6 refuses to stop what other code has stopped; later ones give no events.
        with suppress(RuntimeError):
            profiler.stop()
    return kernels_in(profiler)


def kernels_in(profiler: profile) -> Counter[str] | None:
    """Return the kernels that ran in what was profiled, without copies and fills; ``None`` where nothing of a GPU was seen."""
    try:
        events = list(profiler.events() or ())  # type: ignore[no-untyped-call]
    except (RuntimeError, AssertionError):  # other code has stopped it
        return None
    on_gpu = [event for event in events if event.device_type.name == "CUDA" and not event.is_user_annotation]
    return Counter(kernel_name(event.name) for event in on_gpu if _is_kernel(event)) if on_gpu else None


def kernel_name(signature: str) -> str:
    """Return the short name of a kernel: ``vectorized_elementwise_kernel<MulFunctor>`` of a whole signature in C++."""
    named = signature.replace("(anonymous namespace)::", "").removeprefix("void ")
    path, _, arguments = named.partition("<")
    base = path.partition("(")[0].rpartition("::")[2].strip()
    functors = _FUNCTOR.findall(arguments.rpartition(">(")[0] or arguments)
    return (f"{base}<{functors[-1]}>" if functors else base or signature)[:_LONGEST_NAME]


def _is_kernel(event: Any) -> bool:
    # Older releases of torch have no such attribute.
    kind = getattr(event, "activity_type", None)
    return bool(kind == "kernel") if kind else not event.name.startswith(_NO_KERNELS)
