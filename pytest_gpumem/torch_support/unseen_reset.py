"""Reset torch's peaks for a measurement, while the program still sees the peaks since its own last reset.

Some programs act on these peaks. For example, vLLM chooses the size of its cache by the peak of a trial run.

Example: a program has a peak of 40 MB. After `UnseenResets.reset` it allocates 10 MB. `UnseenResets.statistics` has a peak of
10 MB, and ``torch.cuda.max_memory_allocated()`` still returns 40 MB.
"""

from __future__ import annotations

from functools import wraps
from typing import TYPE_CHECKING, Any

import torch

from pytest_gpumem.torch_support.private_api.allocator import PEAK_READERS, cuda_statistics, peak_resets

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping

_Peaks = dict[tuple[str, str], int]
"""Peaks by the two keys in torch's statistics: ``("allocated_bytes", "all")``."""


class UnseenResets:
    """Resets of the peaks on each GPU, by the GPU's index in this process. The first reset replaces torch's functions."""

    def __init__(self) -> None:
        self._peaks: dict[int, _Peaks] = {}
        """The program's peaks before our last reset, by GPU."""
        self._statistics: Callable[[int], Mapping[str, Any]] = cuda_statistics
        self._reset: Callable[[int], object] | None = None

    def statistics(self, index: int) -> Mapping[str, Any]:
        """Return torch's statistics of a GPU, in which peaks count from the last reset of any kind."""
        return self._statistics(index)

    def reset(self, index: int) -> None:
        """Reset the peaks of a GPU."""
        if self._reset is None:
            self._reset = self._replace()
        peaks = self._peaks.setdefault(index, {})
        for name, pool, values in _pools(self._statistics(index)):
            peaks[name, pool] = max(values["peak"], peaks.get((name, pool), 0))
        self._reset(index)

    def _replace(self) -> Callable[[int], object]:
        """Replace the functions that read and reset peaks, and return the original function that resets peaks."""
        module = torch._C  # noqa: SLF001 -- the names are listed in `private_api`
        self._statistics = vars(module)[PEAK_READERS[0]]
        resets = [name for owner, name in peak_resets("cuda") if owner == module.__name__ and hasattr(module, name)]
        original: Callable[[int], object] = vars(module)[resets[0]]
        while hasattr(original, "__wrapped__"):
            original = original.__wrapped__
        for name in PEAK_READERS:
            if hasattr(module, name):
                setattr(module, name, self._with_earlier_peaks(vars(module)[name]))
        for name in resets:
            setattr(module, name, self._forgetting_peaks(vars(module)[name]))
        return original

    def _with_earlier_peaks(self, original: Callable[[int], dict[str, Any]]) -> Callable[[int], dict[str, Any]]:
        @wraps(original)
        def read(index: int) -> dict[str, Any]:
            statistics = original(index)
            peaks = self._peaks.get(index, {})
            for name, pool, values in _pools(statistics):
                values["peak"] = max(values["peak"], peaks.get((name, pool), 0))
            return statistics

        return read

    def _forgetting_peaks(self, original: Callable[[int], object]) -> Callable[[int], object]:
        @wraps(original)
        def reset(index: int) -> object:
            self._peaks.pop(index, None)
            return original(index)

        return reset


def _pools(statistics: Mapping[str, Any]) -> list[tuple[str, str, dict[str, int]]]:
    """Return the statistics with a peak: a name, a pool such as ``"all"``, and the values."""
    return [
        (name, pool, values)
        for name, pools in statistics.items()
        if isinstance(pools, dict)
        for pool, values in pools.items()
        if isinstance(values, dict) and "peak" in values
    ]
