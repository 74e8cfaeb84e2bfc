"""Count torch's allocations on the CPU in this process, in all threads, and record their call stacks.

The library `native/allocation_counter.c` counts. Its bytes are those that PyTorch's profiler reports for a single thread,
except for memory that processes share: a block in shared memory is not counted.
"""

from __future__ import annotations

import ctypes
import sys
from contextlib import nullcontext
from functools import cached_property
from typing import TYPE_CHECKING, Any

import torch

from pytest_gpumem.base.errors import MeasuringError
from pytest_gpumem.emulating.emulated_process.allocation_counter import AllocationCounter

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping
    from contextlib import AbstractContextManager

    from pytest_gpumem.emulating.emulated_process.counter_history import CounterHistory
    from pytest_gpumem.emulating.emulated_process.usage import Workspaces

_TEST_BYTES = 4096
MOST_ENTRIES = 3 * 2**17
"""The most entries in a history. A tensor has two, and a node in autograd's graph has one. 125,000 entries with C++ frames took
50 MB (torch 2.13). 100,000 allocations with their nodes took 4 s more on a busy core."""
_BEGIN = ctypes.CFUNCTYPE(None)


class CpuStatistics:
    """The statistics of torch's allocator for the CPU in this process. A fork counts its own allocations."""

    device_type = "cpu"
    is_kept = True

    @property
    def counts(self) -> bool:
        """False if this process prepares batches for another process, as `DataLoader` workers do.

        Chance decides how many batches are prepared at a time. A worker by spawn imports the program first, so tensors may have
        been counted before the process is known as a worker.
        """
        data = sys.modules.get("torch.utils.data")
        return data is None or data.get_worker_info() is None

    @property
    def own_history(self) -> CpuStatistics:
        """The history, which this object records itself."""
        return self

    def __init__(self, library: str) -> None:
        """Begin to count.

        torch uses a single intra-op thread from now on, as in the test's own process, because some kernels allocate memory for
        each thread. Otherwise bytes would depend on the number of cores.

        Args:
            library: The path of the compiled library.

        Raises:
            MeasuringError: The library does not count here. The message is a clause.
        """
        self._counter = AllocationCounter(library)
        self._library = self._counter.library
        self._begin: Any = _BEGIN()
        torch.set_num_threads(1)
        is_found = self._counter.is_prepared and self._library.counter_install()
        self._library.counter_begin(None)  # a session within a measured process has forks that count for the session
        if not is_found or not self._counts():
            raise MeasuringError(
                f"torch {torch.__version__} allocates memory on the CPU by functions that cannot be counted"
            )

    def _counts(self) -> bool:
        """Return whether a test allocation is counted exactly."""
        before = self._counter.figures()
        storage = torch.UntypedStorage(_TEST_BYTES)  # type: ignore[no-untyped-call]
        during = self._counter.figures()
        del storage
        changes = during.live - before.live, during.allocations - before.allocations
        return changes == (_TEST_BYTES, 1) and self._counter.figures().live == before.live

    @cached_property
    def _recording(self) -> CounterHistory:
        # Few processes record, and the module takes 7 ms.
        from pytest_gpumem.emulating.emulated_process.counter_history import CounterHistory

        return CounterHistory(self._counter)

    def when_it_begins(self, call: Callable[[], None]) -> None:
        """Call a function after this process's first allocation from now on, and after the first one in each fork."""
        self._begin = _BEGIN(call)
        self._library.counter_begin(self._begin)

    def stop_calls(self) -> None:
        """Call no function any more, because Python ends."""
        self._counter.stop_calls()

    def devices(self) -> range:
        """Return the devices' numbers. There is one CPU."""
        return range(1)

    def statistics(self, _device: int) -> Mapping[str, Any]:
        """Return statistics in the form of those that torch keeps for a GPU."""
        figures = self._counter.figures()
        nbytes = {"all": {"current": figures.live, "peak": figures.peak}}
        return {
            "allocated_bytes": nbytes,
            "requested_bytes": nbytes,
            "active_bytes": nbytes,
            "allocation": {"all": {"allocated": figures.allocations}},
        }

    def reset(self, _device: int) -> None:
        """Begin a new peak."""
        self._library.counter_restart_peak()

    def begin(self, _before_reset: Callable[[], None]) -> AbstractContextManager[object]:
        """Do nothing, because a program cannot reset this peak."""
        return nullcontext()

    def used(self, _reserved: Mapping[int, int]) -> list[int]:
        """Return the devices on which this process used memory."""
        return list(self.devices())

    def index_in_machine(self, device: int) -> int:
        """Return the device's number."""
        return device

    def retries(self, _device: int) -> int:
        """Return 0, because the allocator caches nothing."""
        return 0

    def workspaces(self) -> dict[int, Workspaces]:
        """Return nothing, because libraries' own memory on the CPU is not torch's."""
        return {}

    def lacking_history(self) -> None:
        """Return ``None``, because the history can always be recorded."""

    def before_history_changes(self, _call: Callable[[], None]) -> AbstractContextManager[object]:
        """Do nothing, because a program does not know this history."""
        return nullcontext()

    def start_history(self) -> None:
        """Start to record each allocation with its stack, each free, and each new node in autograd's graph."""
        self._recording.start(MOST_ENTRIES)

    def stop_history(self) -> None:
        """Stop recording."""
        self._recording.stop()

    def delete_history(self) -> None:
        """Delete the history. Nobody may read it meanwhile."""
        self._recording.delete()

    def note_on_allocations(self, text: str) -> None:
        """Let the history show a text as ``user_metadata`` at each further allocation in this thread."""
        self._recording.note(text)

    def frees(self) -> list[int]:
        """Return the number of frees so far."""
        live_blocks = self._counter.live_blocks()
        return [self._counter.figures().allocations - live_blocks]

    def history(self) -> tuple[list[list[dict[str, Any]]], dict[int, dict[int, int]]] | str:
        """Return the entries in the form of torch's snapshots of GPUs, and each live block's bytes by address.

        If the history has no room for all entries, return a clause that says so.
        """
        recorded = self._recording.recorded()
        if recorded is None:
            return f"the history has no room for more than {MOST_ENTRIES:,} entries"
        entries, alive = recorded
        return [entries], {0: alive}
