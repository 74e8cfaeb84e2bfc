"""cuBLAS's workspaces: those that torch keeps between products are counted, and left as the program has them.

Up to 2.14, or with ``TORCH_CUBLAS_WORKSPACE_CACHE=1``, it keeps one for each thread and stream that ran a product, and tells
nobody how many. They are counted by what is free when they are dropped. Then they are made again where they were, as the next
step of the program alone would find them there. Later releases make one for each product, and drop it right after.
"""

from __future__ import annotations

from collections import Counter
from contextlib import suppress
from dataclasses import dataclass
from itertools import zip_longest
from typing import TYPE_CHECKING, Protocol

from pytest_gpumem.devices.cuda_history import ALLOCATED, FREE, GIVEN_BACK, live_blocks

if TYPE_CHECKING:
    from collections.abc import Collection, Iterator, Mapping, Sequence
    from contextlib import AbstractContextManager

    from pytest_gpumem.devices.cuda_history import HistoryEntry
    from pytest_gpumem.devices.cuda_runtime import TorchCuda


class GpuWithWorkspaces(Protocol):
    """The part of a CUDA GPU that counting workspaces needs."""

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
class _OfStream:
    """The workspaces of one stream of a GPU: how many, and whether this thread's is one of them."""

    device: GpuWithWorkspaces
    stream: int
    number: int
    has_own: bool


class Workspaces:
    """The workspaces of a GPU and its `others`. A count holds as long as the live bytes of all are as they were then."""

    def __init__(self, device: GpuWithWorkspaces, others: Sequence[GpuWithWorkspaces]) -> None:
        self._device = device
        self._everywhere = (device, *others)
        self._counted: dict[tuple[int, ...], tuple[int, ...]] = {}
        """Bytes of workspaces on each of `Device.everywhere`, by the bytes that were live on each."""
        self._kept: tuple[_OfStream, ...] = ()
        """The workspaces that `restore` makes again."""
        self._are_kept: bool | None = None

    @property
    def are_kept(self) -> bool:
        """True if they are kept between products; also where that was not found out yet."""
        return self._are_kept is not False

    def release(self) -> None:
        """Drop them, and give back what the allocator keeps."""
        self._counted = {}
        self._device.finish_backward()
        self._device.synchronize()
        self._device.runtime.clear_workspaces()
        if self._are_kept is None:
            with self._device.peak_ignored():
                bare = self._device.live()
                self._device.runtime.make_workspace()
                self._are_kept = self._device.live() > bare
                self._device.runtime.clear_workspaces()
        self._device.runtime.empty_cache()

    def count(self) -> tuple[int, ...]:
        """Return their bytes on each of `Device.everywhere`; as many are there afterwards, but for those of other threads."""
        live = self._live()
        if live not in self._counted:
            with self._device.peak_ignored():
                before = {one: _streams(one) for one in self._everywhere if one.is_used}
                own = {(one, stream) for one, blocks in before.items() for stream in _own_streams(one, blocks)}
                self._device.release_workspaces()
                bare = self._live()
                self._kept = tuple(
                    _OfStream(one, stream, number, (one, stream) in own)
                    for one, blocks in before.items()
                    for stream, number in Counter(blocks[address] for address in blocks.keys() - _streams(one)).items()
                )
                self.restore()
            # A workspace that could not be made again, of a thread of the program's own, is made by the next step.
            for total in (live, self._live()):
                self._counted[total] = _beyond(bare, total)
        return self._counted[live]

    def restore(self) -> None:
        """Make again those of the last count, after `Device.release_workspaces`."""
        for kept in self._kept:
            if kept.has_own:
                kept.device.runtime.make_workspace(kept.stream)
            if kept.number > kept.has_own:
                kept.device.runtime.make_workspace(kept.stream, in_backward=True)

    def _live(self) -> tuple[int, ...]:
        return tuple(one.live() for one in self._everywhere)


def transient_in_peak(history: Sequence[HistoryEntry], sizes: Collection[int]) -> int:
    """Return how many bytes of the peak of a region are workspaces, of ``sizes``, that were freed right after they were made.

    That is how much lower the peak would be without them. Such a workspace is freed with nothing in between: products are
    launched, and the allocator does not wait for them.
    """
    live = highest = bare = highest_bare = 0
    workspace = None
    for entry, after in zip_longest(history, history[1:]):
        if entry.action == ALLOCATED:
            is_transient = entry.nbytes in sizes and after is not None and after[1:3] == (GIVEN_BACK, entry.address)
            workspace = entry.address if is_transient else workspace
            live += entry.nbytes
            bare += 0 if is_transient else entry.nbytes
        elif entry.action == FREE:
            live -= entry.nbytes
            bare -= 0 if entry.address == workspace else entry.nbytes
            workspace = None if entry.address == workspace else workspace
        highest, highest_bare = max(highest, live), max(highest_bare, bare)
    return highest - highest_bare


def _streams(device: GpuWithWorkspaces) -> dict[int, int]:
    """Return the streams of live blocks by their addresses; none where the allocator has no such list."""
    with suppress(RuntimeError):
        return {
            address: segment["stream"]
            for segment in device.runtime.segments()
            for address in live_blocks([segment], "size")
        }
    return {}


def _own_streams(device: GpuWithWorkspaces, blocks: Mapping[int, int]) -> Iterator[int]:
    """Yield the streams on which this thread has a workspace: asking for it makes none. Others are dropped soon after."""
    for stream in {*blocks.values()}:
        live = device.live()
        device.runtime.make_workspace(stream)
        if device.live() == live:
            yield stream


def _beyond(bare: tuple[int, ...], live: tuple[int, ...]) -> tuple[int, ...]:
    return tuple(now - before for before, now in zip(bare, live, strict=True))
