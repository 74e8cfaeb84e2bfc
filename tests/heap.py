"""The suite's own objects, out of the collector's sight: torch and thousands of tests are half a million of them."""

from __future__ import annotations

import atexit
import gc
import sys
from contextlib import contextmanager
from typing import TYPE_CHECKING
from unittest.mock import patch

if TYPE_CHECKING:
    from collections.abc import Iterator

_freeze = gc.freeze


@contextmanager
def own_objects_out_of_sight() -> Iterator[None]:
    """Hide what this process holds from the collections within, of which there are several in every measurement.

    Each would go through all of it, for a quarter of a second; those of all objects then go through what was made within.
    A session within, or the one that runs the suite, neither thaws the objects nor freezes others.
    """
    if are_out_of_sight():
        gc.collect()
        _freeze()  # what the test has made since
        yield
        return
    gc.freeze()
    try:
        with (
            patch.object(gc, "freeze", _do_nothing),
            patch.object(gc, "unfreeze", _do_nothing),
            # Counting them goes through all of them, too.
            patch.object(gc, "get_freeze_count", lambda: sys.maxsize),
        ):
            yield
    finally:
        gc.collect()
        gc.unfreeze()


def are_out_of_sight() -> bool:
    """Return whether this process's own objects are hidden."""
    return gc.freeze is _do_nothing


def hide_what_is_loaded() -> None:
    """Hide what this process has loaded from collections until it ends: for `tests.preloaded`, as ``before``."""
    hidden = own_objects_out_of_sight()
    hidden.__enter__()
    atexit.register(hidden.__exit__, None, None, None)


def _do_nothing() -> None:
    pass
