"""Count the bytes in cuBLAS's workspaces.

Up to torch 2.14, or with ``TORCH_CUBLAS_WORKSPACE_CACHE=1``, torch keeps a workspace for each thread and stream that has run a
matrix product. torch has no function that counts these workspaces. So `Workspaces` drops them, counts the bytes that become
free, and allocates the workspaces again, because the program's next step would find them, too.

Later torch releases allocate a workspace for each matrix product and free it right afterwards. `transient_in_peak` finds such
workspaces in the allocator's history.

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
    """The members of `CudaDevice` that `Workspaces` uses."""

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
    """The number of workspaces on a GPU's stream, and whether one of them belongs to the calling thread."""

    device: GpuWithWorkspaces
    stream: int
    number: int
    has_own: bool


class Workspaces:
    """The workspaces on a GPU and on its `Device.others`. The last count is reused as long as the live bytes are the same."""

    def __init__(self, device: GpuWithWorkspaces, other_gpus: Sequence[GpuWithWorkspaces]) -> None:
        self._device = device
        self._everywhere = (device, *other_gpus)
        self._counted: dict[tuple[int, ...], tuple[int, ...]] = {}
        """Live bytes on each GPU -> workspace bytes on each GPU, both in the order of `Device.everywhere`."""
        self._dropped: tuple[_StreamWorkspaces, ...] = ()
        """The workspaces dropped by the last `count`. `restore` allocates them again."""
        self._are_kept: bool | None = None

    @property
    def are_kept(self) -> bool:
        """True if torch keeps workspaces between matrix products. Also true until the first `release` has tried it."""
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
        """Return the workspace bytes on each GPU, in the order of `Device.everywhere`.

        Workspaces are dropped, and allocated again for the calling thread and the backward thread. Workspaces of further
        threads cannot be allocated again.
        """
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
            # If a workspace could not be restored, fewer bytes are live until the next step allocates it again. So store the
            # counts for both amounts of live bytes.
            for total in (live, self._live()):
                self._counted[total] = _beyond(bare_bytes, total)
        return self._counted[live]

    def restore(self) -> None:
        """Allocate the workspaces found by the last `count` again. Call this after `Device.release_workspaces`."""
        for workspaces in self._dropped:
            if workspaces.has_own:
                workspaces.device.runtime.make_workspace(workspaces.stream)
            if workspaces.number > workspaces.has_own:
                workspaces.device.runtime.make_workspace(workspaces.stream, in_backward=True)

    def _live(self) -> tuple[int, ...]:
        return tuple(gpu.live() for gpu in self._everywhere)


def transient_in_peak(history: Sequence[HistoryEntry], sizes: Collection[int]) -> int:
    """Return by how many bytes transient workspaces raise the peak.

    A workspace is transient if torch frees it right after its allocation, with no entry in between. torch can do so because
    the memory is only reused by later kernels on the same stream.

    For example, a step allocates a tensor (100 bytes), then allocates and frees a workspace (32 bytes), and then allocates
    another tensor (20 bytes). The peak is 132 bytes. Without the workspace the peak is 120 bytes, so the result is 12.

    Args:
        history: The allocator's history of the measured code.
        sizes: The sizes that a workspace may have, in bytes.
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
    """Return the stream of each live block, by the block's address; empty if the allocator cannot list its blocks."""
    with suppress(RuntimeError):
        return {
            address: segment["stream"]
            for segment in device.runtime.segments()
            for address in live_blocks([segment], "size")
        }
    return {}


def _own_streams(device: GpuWithWorkspaces, blocks: Mapping[int, int]) -> Iterator[int]:
    """Yield the streams on which the calling thread already has a workspace: requesting a workspace there allocates nothing."""
    for stream in {*blocks.values()}:
        live = device.live()
        device.runtime.make_workspace(stream)
        if device.live() == live:
            yield stream


def _beyond(bare: tuple[int, ...], live: tuple[int, ...]) -> tuple[int, ...]:
    return tuple(current - base for base, current in zip(bare, live, strict=True))
