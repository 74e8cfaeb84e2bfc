"""Count live bytes and their peak from the profiler's allocation events, and from frees missed by the profiler."""

from __future__ import annotations

import weakref
from collections import deque
from typing import TYPE_CHECKING, TypeVar

from pytest_gpumem.facts.values.events import AllocationEvent, Token
from pytest_gpumem.measuring.devices.contract import Peak
from pytest_gpumem.torch_support.private_api.dispatch import beneath_modes

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Sequence

    import torch

    from pytest_gpumem.measuring.devices.contract import BlockIds, Blocks


_MARK_SIZES = (53, 59)
"""Sizes in bytes of a mark's two allocations. Both are live at the same time, so no ordinary tensor looks like a mark."""

AnyToken = TypeVar("AnyToken", bound=Token)


class FreeCallbacks:
    """Notices when watched storages are freed, and inserts their frees into the recorded events (`put_into`).

    The profiler reports the free of a block only if it recorded the block's allocation. For an older storage, the callback
    of a weak reference notices the free. The callback makes two tiny allocations, called a mark. Their position among the
    recorded events shows when the storage was freed.

    For example, a storage at ``0xa000`` from before the recording is freed. The callback allocates 53 and 59 bytes, and frees
    them at once. `put_into` replaces these two allocations and two frees by the storage's free,
    ``AllocationEvent(time, 0xa000, -1)``. A negative size marks a free; the storage's real size is not needed.
    """

    def __init__(self) -> None:
        self._watched: dict[int, weakref.ref[torch.UntypedStorage]] = {}
        self._freed: deque[tuple[int, list[int]]] = deque()
        """For each freed storage, its address and the addresses of the mark's two blocks; no blocks if there is no mark."""

    def watch(self, storage: torch.UntypedStorage, recording: Callable[[], bool]) -> None:
        """Watch ``storage`` until it is freed. ``recording()`` returns whether a profiler records events at this moment."""
        address = storage.data_ptr()

        def freed(_: weakref.ref[torch.UntypedStorage]) -> None:
            import torch

            del self._watched[address]
            mark: list[torch.Tensor] = []
            if recording():
                with beneath_modes():
                    mark += (torch.empty(nbytes, dtype=torch.uint8, device="cpu") for nbytes in _MARK_SIZES)
            self._freed.append((address, [block.data_ptr() for block in mark]))

        self._watched[address] = weakref.ref(storage, freed)

    def put_into(self, events: Sequence[AnyToken]) -> list[AnyToken | AllocationEvent]:
        """Return ``events`` with each mark (two allocations and their frees) replaced by the free of the watched storage.

        A free without a recording or in another thread has no mark in ``events``, and is added at the end.
        """
        placed: list[AnyToken | AllocationEvent] = []
        recent_events: list[tuple[int, AllocationEvent]] = []
        """The latest two allocation events, with their indices in ``placed``. They may be a mark."""
        to_drop: set[tuple[int, int]] = set()
        last = 0
        for event in events:
            if not isinstance(event, AllocationEvent):
                placed.append(event)
                continue
            last = event.time_ns
            if (event.address, event.nbytes) in to_drop:
                to_drop.remove((event.address, event.nbytes))
                continue
            recent_events = [*recent_events[1 - len(_MARK_SIZES) :], (len(placed), event)]
            placed.append(event)
            blocks = [(event.address, event.nbytes) for _, event in recent_events]
            if self._freed and blocks == list(zip(self._freed[0][1], _MARK_SIZES, strict=False)):
                address, _ = self._freed.popleft()
                first, *further = (index for index, _ in recent_events)
                placed[first] = AllocationEvent(last, address, -1)
                for index in reversed(further):
                    del placed[index]
                to_drop = {(address, -nbytes) for address, nbytes in blocks}
                recent_events = []
        placed += [AllocationEvent(last, address, -1) for address, _ in self._freed]
        self._freed.clear()
        return placed


class LiveBlocks:
    """All live blocks from the applied events, and the peak of their bytes since the last `reset_peak`.

    A free at an address without a live block is ignored. An allocation at a live block's address means that the block's free
    was missed, so the new block replaces the earlier block. But if `hold_known` was called after the earlier block was
    allocated, the earlier block still counts as live, so a free that was missed before `hold_known` changes no later reading.

    For example, 100 bytes are allocated at ``0xa000``, and then 60 bytes at ``0xa000``. There are 60 live bytes, or 160 if
    `hold_known` was called in between.
    """

    def __init__(self) -> None:
        self._blocks: dict[int, int] = {}
        self._numbers: dict[int, int] = {}
        self._count = 0
        self.live = 0
        self._peak = 0
        self._held = 0
        """The number of the latest block when `hold_known` was last called."""
        self.turnover = 0
        """The bytes of all allocations so far, including freed memory."""

    @property
    def blocks(self) -> Blocks:
        return dict(self._blocks)

    @property
    def addresses(self) -> frozenset[int]:
        return frozenset(self._blocks)

    @property
    def known(self) -> BlockIds:
        """The live blocks' addresses and numbers. A number distinguishes blocks that had the same address."""
        return frozenset((address, self._numbers[address]) for address in self._blocks)

    def apply(self, events: Iterable[AllocationEvent]) -> None:
        """Apply allocations and frees to the live blocks. The events must be ordered by time."""
        for event in events:
            earlier = self._blocks.pop(event.address, 0)
            if event.nbytes <= 0 or self._numbers.get(event.address, 0) > self._held:
                self.live -= earlier
            if event.nbytes > 0:
                self.turnover += event.nbytes
                self._learn(event.address, event.nbytes)
                self._peak = max(self._peak, self.live)

    def hold_known(self) -> None:
        """Count each current block as live until an event reports its free, even if its address is allocated again.

        So a free missed before this call does not change later readings.
        """
        self._held = self._count

    def register_existing(self, blocks: Blocks) -> None:
        """Add blocks that have been live since before `reset_peak`, so the peak grows by their bytes as well."""
        for address, nbytes in blocks.items():
            if address not in self._blocks:
                self._learn(address, nbytes)
                self._peak += nbytes

    def keep_only(self, block_ids: BlockIds) -> None:
        """Remove all blocks except those in ``block_ids``, as if they were freed now."""
        for address in [a for a in self._blocks if (a, self._numbers[a]) not in block_ids]:
            self.live -= self._blocks.pop(address)

    def restrict(self, block_ids: BlockIds, blocks: Blocks) -> None:
        """Remove all blocks except those in ``block_ids`` or ``blocks``, and add missing blocks from ``blocks``."""
        remaining = {
            address: n for address, n in self._blocks.items() if (address, self._numbers[address]) in block_ids
        }
        self._blocks = {}
        self.live = 0
        for address, nbytes in {**remaining, **blocks}.items():
            self._learn(address, nbytes, new=address not in remaining)
        self._peak = self.live

    def _learn(self, address: int, nbytes: int, *, new: bool = True) -> None:
        self._blocks[address] = nbytes
        self.live += nbytes
        if new:
            self._count += 1
            self._numbers[address] = self._count

    @property
    def peak(self) -> Peak:
        return Peak(self._peak)

    def reset_peak(self) -> None:
        """Set the peak to the current live bytes."""
        self._peak = self.live
