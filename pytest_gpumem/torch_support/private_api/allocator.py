"""PyTorch's allocators: peaks, history, blocks, cuBLAS workspaces."""

from __future__ import annotations

import os
import sys
import threading
from contextlib import ExitStack, contextmanager
from functools import wraps
from pathlib import Path
from typing import TYPE_CHECKING, Any, ParamSpec, TypeVar, cast

from pytest_gpumem.torch_support.private_api.attributes import replaced

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator

    import torch.autograd.profiler
    import torch.profiler

P = ParamSpec("P")
R = TypeVar("R")


def peak_resets(device_type: str) -> list[tuple[str, str]]:
    """Return the module and name of each torch function that resets a device type's peak statistics.

    A torch release may lack some of these functions.
    """
    public = (f"torch.{device_type}", f"torch.{device_type}.memory", "torch.accelerator", "torch.accelerator.memory")
    private = (f"_{device_type}_resetPeakMemoryStats", "_accelerator_resetPeakStats")
    return [*((module, "reset_peak_memory_stats") for module in public), *(("torch._C", name) for name in private)]


PEAK_READERS = ("_cuda_memoryStats", "_accelerator_getDeviceStats")
"""Functions in ``torch._C`` that return the statistics of a GPU's allocator. A torch release may lack some of them."""


def cuda_statistics(index: int) -> dict[str, Any]:
    """Return the statistics of a GPU's allocator in bytes, for example under ``["allocated_bytes"]["all"]["peak"]``."""
    import torch

    return torch._C._cuda_memoryStats(index)


def clear_cublas_workspaces() -> None:
    """Free the workspaces that cuBLAS allocates once for each handle and stream (33,554,432 bytes each on an H100).

    If they stayed allocated, the first matrix product in a process would look like a leak in its test (pytorch/pytorch#95668).
    """
    import torch

    torch._C._cuda_clearCublasWorkspaces()


def cuda_has_allocated(index: int) -> bool:
    """Return whether this process has ever allocated memory with the CUDA allocator on a GPU, even if it was freed.

    torch's public function for statistics is slower, because it flattens and sorts all statistics. The allocator has four
    counters of bytes: current, peak, allocated and freed. Any of them may have been reset to 0, so all are checked.
    """
    return any(cuda_statistics(index)["allocated_bytes"]["all"].values())


def cuda_frees(index: int) -> int:
    """Return how many blocks this process has freed on a GPU."""
    return int(cuda_statistics(index)["allocation"]["all"]["freed"])


def cuda_history_is_on() -> bool:
    """Return whether torch currently records the history of the CUDA caching allocator."""
    import torch

    return bool(torch._C._cuda_isHistoryEnabled())


def cublas_workspace_sizes() -> frozenset[int]:
    """Return the sizes in bytes of a cuBLAS and a cuBLASLt workspace; empty if the torch release does not report them."""
    import torch

    names = ("_cuda_getCublasWorkspaceSize", "_cuda_getCublasLtWorkspaceSize")
    sizes = (getattr(torch._C, name, int)() for name in names)
    return frozenset(size for size in sizes if size)


MOST_ENTRIES = 2**20
"""A history without Python frames contains at most this many entries. Older entries are lost."""
HISTORY_SWITCHES = ("_cuda_record_memory_history", "_cuda_record_memory_history_legacy")
"""Functions in ``torch._C`` through which torch starts and stops the history."""


def start_cuda_history(*, frames: bool = True, native: bool = False, most_entries: int | None = None) -> None:
    """Start to record every allocation and free in the CUDA caching allocator.

    Frees are recorded without Python frames, because memory may be freed while an exception propagates, for example when
    checkpointing stops early. If torch 2.11 reads frames at that moment, the exception is lost (``SystemError: ... returned
    NULL without setting``).

    Args:
        frames: Whether to record the Python frames of each allocation.
        native: Whether to record the C++ frames as well. Call this only after `native_frames.names_native_frames`.
        most_entries: The length of a history with frames on each GPU, or ``None`` for no limit. Older entries are lost.
    """
    import torch

    record = torch.cuda.memory._record_memory_history
    if frames:
        limit = {} if most_entries is None else {"max_entries": most_entries}
        record("all", context="alloc", stacks="all" if native else "python", **limit)
    else:
        record("all", context=None, stacks="python", max_entries=MOST_ENTRIES)


def stop_cuda_history() -> None:
    """Stop recording the CUDA caching allocator's history, and delete it."""
    import torch

    torch.cuda.memory._record_memory_history(None)


