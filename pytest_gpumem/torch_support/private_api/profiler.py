"""PyTorch's profiler: events, spans, and settings of Kineto."""

from __future__ import annotations

import os
from contextlib import contextmanager
from functools import partial
from typing import TYPE_CHECKING, Any, cast

from pytest_gpumem.base.variables import KINETO_LOG_LEVEL
from pytest_gpumem.facts.values.events import AllocationEvent, Threads
from pytest_gpumem.torch_support.private_api.attributes import replaced

if TYPE_CHECKING:
    from collections.abc import Iterator
    from contextlib import AbstractContextManager
    from typing import TypeAlias

    import torch.autograd.profiler
    import torch.profiler

    Profile: TypeAlias = torch.profiler.profile | torch.autograd.profiler.profile
    """A profiler of either class. `torch.profiler.profile` contains a `torch.autograd.profiler.profile`."""


def allocation_events(profiler: Profile) -> list[AllocationEvent]:
    """Return all allocations and frees in a stopped profiler with ``profile_memory=True``, in order.

    The profiler's public tables add up allocations by operator, without addresses. Its event tree has each allocation with its
    address.
    """
    # The tree is walked in order and sorted() is stable, so events in the same nanosecond are not reordered.
    return sorted(_allocations(event_tree(profiler)), key=lambda event: event.time_ns)


def event_tree(profiler: Profile) -> list[Any]:
    """Return the event tree of a stopped profiler.

    An operator's children in this tree are the operators that it called, and its allocations.
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


def span(name: str) -> AbstractContextManager[object]:
    """Return a context that a profile shows as a span with a name. Dispatch modes do not intercept this span.

    The public `torch.profiler.record_function` calls an operator, so selective checkpointing would cache this operator's
    result.
    """
    from torch._C._profiler import _RecordFunctionFast

    return cast("AbstractContextManager[object]", _RecordFunctionFast(name))


@contextmanager
def quiet_kineto() -> Iterator[None]:
    """Prevent Kineto (torch's profiler library) from writing to stderr whenever a profiler starts or stops.

    Kineto reads its log level from an environment variable when it is used for the first time. So the variable is set before
    this moment.
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
    # An empty set of scopes would mean all scopes. So name a scope in which steps run no operators: the Static Runtime's.
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
