"""A small fixed workload. The number of times that it can run in a second is the CPU's current pace.

The CPU's clock would not be enough: a virtual machine cannot read it, and at the same clock, steps are slower if another
program uses the shared cache.
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
"""The bytes in a ring of buffers. Two rings are larger than a core's own cache, and smaller than the shared cache. So copies
between them depend on the shared cache's speed."""


class ReferenceWorkload:
    """A workload with three parts: matrix products in cache, calls to small operators, and copies between two rings of buffers.

    A step's time depends on the speed of all three. Their shares were chosen in an experiment on two cores of an AMD EPYC,
    while another program computed or copied on the second core. The median times of small GPT-2 steps varied by 7 % to 9 %
    (coefficient of variation). Multiplied by this workload's pace, they varied by 4 % to 5 %. At a constant clock, they still
    varied by 9 % if multiplied by the pace of matrix products only, and by 14 % with the pace of copies only. A process on the
    same core does not change the pace.

    For example, a step takes 10 ms at a pace of 2,000 runs per second, which is the time of 20 runs. If another program slows
    down the CPU by 10 %, the step takes 11 ms at 1,818 runs per second, which is still the time of 20 runs.
    """

    def __init__(self) -> None:
        import torch

        def ones(*shape: int) -> torch.Tensor:
            return torch.ones(shape, dtype=torch.float32, device="cpu")

        # Leave a test's inference mode, because tensors made in this mode are read-only outside it.
        with torch.inference_mode(False):
            self._left, self._right, self._product = (ones(_SIDE, _SIDE) for _ in range(3))
            self._few, self._result = ones(8), ones(8)
            self._source, self._target = (torch.split(ones(_RING // 4), _PIECE // 4) for _ in range(2))
        self._next = 0
        # Warm up, because the first copies are slower until the buffers are in memory and in the cache.
        for _ in range(2 * _RING // (_PIECE * _PIECES)):
            self._copy()
        self.pace()

    def pace(self) -> float:
        """Return the number of runs per second. The call takes less than 1 ms and allocates no memory.

        Each part is run three times, and its fastest run counts.
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
    """Return a context in which torch's operators run on the calling thread only."""
    import torch

    threads = torch.get_num_threads()
    if threads != 1:
        torch.set_num_threads(1)
    try:
        yield
    finally:
        if threads != 1:
            torch.set_num_threads(threads)
