"""Mark tensors as unknown when a CUDA graph writes to them, because a replay computes nothing on an emulated GPU.

The mode `HostValues` intercepts operators during the graph's capture, but a replay runs no operators.
"""

from __future__ import annotations

from functools import wraps
from typing import TYPE_CHECKING, Any
from weakref import WeakKeyDictionary

import torch

from pytest_gpumem.emulating.host_values.storage_notes import StorageNotes

if TYPE_CHECKING:
    from pytest_gpumem.emulating.host_values.mode import HostValues


def follow_graphs(mode: HostValues) -> None:
    """From now on, record to which storages each graph writes during its capture, and mark them as unknown at each replay."""
    graph: Any = torch.cuda.CUDAGraph
    begin, end, replay = graph.capture_begin, graph.capture_end, graph.replay
    written: WeakKeyDictionary[Any, StorageNotes[None]] = WeakKeyDictionary()

    @wraps(begin)
    def capture_begin(self: Any, *args: Any, **named: Any) -> None:
        begin(self, *args, **named)
        mode.notes.captured = written.setdefault(self, StorageNotes())

    @wraps(end)
    def capture_end(self: Any) -> None:
        mode.notes.captured = None
        end(self)

    @wraps(replay)
    def replay_it(self: Any) -> None:
        replay(self)
        for address in written[self].addresses() if self in written else ():
            mode.notes.forget_at(address)

    graph.capture_begin, graph.capture_end, graph.replay = capture_begin, capture_end, replay_it
