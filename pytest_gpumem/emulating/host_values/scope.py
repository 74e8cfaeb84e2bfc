"""Enter the mode `HostValues` for the whole process, except for backward's operators.

The importing thread enters the mode once and never leaves it. Each thread started later by Python enters it as well, and
autograd's threads inherit it. Methods for reading a tensor are watched in every thread.
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
from pytest_gpumem.torch_support.private_api import print_by_way_of_the_host

if TYPE_CHECKING:
    from collections.abc import Callable

_mode: HostValues | None = None


def begin() -> HostValues:
    """Enter the mode for the rest of the process. torch must be imported."""
    global _mode
    if _mode is None:
        _mode = HostValues()
        _mode.__enter__()
        # Use a single thread. The host computes only small tensors, and threads that share a core would wait for each other
        # and take 40 times as long.
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
    """Return this process's mode; ``None`` if no GPU is emulated."""
    return _mode


def _watch_threads(mode: HostValues) -> None:
    """Enter the mode in each new thread from now on."""

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

    # `threading` imported the original function, so `Thread.start` is replaced as well.
    _thread.start_new_thread = _thread.start_new = begin_within
