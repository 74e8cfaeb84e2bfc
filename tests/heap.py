"""The suite's own objects, out of the collector's sight: torch and thousands of tests are half a million of them."""

from __future__ import annotations

import gc
from contextlib import contextmanager, nullcontext
from typing import TYPE_CHECKING
from unittest.mock import patch

from pytest_gpumem.explain import holders
from pytest_gpumem.torch_support import garbage_collector

if TYPE_CHECKING:
    from collections.abc import Iterator


@contextmanager
def own_objects_out_of_sight() -> Iterator[None]:
    """Hide what this process holds from the collections within, of which there are several in every measurement.

    Each would go through all of it, for a quarter of a second; those of all objects then go through what was made within.
    """
    if gc.get_freeze_count is _objects_are_frozen:
        yield  # they already are
        return
    heap = garbage_collector.FrozenHeap()
    heap.freeze()
    try:
        with (
            # Counting them goes through all of them, too.
            patch.object(gc, "get_freeze_count", _objects_are_frozen),
            patch.object(garbage_collector, "everything_in_sight", nullcontext),
            patch.object(holders, "everything_in_sight", nullcontext),
        ):
            yield
    finally:
        gc.collect()
        heap.thaw()


def _objects_are_frozen() -> int:
    return 1
