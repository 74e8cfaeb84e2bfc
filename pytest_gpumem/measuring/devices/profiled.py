"""Recordings from torch's profiler: allocations with their operators, nodes and marks, and CUDA's kernel launches."""

from __future__ import annotations

import re
from collections import Counter
from contextlib import contextmanager, suppress
from typing import TYPE_CHECKING, Any

from pytest_gpumem.facts.measurement import MeasuringError
from pytest_gpumem.facts.values.events import AllocationEvent, SpanBegin, SpanEnd, TensorRecord
from pytest_gpumem.measuring.devices.cuda_history import numbered_by_thread
from pytest_gpumem.torch_support.private_api.profiler import event_tree, quiet_kineto, span, threads_of_spans

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Iterator

    import torch
    from torch.profiler import profile

    from pytest_gpumem.facts.values.events import Token
    from pytest_gpumem.torch_support.private_api.profiler import Profile


MARK_PREFIX = "gpumem#"
"""The prefix of a mark's name, which ends with the mark's number: ``"gpumem#3"``."""

_NODE = "autograd::engine::evaluate_function: "
_ENGINE = "torch::autograd::"
# The call of a dispatch mode (since about torch 2.8) is neither an operator nor a mark.
_DISPATCH_MODE = "PythonDispatchMode"


def tokens_of(profiler: Profile, device: torch.device) -> list[Token]:
    """Return a thread's tokens from a stopped profiler with ``profile_memory=True``.

    With ``record_shapes=True`` they include the operators' input tensors. The function reads torch's private event tree, as
    `allocation_events` does, because the public views lose addresses, nesting and order.

    For example, ``x + x`` on 256 float32 values gives a ``SpanBegin`` called ``aten::add``, a ``TensorRecord`` for each
    operand, an ``AllocationEvent`` of 1024 bytes and a ``SpanEnd``.
    """
    tokens: list[Token] = []
    stack: list[Any] = sorted(event_tree(profiler), key=lambda event: event.start_time_ns)[::-1]
    while stack:
        event = stack.pop()
        if isinstance(event, SpanEnd):
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
            stack.append(SpanEnd(event.end_time_ns))
        stack.extend(reversed(event.children))
    return tokens


def _is_of_measured_code(event: Any) -> bool:
    """Return whether an event is a label: a `record_function` from the measured code or an optimizer."""
    return event.extra_fields.scope.name == "USER_SCOPE" and not event.name.startswith(MARK_PREFIX)


def _opened(event: Any) -> SpanBegin:
    name, sequence = event.name, event.extra_fields.sequence_number
    if name.startswith(MARK_PREFIX):
        return SpanBegin(event.start_time_ns, "mark", "", mark=int(name.removeprefix(MARK_PREFIX)))
    if name.startswith(_NODE):
        return SpanBegin(
            event.start_time_ns, "node", name.removeprefix(_NODE).removeprefix(_ENGINE), _sequence_of(event)
        )
    # An operator inside a node has the node's number, but did not create the node.
    return SpanBegin(event.start_time_ns, "operator", name, -1 if _is_backward(event) else sequence)


def _sequence_of(node: Any) -> int:
    """Return a node's number, which torch stores in the node's first child event, its function."""
    functions = (child for child in node.children if child.tag.name == "TorchOp" and _is_backward(child))
    function = next(functions, node)
    return int(function.extra_fields.sequence_number)


def _is_backward(event: Any) -> bool:
    return bool(event.extra_fields.scope.name == "BACKWARD_FUNCTION")


def _inputs(inputs: list[Any]) -> list[TensorRecord]:
    operands = []
    for value in inputs:
        for tensor in value if isinstance(value, list) else (value,):
            address = getattr(tensor, "storage_data_ptr", None)
            if address:
                operands.append(TensorRecord(address, str(tensor.dtype).removeprefix("torch."), tuple(tensor.sizes)))
    return operands


_END = -1
"""The mark at the end of each recording. If this mark is missing, earlier events are missing as well."""
_CUT_SHORT = (
    "the recording of GPU allocations was cut short: only one profiler can run at a time, "
    "and the measured code started or stopped another"
)


