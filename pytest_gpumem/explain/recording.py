"""Recording of a step in a run of its own, apart from the measured ones, and the explanation of its peak."""

from __future__ import annotations

import gc
import re
import warnings
from contextlib import contextmanager, nullcontext, suppress
from dataclasses import dataclass, field, replace
from itertools import accumulate
from typing import TYPE_CHECKING

from pytest_gpumem.explain.compose import (
    composition_at,
    composition_of_garbage,
    composition_of_peak,
    composition_of_retained,
    compositions_of_phases,
    holders_in,
    holders_of_inputs_in,
    left_by,
)
from pytest_gpumem.explain.cycles import collect_cycles
from pytest_gpumem.explain.holders import holders_of
from pytest_gpumem.explain.lifetimes import Timeline, timeline_of
from pytest_gpumem.explain.renewed_inputs import renewals, with_makers_of_inputs
from pytest_gpumem.explain.trace import WHOLE_STEP, Mark, Trace
from pytest_gpumem.explain.tracker import Level, Tracker
from pytest_gpumem.torch_support.private_api import compiled_graphs
from pytest_gpumem.torch_support.tracebacks import clear_frames
from pytest_gpumem.units import format_bytes, parse_size
from pytest_gpumem.values.composition import Explanation
from pytest_gpumem.values.events import NOWHERE, AllocationEvent, Close, Open

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator, Mapping, Sequence

    import torch

    from pytest_gpumem.devices.contract import Device
    from pytest_gpumem.explain.owners import TensorOwners
    from pytest_gpumem.explain.sites import Site, Sites
    from pytest_gpumem.values.events import Token

_CLOSELY: tuple[Level, ...] = ("calls", "modules", "phases")
_GPU = re.compile(r"\bGPU (\d+) has a total capacity")
_TRIED_TO_ALLOCATE = re.compile(r"[Tt]ried to allocate ([\d.]+ ?\w+)")


@dataclass(frozen=True, slots=True)
class Expected:
    """Measured figures that a recording has to match, in bytes: the peak, and all allocations together.

    ``turnover`` is ``None`` for code that need not allocate the same again, such as a test's call that fills a cache.
    """

    peak: int
    turnover: int | None
    own: int | None = None
    """Bytes that it held when it began, where each step keeps more: bytes of later steps are not of this peak."""
    keeps: bool = False
    """True if a step is wanted that keeps bytes, where not each one need do so."""
    steps: int = 1
    """The number of steps that are recorded until one of them is as measured: more than one where they differ."""


@dataclass(frozen=True, slots=True)
class Left:
    """Blocks that an earlier run left: a cache, which is a part of the step, or a leak, which is not."""

    nbytes: int = 0
    addresses: frozenset[int] = frozenset()
    """Addresses of the blocks that are known one by one."""


@dataclass(frozen=True)
class Subject:
    """The step or call to record. ``run(tracker)`` runs it once; ``own`` gives the storages that it holds when it begins.

    What ``run`` returns is kept until garbage has been collected, and is no part of what was left.

    ``own_bytes`` counts those that belong to it when it begins, also those that cannot be found one by one. The defaults are
    those of a step that repeats, whose owners are found while it runs.
    """

    run: Callable[[Tracker], object]
    own: Callable[[], Sequence[torch.UntypedStorage]]
    own_bytes: Callable[[], int]
    register: Callable[[TensorOwners], None] = lambda _: None
    """Registers owners before it runs."""
    prepare: Callable[[], None] = lambda: None
    """Undoes what an earlier run would change of this one."""
    left: Callable[[], Left] = Left
    creation_sites: Mapping[int, Site] = field(default_factory=dict)
    once: bool = False
    """True if it is run once only: what it does besides allocating is done again with each run."""
    compiled: bool = False
    """True if it runs compiled code, which marks would make torch compile anew."""


