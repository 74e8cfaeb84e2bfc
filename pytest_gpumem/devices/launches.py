"""Kernels that CUDA launched, as CUPTI tells them through the profiler."""

from __future__ import annotations

import re
from collections import Counter
from contextlib import suppress
from typing import TYPE_CHECKING, Any

from pytest_gpumem.torch_support.private_api import quiet_kineto

if TYPE_CHECKING:
    from collections.abc import Callable

    from torch.profiler import profile

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
"""How the names of what else CUPTI tells begin: copies, fills, and its own work (``CUpti_ActivityOverheadKind``).

Such as ``Memcpy DtoH (Device -> Pageable)``. Which of them come depends on what the driver happens to do.
"""


_FUNCTOR = re.compile(r"\w*(?:[Ff]unctor|_kernel_cuda|_kernel_impl)\w*|cutlass_\w+")
"""What a kernel of ATen's computes, by the names of its template's arguments."""
_LONGEST_NAME = 100


def launches_of(run: Callable[[], object], synchronize: Callable[[], None]) -> Counter[str] | None:
    """Kernels that ``run`` put on the GPU, by name; ``None`` where there is no CUPTI, and then it is not run, or
    it tells nothing.

    Only one profiler can run at a time: where ``run`` starts one of its own there is no telling, either.
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
        # torch 2.6 refuses to stop what somebody else has stopped; later ones give no events.
        with suppress(RuntimeError):
            profiler.stop()
    return kernels_in(profiler)


def kernels_in(profiler: profile) -> Counter[str] | None:
    """The kernels that ran in what was profiled, without copies and fills; ``None`` where nothing of a GPU was seen."""
    try:
        events = list(profiler.events() or ())  # type: ignore[no-untyped-call]
    except (RuntimeError, AssertionError):  # somebody else has stopped it
        return None
    on_gpu = [event for event in events if event.device_type.name == "CUDA" and not event.is_user_annotation]
    return Counter(kernel_name(event.name) for event in on_gpu if _is_kernel(event)) if on_gpu else None


def kernel_name(signature: str) -> str:
    """The short name of a kernel: ``vectorized_elementwise_kernel<MulFunctor>`` of a whole signature in C++."""
    named = signature.replace("(anonymous namespace)::", "").removeprefix("void ")
    path, _, arguments = named.partition("<")
    base = path.partition("(")[0].rpartition("::")[2].strip()
    functors = _FUNCTOR.findall(arguments.rpartition(">(")[0] or arguments)
    return (f"{base}<{functors[-1]}>" if functors else base or signature)[:_LONGEST_NAME]


def _is_kernel(event: Any) -> bool:
    # Older releases of torch do not tell.
    kind = getattr(event, "activity_type", None)
    return bool(kind == "kernel") if kind else not event.name.startswith(_NO_KERNELS)