@contextmanager
def before_history_changes(call: Callable[[], None]) -> Iterator[None]:
    """Within the context, call a function before torch starts or stops the CUDA caching allocator's history."""
    import torch

    def calling(switch: Callable[P, R]) -> Callable[P, R]:
        @wraps(switch)
        def run(*args: P.args, **kwargs: P.kwargs) -> R:
            call()
            return switch(*args, **kwargs)

        return run

    with ExitStack() as stack:
        for name in HISTORY_SWITCHES:
            if hasattr(torch._C, name):
                stack.enter_context(replaced(torch._C, name, calling(getattr(torch._C, name))))
        yield


def cuda_snapshot() -> dict[str, Any]:
    """Return the CUDA caching allocator's state and recorded history, as ``torch.cuda.memory._dump_snapshot`` writes them.

    This call itself adds an entry to the history. It does not import the compiler: to name the frames, torch looks for the
    attribute ``torch._inductor``, which torch imports on request. In a thread, this import fails if another thread imports
    ``torch._dynamo``.
    """
    import torch

    caller = threading.get_ident()
    on_request = vars(torch)["__getattr__"]

    def attribute(name: str) -> object:
        if name == "_inductor" and threading.get_ident() == caller:
            raise AttributeError(name)
        return on_request(name)

    with replaced(torch, "__getattr__", attribute):
        return cast("dict[str, Any]", torch.cuda.memory._snapshot())


def note_on_allocations(text: str) -> None:
    """Let the history show a text as ``user_metadata`` at each further allocation in this thread. Torch 2.6 lacks this."""
    import torch

    note = getattr(torch._C, "_cuda_setMemoryMetadata", None)
    if note is not None:
        note(text)


def allocate_on_cuda(nbytes: int, device: torch.device) -> int:
    """Allocate a block with the CUDA caching allocator, and return its address.

    Raises:
        torch.OutOfMemoryError: Memory ran out.
    """
    import torch

    return int(torch.cuda.caching_allocator_alloc(nbytes, device))


def free_on_cuda(address: int) -> None:
    """Return a block to the CUDA caching allocator."""
    import torch

    torch.cuda.caching_allocator_delete(address)  # type: ignore[no-untyped-call]


def when_cuda_begins(call: Callable[[], None]) -> None:
    """Call a function when this process uses CUDA for the first time, or now if it already uses CUDA.

    So a process can prepare for CUDA without using CUDA, and can still fork.
    """
    import torch

    torch.cuda._lazy_call(call)  # type: ignore[no-untyped-call]


def observe_use_of_cuda(call: Callable[[str], None]) -> None:
    """From now on, call a function when a program asks for CUDA, also on a machine without a GPU.

    A program asks for CUDA if it calls ``torch.cuda.is_available()`` itself, or by its first use of CUDA, for example
    ``tensor.to("cuda")``.

    Args:
        call: A function with the path of the file that asks. If torch itself calls ``is_available()``, this is a file of torch.
    """
    import torch

    own_folder = f"{Path(torch.__file__).parent}{os.sep}"

    def observed(function: Callable[P, R], *, is_use: bool) -> Callable[P, R]:
        @wraps(function)
        def run(*args: P.args, **kwargs: P.kwargs) -> R:
            frame = sys._getframe(1)
            while is_use and frame.f_back is not None and frame.f_code.co_filename.startswith(own_folder):
                frame = frame.f_back
            call(frame.f_code.co_filename)
            return function(*args, **kwargs)

        return run

    torch.cuda.is_available = observed(torch.cuda.is_available, is_use=False)
    torch.cuda._lazy_init = observed(torch.cuda._lazy_init, is_use=True)


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
    """Return whether the CUDA caching allocator uses expandable segments, as its current settings say.

    The environment variable is not read, because a program may have changed the setting.
    """
    import torch

    if torch.cuda.get_allocator_backend() != "native":
        return False
    return bool(cuda_snapshot().get("allocator_settings", {}).get("expandable_segments", False))


@contextmanager
def gpu_unseen() -> Iterator[None]:
    """Hide all GPUs from modules that are imported within the context, so this process can fork later.

    A process must not use CUDA before it forks, but some libraries use CUDA when they are imported. Even counting the GPUs
    counts as a use (``register_fork_handler_for_device_init``). When the context ends, caches in torch and transformers are
    cleared, because they may contain "no GPU". For example, ``torch.utils._triton`` checks only once whether the GPU supports
    Triton.
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
