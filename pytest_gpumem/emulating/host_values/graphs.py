"""Forget the values written by a CUDA graph, because a replay computes nothing on an emulated GPU.

The mode `HostValues` sees operators while they are captured, but not when the graph is replayed.
"""

from __future__ import annotations

from functools import wraps
from typing import TYPE_CHECKING, Any
from weakref import WeakKeyDictionary

import torch

if TYPE_CHECKING:
    from torch.multiprocessing.reductions import StorageWeakRef

    from pytest_gpumem.emulating.host_values.mode import HostValues


def follow_graphs(mode: HostValues) -> None:
    """Record the storages written during each capture, and forget their values at each replay."""
    graph: Any = torch.cuda.CUDAGraph
    begin, end, replay = graph.capture_begin, graph.capture_end, graph.replay
    written: WeakKeyDictionary[Any, dict[int, StorageWeakRef]] = WeakKeyDictionary()

    @wraps(begin)
    def capture_begin(self: Any, *args: Any, **named: Any) -> None:
        begin(self, *args, **named)
        mode.captured = written.setdefault(self, {})

    @wraps(end)
    def capture_end(self: Any) -> None:
        mode.captured = None
        end(self)

    @wraps(replay)
    def replay_it(self: Any) -> None:
        replay(self)
        for address, storage in written.get(self, {}).items():
            if not storage.expired():
                mode.forget_at(address)

    graph.capture_begin, graph.capture_end, graph.replay = capture_begin, capture_end, replay_it
