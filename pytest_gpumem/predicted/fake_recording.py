"""Runs a step on fake tensors, recorded: the trace of what it would do with memory, where there is none of the device."""

from __future__ import annotations

from contextlib import ExitStack
from typing import TYPE_CHECKING, Any

import torch

from pytest_gpumem.explain.cycles import collect_and_tell
from pytest_gpumem.explain.trace import Mark, Trace
from pytest_gpumem.explain.tracker import Tracker
from pytest_gpumem.predicted.fake_memory import FakeMemory

if TYPE_CHECKING:
    from collections.abc import Callable

    from pytest_gpumem.devices.events import Token
    from pytest_gpumem.explain.sites import Sites
    from pytest_gpumem.explain.tracker import Level

_HOST = torch.device("cpu")


def fake_trace(
    build: Callable[[], torch.nn.Module],
    batch: Any,
    run: Callable[[torch.nn.Module, Any, Tracker], object],
    sites: Sites,
    *,
    warm_ups: int = 1,
    granularity: int = 1,
    assumed: float | None = None,
    level: Level = "calls",
) -> Trace:
    """The trace of ``run(model, batch, tracker)`` after ``warm_ups`` of the same, with ``model = build()``.

    All of it happens on fake tensors, and those of ``batch``, if real, are replaced by fake ones. ``run`` marks its phases
    on the tracker; optimizers are found by themselves. Every block that is there when the recording begins is the step's:
    ``sum(trace.before.values())`` are its bytes then. ``granularity`` and ``assumed`` as in `FakeMemory`.

    Python's cyclic collector has to be off, as in `record`. Raises what ``build`` and ``run`` raise, torch's
    ``DataDependentOutputException`` for a step that reads a value when none is ``assumed``, and `MeasuringError` where the
    recording was cut short or bytes cannot be told.
    """
    memory = FakeMemory(granularity, assumed)

    def tracking() -> Tracker:
        return Tracker(_HOST, sites, level, memory.births, memory.blocks_of)

    tokens: list[Token] = []
    with ExitStack() as stack:
        stack.enter_context(memory.entered())
        with memory.born(sites):
            model = build()
        batch = memory.faked(batch)
        for _ in range(warm_ups):
            run(model, batch, tracking())
        collect_and_tell()
        before = memory.live()
        tracker = tracking()
        stack.enter_context(memory.recorded(tokens))
        tracker.know(model, inputs=batch)
        tracker.look()
        with tracker.watching():
            run(model, batch, tracker)
        tracker.look()
        with tracker.mark(Mark("rest", "garbage")):
            collect_and_tell()
    return Trace(
        tuple(tokens),
        tuple(tracker.marks),
        tracker.looks,
        before,
        frozenset(before),
        granularity=granularity,
        results=tracker.results,
    )
