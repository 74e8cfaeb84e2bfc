"""Frees that the profiler does not report: of host memory that was allocated while nobody recorded.

The profiler only reports the free of a block whose allocation it has seen. Of a storage that was there before, the death
can be noticed through a weak reference; a tiny allocation at that moment marks its place among the recorded events.
"""

from __future__ import annotations

import weakref
from collections import deque
from typing import TYPE_CHECKING, TypeVar

from pytest_gpumem.torch_support.private_api import beneath_modes
from pytest_gpumem.values.events import AllocationEvent, Token

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

    import torch

_MARK_BYTES = 53

AnyToken = TypeVar("AnyToken", bound=Token)


class FreeCallbacks:
    """The storages that are watched, and those that died since `put_into` was last called."""

    def __init__(self) -> None:
        self._watched: dict[int, weakref.ref[torch.UntypedStorage]] = {}
        self._dead: deque[tuple[int, int]] = deque()

    def watch(self, storage: torch.UntypedStorage, recording: Callable[[], bool]) -> None:
        """Notice when ``storage`` is freed. ``recording`` tells, at that moment, whether events are being recorded."""
        address = storage.data_ptr()

        def died(_: weakref.ref[torch.UntypedStorage]) -> None:
            import torch

            del self._watched[address]
            mark = 0
            if recording():
                with beneath_modes():
                    mark = torch.empty(_MARK_BYTES, dtype=torch.uint8, device="cpu").data_ptr()
            self._dead.append((address, mark))

        self._watched[address] = weakref.ref(storage, died)

    def put_into(self, events: Sequence[AnyToken]) -> list[AnyToken | AllocationEvent]:
        """``events`` with the deaths in their places: each mark, an allocation and its free, becomes a free.

        Deaths without a mark among the events (nobody was recording, or it was another thread's) come at the end.
        """
        told: list[AnyToken | AllocationEvent] = []
        mark_to_drop: int | None = None
        last = 0
        for event in events:
            if not isinstance(event, AllocationEvent):
                told.append(event)
                continue
            last = event.time_ns
            if event.address == mark_to_drop and event.nbytes == -_MARK_BYTES:
                mark_to_drop = None
            elif self._dead and (event.address, event.nbytes) == (self._dead[0][1], _MARK_BYTES):
                address, mark_to_drop = self._dead.popleft()
                told.append(AllocationEvent(last, address, -1))
            else:
                told.append(event)
        told += [AllocationEvent(last, address, -1) for address, _ in self._dead]
        self._dead.clear()
        return told