@dataclass(frozen=True)
class Recorded:
    """A recording, read: ``own_bytes`` are the step's own when it began. ``error`` is what it ended with."""

    trace: Trace
    timeline: Timeline
    own_bytes: int
    cycles: tuple[str, ...]
    error: BaseException | None
    level: Level
    failed_in: int = -1
    """The mark of the innermost call that failed; -1 for none."""
    left: Left = field(default_factory=Left)
    holders: Mapping[int, str] = field(default_factory=dict)
    """The path to the holder of each block that the step left or made anew, by address (`holders_of`)."""

    def with_what_was_left(self) -> Recorded:
        """Return the same recording with the blocks that an earlier run left as the step's own."""
        trace = replace(self.trace, own=self.trace.own | (self.left.addresses & self.trace.before.keys()))
        own_bytes = self.own_bytes + self.left.nbytes
        return replace(self, trace=trace, timeline=timeline_of(trace, own_bytes), own_bytes=own_bytes, left=Left())

    def without_later_growth(self, own_bytes: int) -> Recorded:
        """Return the same recording as if it had begun with ``own_bytes``: without what the steps since then have kept."""
        if own_bytes >= self.own_bytes:
            return self
        return replace(self, timeline=timeline_of(self.trace, own_bytes), own_bytes=own_bytes)

    def is_as(self, expected: Expected) -> bool:
        """Return whether it allocated as many bytes as were measured, and keeps some if that is wanted."""
        return (
            self.peak == expected.peak
            and expected.turnover in (None, self.turnover)
            and (not expected.keeps or bool(left_by(self.timeline)))
        )

    @property
    def peak(self) -> int:
        """Peak of the step in bytes."""
        return self.own_bytes + self.timeline.peak_bytes

    @property
    def turnover(self) -> int:
        """Bytes that the step allocated in all."""
        ended = self.timeline.step_ended
        return sum(
            token.nbytes
            for token in self.trace.tokens[:ended]
            if isinstance(token, AllocationEvent) and token.nbytes > 0
        )


def explain(device: Device, sites: Sites, subject: Subject, expected: Expected) -> tuple[Explanation, Recorded]:
    """Record ``subject``, and explain its peak, which was measured as ``expected``.

    Marks can change the step: modules that look for a `TorchFunctionMode` take another path under one, and compiled code is
    compiled anew. Then it is recorded again with fewer marks, until it allocates and peaks as it did when it was measured. If
    it never does, the most detailed recording with the same peak is used, or the one with the closest peak and a note. Of steps
    that differ, as many are recorded as were looked at: the one with the highest peak may come again. Raises what ``subject``
    raises without marks, too. On several ranks it is recorded as often on all, as they decide (`Device.consensus`).
    """
    closest: Recorded | None = None
    levels = _CLOSELY[2:] if subject.compiled else _CLOSELY[:1] if subject.once else _CLOSELY
    for level in (*levels[:1] * expected.steps, *levels[1:]):
        graphs = compiled_graphs()
        done = record(device, sites, subject, level)
        if device.consensus.any(done.error is not None):
            if level == levels[-1] and done.error is not None and closest is None:
                raise done.error
            continue
        if done.left.nbytes and not done.is_as(expected):
            wider = done.with_what_was_left()
            done = wider if wider.is_as(expected) else done
        if expected.own is not None:
            done = done.without_later_growth(expected.own)
        if device.consensus.all(done.is_as(expected) and compiled_graphs() == graphs):
            return _explained(done), done
        # Of equal ones the first, which has the most detail.
        if closest is None or abs(done.peak - expected.peak) < abs(closest.peak - expected.peak):
            closest = done
    assert closest is not None, "an error of the last level is raised"
    explanation = _explained(closest)
    if closest.peak != expected.peak:
        note = f"the recorded run needed {closest.peak} bytes, the measured one {expected.peak}"
        if expected.steps > 1:
            note = (
                f"this is a step that needed {format_bytes(closest.peak)}: the one that needed {format_bytes(expected.peak)} "
                f"has not come again in {expected.steps} more; to see what grew, let batches come again within so many steps, "
                "or measure the largest by itself"
            )
        explanation = replace(explanation, peak=replace(explanation.peak, notes=(note,)))
    return explanation, closest


def explain_out_of_memory(device: Device, sites: Sites, subject: Subject) -> tuple[Explanation, Recorded] | None:
    """Record ``subject`` until memory runs out again, and return the composition of that moment; ``None`` if it does not."""
    done = record(device, sites, subject, "phases" if subject.compiled else "calls")
    if done.error is None or not is_out_of_memory(done.error):
        return None
    peak = composition_at(done.timeline, _moment_of_failure(done), done.own_bytes)
    return Explanation(peak, asked=asked_for(done.error)), done


