"""A small fixed workload whose current runs per second are the pace of a CPU.

A virtual machine's clock cannot be read, and a neighbour in the shared cache slows steps down at the same clock.
"""

from __future__ import annotations

import time
from contextlib import contextmanager
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator

    import torch

_RUNS = 3
_SIDE = 96
_PRODUCTS = 5
_CALLS = 100
_PIECE = 2**18
_PIECES = 3
_RING = 2**22
"""The size of a buffer ring in bytes. Two rings exceed a core's own cache and fit in the shared cache."""


class ReferenceWorkload:
    """Matrix products in cache, calls to small operators, and copies between two buffer rings, on a single thread.

    Steps depend on all three. The amounts were chosen in an experiment on two cores of an AMD EPYC, with computing and with
    copying on the other core. The median seconds of small GPT-2 steps, training and inference, varied by 7 % to 9 %
    (coefficient of variation). Seconds times this pace varied by 4 % to 5 %. If the clock is constant, a pace from products
    alone does not follow the steps (9 % remains 9 %), and a pace from copies alone follows too strongly (14 %). The three
    parts do not react to another process on the same core.

    For example, a step takes 10 ms at a pace of 2,000 runs per second, which is 20 runs. If a neighbour slows both down by
    10 %, the step takes 11 ms at 1,818 runs per second, which is still 20 runs.
    """

    def __init__(self) -> None:
        import torch

        def ones(*shape: int) -> torch.Tensor:
            return torch.ones(shape, dtype=torch.float32, device="cpu")

        # A tensor from a test's inference mode is read-only outside this mode.
        with torch.inference_mode(False):
            self._left, self._right, self._product = (ones(_SIDE, _SIDE) for _ in range(3))
            self._few, self._result = ones(8), ones(8)
            self._source, self._target = (torch.split(ones(_RING // 4), _PIECE // 4) for _ in range(2))
        self._next = 0
        # The first runs are slower, because caches and pages are cold.
        for _ in range(2 * _RING // (_PIECE * _PIECES)):
            self._copy()
        self.pace()

    def pace(self) -> float:
        """Return the runs per second.

        Each part runs three times, and its fastest run counts. This takes under 1 ms and allocates nothing.
        """
        import torch

        with one_thread(), torch.no_grad():
            return 1 / sum(_best(part) for part in (self._multiply, self._call, self._copy))

    def _multiply(self) -> None:
        import torch

        for _ in range(_PRODUCTS):
            torch.mm(self._left, self._right, out=self._product)

    def _call(self) -> None:
        import torch

        for _ in range(_CALLS):
            torch.mul(self._few, self._few, out=self._result)

    def _copy(self) -> None:
        for _ in range(_PIECES):
            self._target[self._next].copy_(self._source[self._next])
            self._next = (self._next + 1) % len(self._source)


def _best(part: Callable[[], None]) -> float:
    seconds = []
    for _ in range(_RUNS):
        began = time.perf_counter()
        part()
        seconds.append(time.perf_counter() - began)
    return min(seconds)


@contextmanager
def one_thread() -> Iterator[None]:
    """Run torch's operators on the calling thread only."""
    import torch

    threads = torch.get_num_threads()
    if threads != 1:
        torch.set_num_threads(1)
    try:
        yield
    finally:
        if threads != 1:
            torch.set_num_threads(threads)
