"""Live bytes and their peak from allocation events, and from frees that the profiler does not report."""

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
"""Sizes of a mark's two blocks. Both are live at the same time, so no ordinary tensor can look like the mark."""

AnyToken = TypeVar("AnyToken", bound=Token)


class FreeCallbacks:
    """Watches storages, and keeps the freed storages until `put_into` inserts their frees into the recorded events.

    The profiler only reports the free of a block if it saw the block's allocation. For an older storage, a weak reference
    reports the free. Two tiny allocations at this moment, the mark, show its place among the recorded events.

    For example, a storage at ``0xa000`` from before the recording is freed. The callback allocates 53 and 59 bytes. `put_into`
    replaces these two allocations and their frees by ``AllocationEvent(time, 0xa000, -1)``.
    """

    def __init__(self) -> None:
        self._watched: dict[int, weakref.ref[torch.UntypedStorage]] = {}
        self._freed: deque[tuple[int, list[int]]] = deque()
        """Each freed storage's address, with the addresses in its mark."""

    def watch(self, storage: torch.UntypedStorage, recording: Callable[[], bool]) -> None:
        """Notice when ``storage`` is freed. ``recording()`` returns whether a profiler records events at that moment."""
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
        """Return ``events`` with the frees inserted. Each mark (two allocations and their frees) becomes a free.

        A free without a mark among the events comes at the end. Such a free happened without a recording or in another thread.
        """
        placed: list[AnyToken | AllocationEvent] = []
        recent_events: list[tuple[int, AllocationEvent]] = []
        """The latest allocation events, as many as a mark has blocks, with their indices in ``placed``."""
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
    """The known live blocks, and the most bytes that they had since the last `reset_peak`.

    A free of an unknown block changes nothing. An allocation at a known address means a missed free, so the new block
    replaces the earlier one. If the earlier block was already known at the last `hold_known`, its bytes stay in every
    reading, so readings do not change because of the missed free.

    For example, a 100-byte block at ``0xa000`` and then a 60-byte block at ``0xa000`` give 60 live bytes. With
    `hold_known` in between they give 160.
    """

    def __init__(self) -> None:
        self._blocks: dict[int, int] = {}
        self._numbers: dict[int, int] = {}
        self._count = 0
        self.live = 0
        self._peak = 0
        self._held = 0
        """The number of the latest block at the last `hold_known`."""
        self.turnover = 0
        """All bytes allocated so far."""

    @property
    def blocks(self) -> Blocks:
        return dict(self._blocks)

    @property
    def addresses(self) -> frozenset[int]:
        return frozenset(self._blocks)

    @property
    def known(self) -> BlockIds:
        """The live blocks. Each block has a number, because addresses are reused."""
        return frozenset((address, self._numbers[address]) for address in self._blocks)

    def apply(self, events: Iterable[AllocationEvent]) -> None:
        """Add allocations and subtract frees. The events are ordered by time."""
        for event in events:
            earlier = self._blocks.pop(event.address, 0)
            if event.nbytes <= 0 or self._numbers.get(event.address, 0) > self._held:
                self.live -= earlier
            if event.nbytes > 0:
                self.turnover += event.nbytes
                self._learn(event.address, event.nbytes)
                self._peak = max(self._peak, self.live)

    def hold_known(self) -> None:
        """Count the known blocks as live until their free is seen, so frees missed before this call change no later reading."""
        self._held = self._count

    def register_existing(self, blocks: Blocks) -> None:
        """Add blocks that have always been live. The peak grows by their bytes."""
        for address, nbytes in blocks.items():
            if address not in self._blocks:
                self._learn(address, nbytes)
                self._peak += nbytes

    def keep_only(self, block_ids: BlockIds) -> None:
        """Count every block that is not in ``block_ids`` as freed now."""
        for address in [a for a in self._blocks if (a, self._numbers[a]) not in block_ids]:
            self.live -= self._blocks.pop(address)

    def restrict(self, block_ids: BlockIds, blocks: Blocks) -> None:
        """Remove every block that is neither in ``block_ids`` nor in ``blocks``, and add all ``blocks``."""
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
        """Start the next peak from the bytes that are live now."""
        self._peak = self.live