def record(device: Device, sites: Sites, subject: Subject, level: Level) -> Recorded:
    """Run ``subject`` once and record it. Its exceptions are kept in the result, except Ctrl-C and the like.

    Python's cyclic collector has to be off, as in the steps that were measured.
    """
    subject.prepare()
    if subject.once:
        device.quiesce()  # it ran when nothing had run before it
    else:
        device.settle()
    device.workspaces()  # which are made again as they are now
    own = list(subject.own())
    device.register_existing(own)
    held = {storage.data_ptr(): storage.nbytes() for storage in own}
    del own
    before = {**held, **device.blocks()}
    left = subject.left()
    own_bytes = subject.own_bytes()
    tracker = Tracker(device.torch_device, sites, level, subject.creation_sites)
    tokens: list[Token] = []
    error: BaseException | None = None
    cycles: tuple[str, ...] = ()
    result: object = None
    # The measured run has shown its warnings already.
    with warnings.catch_warnings(), device.recorded(tokens):
        warnings.simplefilter("ignore")
        subject.register(tracker.owners)
        tracker.snapshot()
        try:
            # What lies in no span, as the storages that torch.load makes do, is left out of the profiler's tree for GPUs.
            with tracker.watching(), phase(tracker, WHOLE_STEP) if subject.once else nullcontext():
                result = subject.run(tracker)
        except Exception as raised:  # noqa: BLE001 - returned, and judged by the caller
            # Tracebacks would keep what the step held.
            clear_frames(raised)
            error = raised.with_traceback(None)
        tracker.snapshot()
        # The collector below must be able to free the inputs.
        tracker.owners.forget()
        with tracker.mark(Mark("rest", "workspaces")):
            device.release_workspaces()
        with tracker.mark(Mark("rest", "garbage")):
            cycles = collect_cycles()
        if result is not None:
            # It was not left: whoever runs it has it.
            with tracker.mark(Mark("rest", "result")):
                result = None
                gc.collect()
    device.restore_workspaces()
    trace = Trace(
        tuple(tokens), tuple(tracker.marks), tracker.snapshots, before, frozenset(held), results=tracker.results
    )
    timeline = timeline_of(trace, own_bytes)
    holders: Mapping[int, str] = {}
    if error is None:
        with suppress(Exception):
            # Names of holders are beside the explanation, and must not cost it.
            kept = [*left_by(timeline), *(made for _, made in renewals(timeline.lifetimes))]
            holders = holders_of({block.address: block.nbytes for block in kept})
    return Recorded(trace, timeline, own_bytes, cycles, error, level, tracker.failed_in, left, holders)


def is_out_of_memory(error: BaseException) -> bool:
    """Return whether an exception is of memory that ran out, for which the CPU's allocator has no class of its own."""
    import torch

    return isinstance(error, torch.OutOfMemoryError) or (
        isinstance(error, RuntimeError) and "DefaultCPUAllocator" in str(error)
    )


def gpu_that_ran_out(error: BaseException) -> str | None:
    """Return the GPU of which the error says that its memory ran out: ``GPU 1 has a total capacity of 79.19 GiB``."""
    found = _GPU.search(str(error))
    return None if found is None else f"cuda:{found.group(1)}"


def asked_for(error: BaseException) -> int | None:
    """Return the bytes that could not be allocated, from the error's message: ``Tried to allocate 20.00 GiB``."""
    found = _TRIED_TO_ALLOCATE.search(str(error))
    if found is None:
        return None
    size = found.group(1)
    if size.endswith("bytes"):
        return int(size.removesuffix("bytes"))
    return parse_size(size)


@contextmanager
def phase(tracker: Tracker, name: str) -> Iterator[None]:
    """Mark a phase of the recorded step."""
    with tracker.mark(Mark("phase", name)):
        yield
    tracker.snapshot()


def _explained(done: Recorded) -> Explanation:
    timeline = with_makers_of_inputs(done.timeline)
    return Explanation(
        composition_of_peak(timeline, done.own_bytes),
        composition_of_retained(timeline),
        composition_of_garbage(timeline),
        done.cycles,
        holders=holders_in(timeline, done.holders),
        holders_of_inputs=holders_of_inputs_in(timeline, done.holders),
        other_phases=compositions_of_phases(timeline, done.own_bytes),
    )


def _moment_of_failure(done: Recorded) -> int:
    """Return the moment when memory ran out: as CUDA's allocator records it, or else in the innermost call that failed.

    The host's allocation that failed is not among the events. What comes after it is the unwinding, which only frees, so it
    was when the most was live within that call.
    """
    tokens = done.trace.tokens
    reported = [n for n, token in enumerate(tokens) if isinstance(token, AllocationEvent) and token.address == NOWHERE]
    if reported:
        return reported[-1]
    opened = next(
        (n for n, token in enumerate(tokens) if isinstance(token, Open) and 0 <= token.mark == done.failed_in), None
    )
    if opened is None:
        return done.timeline.peak
    depths = accumulate(isinstance(token, Open) - isinstance(token, Close) for token in tokens[opened:])
    ended = next((n for n, depth in enumerate(depths, opened) if depth == 0), len(tokens) - 1)
    return max(range(opened, ended + 1), key=done.timeline.live.__getitem__)
