"""Enter the dispatch mode `HostValues` for the whole process, except for the operators in backward.

The thread that calls `begin` enters the mode and never leaves it. Each thread that Python starts later enters the mode too, and
autograd's threads inherit the mode. The methods that read a tensor (`watched_methods`) are replaced in the whole process.
"""

from __future__ import annotations

import _thread
from functools import wraps
from threading import Thread
from typing import TYPE_CHECKING, Any

import torch

from pytest_gpumem.emulating.host_values.backward import away_in_backward
from pytest_gpumem.emulating.host_values.graphs import follow_graphs
from pytest_gpumem.emulating.host_values.mode import HostValues
from pytest_gpumem.emulating.host_values.native_reads import answer_native_reads
from pytest_gpumem.emulating.host_values.triton_kernels import forget_what_kernels_write
from pytest_gpumem.emulating.host_values.unknown_float import UnknownFloat
from pytest_gpumem.emulating.host_values.watched_methods import watch_methods
from pytest_gpumem.torch_support.private_api.tensors import print_by_way_of_the_host

if TYPE_CHECKING:
    from collections.abc import Callable

_mode: HostValues | None = None


def begin() -> HostValues:
    """Enter `HostValues` for the rest of the process, and replace torch's functions that read values without an operator."""
    global _mode
    if _mode is None:
        _mode = HostValues()
        _mode.__enter__()
        # Let the CPU use a single thread, because it computes only small tensors. If several threads shared a core, they would
        # wait for each other, and a step would take 40 times as long.
        torch.set_num_threads(1)
        UnknownFloat.reads = _mode.reads
        watch_methods(_mode)
        _watch_threads(_mode)
        print_by_way_of_the_host(_mode.reads.ignored)
        away_in_backward(_mode)
        answer_native_reads(_mode)
        forget_what_kernels_write(_mode)
        follow_graphs(_mode)
    return _mode


def current() -> HostValues | None:
    """Return the `HostValues` of this process; ``None`` if no GPU is emulated."""
    return _mode


def _watch_threads(mode: HostValues) -> None:
    """From now on, make each new Python thread enter the mode."""

    def within(function: Callable[..., object]) -> Callable[..., None]:
        def run_within(*args: Any, **named: Any) -> None:
            with mode:
                function(*args, **named)

        return run_within

    start = Thread.start

    @wraps(start)
    def start_within(self: Thread) -> None:
        self.run = within(self.run)  # type: ignore[method-assign]
        start(self)

    Thread.start = start_within  # type: ignore[method-assign]
    begin_thread = _thread.start_new_thread

    @wraps(begin_thread)
    def begin_within(
        function: Callable[..., object], args: tuple[Any, ...], named: dict[str, Any] | None = None
    ) -> int:
        return begin_thread(within(function), args, named or {})

    # The module `threading` has imported the original function, and still calls it. So `Thread.start` is replaced too.
    _thread.start_new_thread = _thread.start_new = begin_within
