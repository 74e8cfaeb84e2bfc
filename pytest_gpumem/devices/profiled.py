"""The allocations of a stretch on any device, as torch's profiler tells them."""

from __future__ import annotations

from contextlib import contextmanager, suppress
from typing import TYPE_CHECKING

from pytest_gpumem.devices.cuda_history import numbered_by_thread
from pytest_gpumem.devices.event_tree import MARK_PREFIX, tokens_of
from pytest_gpumem.measurement import MeasuringError
from pytest_gpumem.torch_support.private_api import quiet_kineto, threads_of_spans
from pytest_gpumem.values.events import AllocationEvent, Open

if TYPE_CHECKING:
    from collections.abc import Iterable, Iterator

    import torch

    from pytest_gpumem.values.events import Token

_END = -1
"""The mark at the end of every recording: a recording that lacks it has lost what came before, too."""
_CUT_SHORT = (
    "the recording of GPU allocations was cut short: only one profiler can run at a time, "
    "and the measured code started or stopped another"
)


@contextmanager
def profiled(tokens: list[Token], device: torch.device) -> Iterator[None]:
    """Within, operators and the allocations on a device are recorded; ``tokens`` has them in the end.

    Raises `MeasuringError` when somebody else's profiler came in between.
    """
    from torch.profiler import ProfilerActivity, profile, record_function

    profiler = profile(activities=[ProfilerActivity.CPU], profile_memory=True, record_shapes=True)
    with quiet_kineto():
        profiler.start()
    try:
        yield
        with record_function(f"{MARK_PREFIX}{_END}"):
            pass
    except BaseException:
        with suppress(RuntimeError):
            profiler.stop()
        raise
    found: list[Token] = []
    # torch 2.6 refuses to stop what somebody else has stopped; later ones give no events.
    with suppress(RuntimeError):
        profiler.stop()
        found = numbered_by_thread(tokens_of(profiler, device), threads_of_spans(profiler))
    ends = [
        n for n, token in enumerate(found) if isinstance(token, Open) and (token.kind, token.mark) == ("mark", _END)
    ]
    if not ends:
        raise MeasuringError(_CUT_SHORT)
    (end,) = ends
    tokens.extend(found[:end] + found[end + 2 :])


def check_change(tokens: Iterable[Token], change: int, device: str, counter: str) -> None:
    """Raise `MeasuringError` when what was recorded of ``device`` does not change what is live as its ``counter`` has it."""
    recorded = sum(token.nbytes for token in tokens if isinstance(token, AllocationEvent))
    if recorded != change:
        raise MeasuringError(
            f"what was recorded of {device} changes what is live by {recorded} bytes, and {counter} by {change}"
        )
