"""cuBLAS's workspaces. Workspaces that torch keeps between matrix products are counted and then restored.

Up to torch 2.14, or with ``TORCH_CUBLAS_WORKSPACE_CACHE=1``, torch keeps a workspace for each thread and stream that ran a
product, without an interface to count the workspaces. This module counts the bytes that become free when workspaces are
dropped. The workspaces are then allocated again, because the program's next step would find them. Later torch releases
allocate a workspace for each product and drop it right afterwards.

For example, on an H100 a workspace has 33,554,432 bytes. After a training step, the main thread and the backward thread have a
workspace each, so 67,108,864 bytes are counted.
"""

from __future__ import annotations

from collections import Counter
from contextlib import suppress
from dataclasses import dataclass
from itertools import zip_longest
from typing import TYPE_CHECKING, Protocol

from pytest_gpumem.measuring.devices.cuda_history import ALLOCATED, FREE, GIVEN_BACK, live_blocks

if TYPE_CHECKING:
    from collections.abc import Collection, Iterator, Mapping, Sequence
    from contextlib import AbstractContextManager

    from pytest_gpumem.measuring.devices.cuda_history import HistoryEntry
    from pytest_gpumem.measuring.devices.cuda_runtime import TorchCuda


class GpuWithWorkspaces(Protocol):
    """A CUDA GPU's interface for the count."""

    @property
    def runtime(self) -> TorchCuda: ...
    @property
    def is_used(self) -> bool: ...
    def live(self) -> int: ...
    def finish_backward(self) -> None: ...
    def synchronize(self) -> None: ...
    def peak_ignored(self) -> AbstractContextManager[None]: ...
    def release_workspaces(self) -> None: ...


@dataclass(frozen=True, slots=True)
class _StreamWorkspaces:
    """The number of workspaces on a GPU's stream, and whether the calling thread owns a workspace there."""

    device: GpuWithWorkspaces
    stream: int
    number: int
    has_own: bool


class Workspaces:
    """The workspaces on a GPU and its `others`. A count stays valid while the live bytes stay the same."""

    def __init__(self, device: GpuWithWorkspaces, other_gpus: Sequence[GpuWithWorkspaces]) -> None:
        self._device = device
        self._everywhere = (device, *other_gpus)
        self._counted: dict[tuple[int, ...], tuple[int, ...]] = {}
        """Workspace bytes on each of `Device.everywhere`, by the live bytes on each."""
        self._dropped: tuple[_StreamWorkspaces, ...] = ()
        """The workspaces that `restore` allocates again."""
        self._are_kept: bool | None = None

    @property
    def are_kept(self) -> bool:
        """True if torch keeps workspaces between products, and also before this is known."""
        return self._are_kept is not False

    def release(self) -> None:
        """Drop the workspaces, and empty the allocator's cache."""
        self._counted = {}
        self._device.finish_backward()
        self._device.synchronize()
        self._device.runtime.clear_workspaces()
        if self._are_kept is None:
            with self._device.peak_ignored():
                bare_bytes = self._device.live()
                self._device.runtime.make_workspace()
                self._are_kept = self._device.live() > bare_bytes
                self._device.runtime.clear_workspaces()
        self._device.runtime.empty_cache()

    def count(self) -> tuple[int, ...]:
        """Return the workspace bytes on each of `Device.everywhere`. Restore the workspaces, except for other threads."""
        live = self._live()
        if live not in self._counted:
            with self._device.peak_ignored():
                blocks_of_gpus = {gpu: _streams(gpu) for gpu in self._everywhere if gpu.is_used}
                own_streams = {
                    (gpu, stream) for gpu, blocks in blocks_of_gpus.items() for stream in _own_streams(gpu, blocks)
                }
                self._device.release_workspaces()
                bare_bytes = self._live()
                self._dropped = tuple(
                    _StreamWorkspaces(gpu, stream, number, (gpu, stream) in own_streams)
                    for gpu, blocks in blocks_of_gpus.items()
                    for stream, number in Counter(blocks[address] for address in blocks.keys() - _streams(gpu)).items()
                )
                self.restore()
            # The next step allocates a workspace that could not be restored, for example another thread's workspace.
            for total in (live, self._live()):
                self._counted[total] = _beyond(bare_bytes, total)
        return self._counted[live]

    def restore(self) -> None:
        """Allocate the workspaces of the last count again, after `Device.release_workspaces`."""
        for workspaces in self._dropped:
            if workspaces.has_own:
                workspaces.device.runtime.make_workspace(workspaces.stream)
            if workspaces.number > workspaces.has_own:
                workspaces.device.runtime.make_workspace(workspaces.stream, in_backward=True)

    def _live(self) -> tuple[int, ...]:
        return tuple(gpu.live() for gpu in self._everywhere)


def transient_in_peak(history: Sequence[HistoryEntry], sizes: Collection[int]) -> int:
    """Return how many bytes lower a region's peak would be without transient workspaces.

    A transient workspace is freed right after its allocation, with no event in between, because the allocator does not wait
    for the product's kernel.

    For example, a region allocates a tensor (100 bytes), then allocates and frees a workspace (32 bytes), and then allocates
    another tensor (20 bytes). The peak is 132 bytes. Without the workspace the peak is 120 bytes, so the result is 12.

    Args:
        history: The block events of the region.
        sizes: The possible sizes of a workspace, in bytes.
    """
    live = highest = live_without = highest_without = 0
    workspace = None
    for entry, next_entry in zip_longest(history, history[1:]):
        if entry.action == ALLOCATED:
            is_transient = (
                entry.nbytes in sizes and next_entry is not None and next_entry[1:3] == (GIVEN_BACK, entry.address)
            )
            workspace = entry.address if is_transient else workspace
            live += entry.nbytes
            live_without += 0 if is_transient else entry.nbytes
        elif entry.action == FREE:
            live -= entry.nbytes
            live_without -= 0 if entry.address == workspace else entry.nbytes
            workspace = None if entry.address == workspace else workspace
        highest, highest_without = max(highest, live), max(highest_without, live_without)
    return highest - highest_without


def _streams(device: GpuWithWorkspaces) -> dict[int, int]:
    """Return the live blocks' streams by address; empty if the allocator cannot list blocks."""
    with suppress(RuntimeError):
        return {
            address: segment["stream"]
            for segment in device.runtime.segments()
            for address in live_blocks([segment], "size")
        }
    return {}


def _own_streams(device: GpuWithWorkspaces, blocks: Mapping[int, int]) -> Iterator[int]:
    """Yield the streams on which this thread has a workspace. On these streams a request allocates nothing."""
    for stream in {*blocks.values()}:
        live = device.live()
        device.runtime.make_workspace(stream)
        if device.live() == live:
            yield stream


def _beyond(bare: tuple[int, ...], live: tuple[int, ...]) -> tuple[int, ...]:
    return tuple(current - base for base, current in zip(bare, live, strict=True))
