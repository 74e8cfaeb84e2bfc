"""Record allocations with their operators, autograd nodes and marks, and kernel launches, with torch's profiler."""

from __future__ import annotations

import re
from collections import Counter
from contextlib import contextmanager, suppress
from typing import TYPE_CHECKING, Any

from pytest_gpumem.base.errors import MeasuringError
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
"""The prefix of a mark's name in the profile. The mark's number follows: ``"gpumem#3"``."""

_NODE = "autograd::engine::evaluate_function: "
_ENGINE = "torch::autograd::"
# Since about torch 2.8, a profile also has events for calls of dispatch modes. They are not operators.
_DISPATCH_MODE = "PythonDispatchMode"


def tokens_of(profiler: Profile, device: torch.device) -> list[Token]:
    """Return the tokens for a device's allocations and all operators, from a stopped profiler with ``profile_memory=True``.

    If the profiler ran with ``record_shapes=True``, the tokens include the operators' input tensors. The function reads torch's
    private event tree, as `allocation_events` does, because the profiler's public results have no addresses and no nesting.

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
    """Return whether an event is a `record_function` label from the measured code or an optimizer, not a mark."""
    return event.extra_fields.scope.name == "USER_SCOPE" and not event.name.startswith(MARK_PREFIX)


def _opened(event: Any) -> SpanBegin:
    name, sequence = event.name, event.extra_fields.sequence_number
    if name.startswith(MARK_PREFIX):
        return SpanBegin(event.start_time_ns, "mark", "", mark=int(name.removeprefix(MARK_PREFIX)))
    if name.startswith(_NODE):
        return SpanBegin(
            event.start_time_ns, "node", name.removeprefix(_NODE).removeprefix(_ENGINE), _sequence_of(event)
        )
    # An operator in backward has the sequence number of its autograd node. Only the operator that made the node keeps this
    # number, so an operator in backward gets -1.
    return SpanBegin(event.start_time_ns, "operator", name, -1 if _is_backward(event) else sequence)


def _sequence_of(node: Any) -> int:
    """Return an autograd node's sequence number, which torch stores in the node's first child event."""
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
"""The number of the mark at the end of each recording. If this mark is missing, the recording was cut short."""
_CUT_SHORT = (
    "the recording of GPU allocations was cut short: only one profiler can run at a time, "
    "and the measured code started or stopped another profiler"
)


@contextmanager
def profiled(tokens: list[Token], device: torch.device, *, operands: bool = True) -> Iterator[list[Profile]]:
    """Record operators and a device's allocations within the context.

    With ``operands``, torch's profiler keeps a weak reference to each operator's input tensors until the profile is deleted.
    The storage of an ordinary tensor is freed all the same. But two kinds of tensors stay alive: the inner tensors of
    `torch.vmap` and `torch.func`, and the values of a sparse CSR tensor. For example, after
    ``torch.vmap(lambda row: (row * 2 + 1).square())(rows)`` the results of 3 operators are live instead of 2.

    Args:
        tokens: An empty list, to which the recorded tokens are added when the context ends.
        device: The device whose allocations are recorded.
        operands: Whether to record the operators' input tensors.

    Yields:
        A list with the profile. Clear the list to free the tensors kept alive by the profile.

    Raises:
        MeasuringError: The measured code started or stopped another profiler.
    """
    # torch.profiler.profile wraps this class and is part of a reference cycle, so `del` would not free its tensors at once.
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
    # If other code has stopped the profiler, torch 2.6 raises an error, and later releases return no events.
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
    """Check that the recorded allocations and frees add up to the change of the device's counter of live bytes.

    Args:
        tokens: The recorded tokens.
        change: The counter's value after the recording minus its value before, in bytes.
        device: The device's name in the error message.
        counter: The counter's name in the error message.

    Raises:
        MeasuringError: The recorded bytes do not add up to the change.
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
"""Prefixes in the names of GPU events that are not kernels: copies, fills, and CUPTI's work (``CUpti_ActivityOverheadKind``).

For example, ``Memcpy DtoH (Device -> Pageable)``. The driver decides which of these events a profile has.
"""


_FUNCTOR = re.compile(r"\w*(?:[Ff]unctor|_kernel_cuda|_kernel_impl)\w*|cutlass_\w+")
"""Matches a template argument with the name of an ATen kernel's computation, for example ``MulFunctor``."""
_LONGEST_NAME = 100


def launches_of(run: Callable[[], object], synchronize: Callable[[], None]) -> Counter[str] | None:
    """Run a function, and count its kernel launches on the GPU.

    Args:
        run: The function.
        synchronize: Waits for the GPU.

    Returns:
        The number of launches of each kernel, by the kernel's name. ``None`` if torch has no CUPTI; then ``run`` is not called.
        Also ``None`` if the profiler has no GPU events, for example because ``run`` has started another profiler.
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
        # If other code has stopped the profiler, torch 2.6 raises an error, and later releases return no events.
        with suppress(RuntimeError):
            profiler.stop()
    return kernels_in(profiler)


def kernels_in(profiler: profile) -> Counter[str] | None:
    """Return the number of launches of each kernel in a profile; ``None`` if the profile has no events from a GPU."""
    try:
        events = list(profiler.events() or ())  # type: ignore[no-untyped-call]
    except (RuntimeError, AssertionError):  # other code has stopped the profiler
        return None
    on_gpu = [event for event in events if event.device_type.name == "CUDA" and not event.is_user_annotation]
    return Counter(kernel_name(event.name) for event in on_gpu if _is_kernel(event)) if on_gpu else None


def kernel_name(signature: str) -> str:
    """Shorten a kernel's C++ signature to a name such as ``vectorized_elementwise_kernel<MulFunctor>``."""
    plain = signature.replace("(anonymous namespace)::", "").removeprefix("void ")
    path, _, arguments = plain.partition("<")
    base = path.partition("(")[0].rpartition("::")[2].strip()
    functors = _FUNCTOR.findall(arguments.rpartition(">(")[0] or arguments)
    return (f"{base}<{functors[-1]}>" if functors else base or signature)[:_LONGEST_NAME]


def _is_kernel(event: Any) -> bool:
    # Events of older torch releases do not have this attribute.
    kind = getattr(event, "activity_type", None)
    return bool(kind == "kernel") if kind else not event.name.startswith(_NO_KERNELS)
