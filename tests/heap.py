"""The suite's own objects, out of the collector's sight: torch and thousands of tests are half a million of them."""

from __future__ import annotations

import gc
from contextlib import contextmanager
from typing import TYPE_CHECKING

from pytest_gpumem.collector import FrozenHeap

if TYPE_CHECKING:
    from collections.abc import Iterator


@contextmanager
def own_objects_out_of_sight() -> Iterator[None]:
    """Hide what this process holds from the collections within, of which there are several in every measurement.

    Each would go through all of it, for a quarter of a second.
    """
    heap = FrozenHeap()
    heap.freeze()
    try:
        yield
    finally:
        gc.collect()
        heap.thaw()
