"""Python's cyclic collector: off where it would run at a moment of its own choosing, and quick where we run it."""

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


class FrozenHeap:
    """Objects that were there before a test are put out of the collector's sight while it is measured.

    With torch loaded there are half a million of them, and each of a measurement's several collections would go through
    all. Garbage among them was there before as well as afterwards, so no figure changes; `collect_everything` is for
    when an object from before becomes garbage meanwhile.
    """

    def __init__(self) -> None:
        self._froze = False

    def freeze(self) -> None:
        """Put everything that is alive out of sight, unless somebody else has: their objects cannot be told from ours."""
        if not gc.get_freeze_count():
            gc.freeze()
            self._froze = True

    def thaw(self) -> None:
        """Undo `freeze`."""
        if self._froze:
            gc.unfreeze()
            self._froze = False


@contextmanager
def everything_in_sight() -> Iterator[None]:
    """Within, Python knows all objects, frozen ones too; what was frozen is frozen again."""
    frozen = gc.get_freeze_count()
    if frozen:
        gc.unfreeze()
    try:
        yield
    finally:
        if frozen:
            gc.freeze()


def collect_everything() -> None:
    """Collect garbage among all objects, frozen ones too."""
    with everything_in_sight():
        gc.collect()