@contextmanager
def profiled(tokens: list[Token], device: torch.device, *, operands: bool = True) -> Iterator[list[Profile]]:
    """Record operators, and allocations on a device. ``tokens`` is filled at the end.

    With ``operands``, torch's profiler holds a weak reference to each tensor that an operator takes, until the profile is
    deleted. The weak reference lets a plain tensor's storage be freed. But inner tensors stay alive: the inner tensor of
    `torch.vmap` and `torch.func`, and the values of a sparse CSR tensor. For example,
    ``torch.vmap(lambda row: (row * 2 + 1).square())(rows)`` ends with 3 live results instead of 2.

    Args:
        tokens: The list to fill.
        device: The device whose allocations are recorded.
        operands: Whether to record the operators' input tensors.

    Yields:
        A list with the profile. The profile keeps the inner tensors alive.

    Raises:
        MeasuringError: Another profiler ran in the meantime.
    """
    # torch.profiler.profile wraps this class in a reference cycle, so deleting the wrapper would free nothing.
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
    recording: list[Token] = []
    # torch 2.6 raises if other code has stopped the profiler; later releases return no events.
    with suppress(RuntimeError):
        profiler.__exit__(None, None, None)
        recording = numbered_by_thread(tokens_of(profiler, device), threads_of_spans(profiler))
    ends = [
        n
        for n, token in enumerate(recording)
        if isinstance(token, SpanBegin) and (token.kind, token.mark) == ("mark", _END)
    ]
    if not ends:
        raise MeasuringError(_CUT_SHORT)
    (end,) = ends
    tokens.extend(recording[:end] + recording[end + 2 :])


def check_change(tokens: Iterable[Token], change: int, device: str, counter: str) -> None:
    """Check the recorded allocations and frees against the change of a counter.

    Args:
        tokens: The recorded tokens.
        change: The change of the counter, in bytes.
        device: The device's name for the message.
        counter: The counter's name for the message.

    Raises:
        MeasuringError: The sums differ.
    """
    recorded = sum(token.nbytes for token in tokens if isinstance(token, AllocationEvent))
    if recorded != change:
        raise MeasuringError(
            f"the recorded events of {device} change the live bytes by {recorded}, but {counter} changed by {change}"
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
"""Name prefixes for CUPTI events other than kernels: copies, fills and CUPTI's own work (``CUpti_ActivityOverheadKind``).

For example, ``Memcpy DtoH (Device -> Pageable)``. The set of events differs between runs, depending on the driver.
"""


_FUNCTOR = re.compile(r"\w*(?:[Ff]unctor|_kernel_cuda|_kernel_impl)\w*|cutlass_\w+")
"""Names of template arguments that describe an ATen kernel's computation."""
_LONGEST_NAME = 100


def launches_of(run: Callable[[], object], synchronize: Callable[[], None]) -> Counter[str] | None:
    """Run a function, and count its kernel launches on the GPU.

    Args:
        run: The function.
        synchronize: Waits for the GPU.

    Returns:
        The number of launches by kernel name. ``None`` without CUPTI, in which case the function does not run. ``None`` if
        there are no events, for example because ``run`` starts a profiler and only one can run at a time.
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
        # torch 2.6 raises if other code has stopped the profiler; later releases return no events.
        with suppress(RuntimeError):
            profiler.stop()
    return kernels_in(profiler)


def kernels_in(profiler: profile) -> Counter[str] | None:
    """Return the kernels in a profile, without copies and fills; ``None`` if the profile has no events from a GPU."""
    try:
        events = list(profiler.events() or ())  # type: ignore[no-untyped-call]
    except (RuntimeError, AssertionError):  # other code has stopped the profiler
        return None
    on_gpu = [event for event in events if event.device_type.name == "CUDA" and not event.is_user_annotation]
    return Counter(kernel_name(event.name) for event in on_gpu if _is_kernel(event)) if on_gpu else None


def kernel_name(signature: str) -> str:
    """Return the short name of a kernel from its C++ signature: ``vectorized_elementwise_kernel<MulFunctor>``."""
    plain = signature.replace("(anonymous namespace)::", "").removeprefix("void ")
    path, _, arguments = plain.partition("<")
    base = path.partition("(")[0].rpartition("::")[2].strip()
    functors = _FUNCTOR.findall(arguments.rpartition(">(")[0] or arguments)
    return (f"{base}<{functors[-1]}>" if functors else base or signature)[:_LONGEST_NAME]


def _is_kernel(event: Any) -> bool:
    # Older torch releases lack this attribute.
    kind = getattr(event, "activity_type", None)
    return bool(kind == "kernel") if kind else not event.name.startswith(_NO_KERNELS)
