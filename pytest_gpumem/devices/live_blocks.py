"""Live bytes and their peak from allocation events, and from frees that the profiler does not report."""

from __future__ import annotations

import weakref
from collections import deque
from typing import TYPE_CHECKING, TypeVar

from pytest_gpumem.devices.contract import Peak
from pytest_gpumem.torch_support.private_api import beneath_modes
from pytest_gpumem.values.events import AllocationEvent, Token

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Sequence

    import torch

    from pytest_gpumem.devices.contract import BlockIds, Blocks


_MARK_SIZES = (53, 59)
"""Bytes of two blocks that are live at once: a tensor of one of the sizes, at the address of a mark to come, is none."""

AnyToken = TypeVar("AnyToken", bound=Token)


class FreeCallbacks:
    """Deallocation callbacks of storages, and the storages that were freed since `put_into` was last called.

    The profiler reports the free of a block only if it has seen its allocation. Of an older storage, a weak reference tells
    that it is freed, and a mark, two tiny allocations at that moment, tells the place among the recorded events.
    """

    def __init__(self) -> None:
        self._watched: dict[int, weakref.ref[torch.UntypedStorage]] = {}
        self._freed: deque[tuple[int, list[int]]] = deque()
        """The address of each, and those of its mark."""

    def watch(self, storage: torch.UntypedStorage, recording: Callable[[], bool]) -> None:
        """Notice when ``storage`` is freed. ``recording()`` says at that moment whether events are being recorded."""
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
        """Return ``events`` with the frees in their places: each mark, allocations and their frees, becomes a free.

        Frees without a mark among the events (nothing was recording, or it was another thread's) come at the end.
        """
        placed: list[AnyToken | AllocationEvent] = []
        latest: list[tuple[int, AllocationEvent]] = []
        """As many allocation events as a mark has blocks, with their places in ``placed``."""
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
            latest = [*latest[1 - len(_MARK_SIZES) :], (len(placed), event)]
            placed.append(event)
            blocks = [(one.address, one.nbytes) for _, one in latest]
            if self._freed and blocks == list(zip(self._freed[0][1], _MARK_SIZES, strict=False)):
                address, _ = self._freed.popleft()
                first, *others = (place for place, _ in latest)
                placed[first] = AllocationEvent(last, address, -1)
                for place in reversed(others):
                    del placed[place]
                to_drop = {(one, -nbytes) for one, nbytes in blocks}
                latest = []
        placed += [AllocationEvent(last, address, -1) for address, _ in self._freed]
        self._freed.clear()
        return placed


class LiveBlocks:
    """The blocks that are known to be live, and the most bytes they held since the last `reset_peak`.

    A free of an unknown block changes nothing; an allocation at a known address means that the earlier block's free was missed,
    so the new one replaces it. Of a block that `hold_known` held, it was missed before, and its bytes stay in every reading.
    """

    def __init__(self) -> None:
        self._blocks: dict[int, int] = {}
        self._numbers: dict[int, int] = {}
        self._count = 0
        self.live = 0
        self._peak = 0
        self._held = 0
        """The number of the latest block that was held."""
        self.turnover = 0
        """Bytes of every allocation so far."""

    @property
    def blocks(self) -> Blocks:
        return dict(self._blocks)

    @property
    def addresses(self) -> frozenset[int]:
        return frozenset(self._blocks)

    @property
    def known(self) -> BlockIds:
        """The live blocks. An address is used again and again, so each block has a number, too."""
        return frozenset((address, self._numbers[address]) for address in self._blocks)

    def apply(self, events: Iterable[AllocationEvent]) -> None:
        """Add allocations and take frees away, in the order of time."""
        for event in events:
            earlier = self._blocks.pop(event.address, 0)
            if event.nbytes <= 0 or self._numbers.get(event.address, 0) > self._held:
                self.live -= earlier
            if event.nbytes > 0:
                self.turnover += event.nbytes
                self._learn(event.address, event.nbytes)
                self._peak = max(self._peak, self.live)

    def hold_known(self) -> None:
        """Let the blocks that are known now count as live until their free is seen: one that was missed has been before."""
        self._held = self._count

    def register_existing(self, blocks: Blocks) -> None:
        """Add blocks that were live all along. The peak rises with them."""
        for address, nbytes in blocks.items():
            if address not in self._blocks:
                self._learn(address, nbytes)
                self._peak += nbytes

    def keep_only(self, known: BlockIds) -> None:
        """Let every block that is not in ``known`` be freed now."""
        for address in [one for one in self._blocks if (one, self._numbers[one]) not in known]:
            self.live -= self._blocks.pop(address)

    def restrict(self, known: BlockIds, blocks: Blocks) -> None:
        """Remove every block that is neither in ``known`` nor in ``blocks``, and add all of ``blocks``."""
        kept = {address: n for address, n in self._blocks.items() if (address, self._numbers[address]) in known}
        self._blocks = {}
        self.live = 0
        for address, nbytes in {**kept, **blocks}.items():
            self._learn(address, nbytes, new=address not in kept)
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
        """Let the next peak start from what is live now."""
        self._peak = self.live
