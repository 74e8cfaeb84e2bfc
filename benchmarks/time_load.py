"""Neighbours of a timed process: others that keep cores or the memory busy, all the time or in bursts."""

from __future__ import annotations

import random
import subprocess
import sys
import time
from contextlib import contextmanager
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator

LOADS: dict[str, tuple[str, ...]] = {
    "quiet": (),
    "moderate": ("bursts",),
    "1 busy": ("spin",),
    "2 busy": ("spin", "spin"),
    "3 busy": ("spin", "spin", "spin"),
    "copying": ("copy",),
    "bursts": ("bursts", "bursts"),
}
"""What runs beside the timed process, by the name of the load."""

SHORTEST_BURST, LONGEST_BURST = 0.2, 3.0
"""Seconds that a neighbour works, and rests, in turns."""
_COPIED = 2**26
"""Bytes: more than any cache holds."""


@contextmanager
def neighbours(load: str) -> Iterator[None]:
    """Within, the processes of ``load`` run."""
    started = [subprocess.Popen([sys.executable, "-S", __file__, kind, str(n)]) for n, kind in enumerate(LOADS[load])]
    try:
        time.sleep(0.5 if started else 0)
        yield
    finally:
        for process in started:
            process.kill()
            process.wait()


def _spin(until: float) -> None:
    while time.monotonic() < until:
        sum(range(10_000))


def _copy(until: float) -> None:
    source, target = bytearray(_COPIED), bytearray(_COPIED)
    while time.monotonic() < until:
        target[:] = source


def _bursts(until: float) -> None:
    chance = random.Random()  # noqa: S311 - a load, not a secret
    while time.monotonic() < until:
        _spin(time.monotonic() + chance.uniform(SHORTEST_BURST, LONGEST_BURST))
        time.sleep(chance.uniform(SHORTEST_BURST, LONGEST_BURST))


_KINDS: dict[str, Callable[[float], None]] = {"spin": _spin, "copy": _copy, "bursts": _bursts}
_LONGEST = 600.0
"""Seconds after which a neighbour that nobody stopped goes by itself."""

if __name__ == "__main__":
    _KINDS[sys.argv[1]](time.monotonic() + _LONGEST)
