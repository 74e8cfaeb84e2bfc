"""Python's cyclic collector, switched off where it would run at a moment of its own choosing."""

from __future__ import annotations

import gc
from contextlib import contextmanager
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from collections.abc import Iterator


@contextmanager
def cyclic_collector_off() -> Iterator[None]:
    """Within, no cycle is collected unless asked for: when it runs by itself depends on everything that ran before."""
    was_on = gc.isenabled()
    gc.disable()
    try:
        yield
    finally:
        if was_on:
            gc.enable()
