"""Recording of a step in a run of its own, apart from the measured ones, and the explanation of its peak."""

from __future__ import annotations

import gc
import re
import warnings
from collections import defaultdict
from contextlib import contextmanager, nullcontext, suppress
from dataclasses import dataclass, field, replace
from functools import partial
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
)
from pytest_gpumem.explain.cycles import collect_cycles
from pytest_gpumem.explain.holders import holders_of
from pytest_gpumem.explain.lifetimes import tensors_of_allocations, timeline_of
from pytest_gpumem.explain.renewed_inputs import renewals, with_makers_of_inputs
from pytest_gpumem.explain.survivors import survivors_of
from pytest_gpumem.explain.trace import WHOLE_STEP, Mark, Trace
from pytest_gpumem.explain.tracker import Level, Tracker
from pytest_gpumem.torch_support.private_api import compiled_graphs
from pytest_gpumem.torch_support.tracebacks import clear_frames
from pytest_gpumem.units import format_bytes, parse_size
from pytest_gpumem.values.composition import Explanation
from pytest_gpumem.values.events import NOWHERE, AllocationEvent, Close, Open
from pytest_gpumem.values.module_calls import KindsOfSteps

if TYPE_CHECKING:
    from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence

    import torch

    from pytest_gpumem.devices.contract import Device
    from pytest_gpumem.explain.blocks import Timeline
    from pytest_gpumem.explain.owners import TensorOwners
    from pytest_gpumem.explain.sites import Site, Sites
    from pytest_gpumem.explain.survivors import Survivors
    from pytest_gpumem.torch_support.private_api import Profile
    from pytest_gpumem.values.events import Token

DIFFERING_STEPS = 6
"""Steps that are recorded at least if they differ: enough to see what happens every second to sixth time.

If they keep bytes, as many follow each recorded step. So a recording begins 7 steps after the one before, a prime number, and
does not meet the same step of a period each time.
"""
_CLOSELY: tuple[Level, ...] = ("calls", "modules", "phases")
FOLLOWING_STEPS = 4
"""Following steps in a recording, if steps keep bytes and do not differ.

The number distinguishes a leak from a list of the latest four entries and from two buffers in turn. Sizes of random batches
rarely rise in each of these steps.
"""
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
    growth: int = 0
    """Bytes kept by each step on average. If this is more than 0, the recording must include a step that keeps bytes. The
    following steps are recorded, too, because they free the tensors that each step replaces."""
    steps: int = 1
    """The most steps that are recorded until one of them is as measured: more than one where they differ."""


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
    growth: int = 0
    """Measured bytes kept by each step on average."""
    ended: str = ""
    """The reason why fewer steps followed than wanted, as a clause."""
    kept_by_profiler: int = 0
    """Bytes that the step freed and the profiler kept alive until it was deleted, so that peak and lifetimes are wrong."""

    def with_tensors_of(self, other: Recorded) -> Recorded:
        """Return the same recording with the dtypes and shapes that ``other`` saw, if both made the same allocations."""
        trace = replace(self.trace, tensors=tensors_of_allocations(other.timeline, self.timeline))
        return replace(self, trace=trace, timeline=timeline_of(trace, self.own_bytes))

    def with_calls_of(self, kinds: KindsOfSteps) -> Recorded:
        """Return the same recording with the module calls of all kinds of steps."""
        calls = replace(self.timeline, no_grad=kinds.no_grad, no_backward=kinds.no_backward, callers=kinds.callers)
        return replace(self, timeline=calls)

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

    def held_against(self, expected: Expected) -> Recorded:
        """Return the same recording with as many own bytes at its beginning as the measured step had."""
        done = self
        if self.left.nbytes and not self.is_as(expected):
            wider = self.with_what_was_left()
            done = wider if wider.is_as(expected) else self
        return done if expected.own is None else done.without_later_growth(expected.own)

    def is_as(self, expected: Expected) -> bool:
        """Return whether it allocated as many bytes as were measured, and keeps some if that is wanted."""
        return (
            self.peak == expected.peak
            and expected.turnover in (None, self.turnover)
            and (not expected.growth or self.survivors.nbytes > 0)
        )

    @property
    def survivors(self) -> Survivors:
        """The blocks kept by the step."""
        return survivors_of(self.timeline, self.growth)

    @property
    def peak(self) -> int:
        """Peak of the step in bytes."""
        return self.own_bytes + self.timeline.peak_bytes

    @property
    def operators(self) -> int:
        """Number of operators that were recorded."""
        return _operators(self.trace.tokens)

    @property
    def turnover(self) -> int:
        """Bytes that the step allocated in all."""
        ended = self.timeline.step_ended
        return sum(
            token.nbytes
            for token in self.trace.tokens[:ended]
            if isinstance(token, AllocationEvent) and token.nbytes > 0
        )


def _operators(tokens: Iterable[Token]) -> int:
    return sum(isinstance(token, Open) and token.kind == "operator" for token in tokens)


def explain(device: Device, sites: Sites, subject: Subject, expected: Expected) -> tuple[Explanation, Recorded]:
    """Record ``subject``, and explain its peak, which was measured as ``expected``.

    Marks can change the step: modules that look for a `TorchFunctionMode` take another path under one, and compiled code is
    compiled anew. Then it is recorded again with fewer marks, until it allocates and peaks as it did when it was measured. If
    it never does, the most detailed recording with the same peak is used, or the one with the closest peak and a note.

    Steps that differ are recorded until the one with the highest peak comes again, at least `DIFFERING_STEPS` and at most as
    many as were looked at. Of several with this peak the one with the most operators is used, and calls of modules are those of
    all kinds of steps: a validation in every fifth step tells which modules it calls with grad mode off. If steps keep bytes,
    the steps in the same recording that follow are seen, too.

    Raises what ``subject`` raises without marks, too. On several ranks it is recorded as often on all, as they decide
    (`Device.consensus`).
    """
    attempts = max(device.consensus.exchange(expected.steps))
    growth = expected.growth if any(device.consensus.exchange(expected.growth)) else None
    following = 0 if growth is None else FOLLOWING_STEPS if attempts == 1 else DIFFERING_STEPS
    levels = _CLOSELY[2:] if subject.compiled else _CLOSELY[:1] if subject.once else _CLOSELY
    recorder = SubjectRecorder(device, sites, subject, growth or 0, following)
    recordings = _Recordings(expected, attempts)
    for level in (*levels[:1] * attempts, *levels[1:]):
        graphs = compiled_graphs()
        done = recorder.at(level)
        if device.consensus.any(done.error is not None):
            if recordings.matching is not None:
                break  # a loop that has ended
            if level == levels[-1] and done.error is not None and recordings.closest is None:
                raise done.error
            continue
        as_it_ran, done = done, done.held_against(expected)
        recordings.add(done, matches=device.consensus.all(done.is_as(expected) and compiled_graphs() == graphs))
        if recordings.matching is not None and device.consensus.all(recordings.suffice):
            break
        # A cache that becomes larger in each step never has an earlier size again.
        becomes_larger = bool(done.survivors.replacements) and done.peak > expected.peak
        if recordings.matching is None and device.consensus.all(becomes_larger):
            recordings.closest = as_it_ran
            break
    return recordings.explained()


class _Recordings:
    """Recordings of one subject, of which one is explained.

    Args:
        expected: The measured figures.
        attempts: The most steps that are recorded, the same on all ranks.
    """

    def __init__(self, expected: Expected, attempts: int) -> None:
        self._expected = expected
        self._wanted = min(attempts, DIFFERING_STEPS)
        self._number = 0
        self._steps = 0
        self._most_operators = 0
        """The most operators in a step, recorded or following."""
        self._kinds: defaultdict[Level, KindsOfSteps] = defaultdict(KindsOfSteps)
        self.closest: Recorded | None = None
        """The recording with the closest peak. Of equal ones the first, which has the most detail."""
        self.matching: Recorded | None = None
        """The recording as it was measured. Of several the one with the most operators."""

    def add(self, done: Recorded, *, matches: bool) -> None:
        """Add a recording that did not fail; ``matches`` says whether it is as the step was measured."""
        self._number += 1
        for step in (done.timeline, *done.timeline.following):
            self._steps += 1
            self._kinds[done.level].add(step.no_grad, step.no_backward, step.callers)
        following = map(_operators, done.trace.following)
        self._most_operators = max(self._most_operators, done.operators, *following)
        if matches and (self.matching is None or done.operators > self.matching.operators):
            self.matching = done
        if self.closest is None or self._distance(done) < self._distance(self.closest):
            self.closest = done

    @property
    def suffice(self) -> bool:
        """True if there is one as measured, and enough of steps that differ.

        The steps that follow are enough if none of them has more operators than the recorded one.
        """
        if self.matching is None or self._steps < self._wanted:
            return False
        return self._number >= self._wanted or self.matching.operators == self._most_operators

    def explained(self) -> tuple[Explanation, Recorded]:
        """Return the explanation of the best recording, and the recording."""
        best = self.matching or self.closest
        assert best is not None, "an error of the last level is raised"
        best = best.with_calls_of(self._kinds[best.level])
        explanation = _explained(best)
        if best.peak == self._expected.peak:
            return explanation, best
        note = _note_on_another(best, self._expected)
        return replace(explanation, peak=replace(explanation.peak, notes=(note,))), best

    def _distance(self, done: Recorded) -> int:
        return abs(done.peak - self._expected.peak)


def _note_on_another(closest: Recorded, expected: Expected) -> str:
    """Return a clause if the recorded step needed other bytes than the measured step."""
    needed, measured = format_bytes(closest.peak), format_bytes(expected.peak)
    if closest.survivors.replacements:
        return (
            f"each step needs more than the one before: the recorded step needed {needed}, the measured one {measured}"
        )
    if expected.steps > 1:
        return (
            f"this is a step that needed {needed}: the one that needed {measured} has not come again in {expected.steps} "
            "more; to see what grew, let batches come again within so many steps, or measure the largest by itself"
        )
    change = closest.peak - expected.peak
    compared = f"{format_bytes(abs(change))} {'more' if change > 0 else 'less'}"
    return (
        f"the recorded run needed {needed}, {compared} than the measured one, so rows are missing or too many; to see what "
        "grew, let runs repeat: fix the seed, and fill caches before"
    )


def explain_out_of_memory(device: Device, sites: Sites, subject: Subject) -> tuple[Explanation, Recorded] | None:
    """Record ``subject`` until memory runs out again, and return the composition of that moment; ``None`` if it does not."""
    done = SubjectRecorder(device, sites, subject).at("phases" if subject.compiled else "calls")
    if done.error is None or not is_out_of_memory(done.error):
        return None
    peak = composition_at(done.timeline, _moment_of_failure(done), done.own_bytes)
    return Explanation(peak, asked=asked_for(done.error)), done


class SubjectRecorder:
    """Records a subject at one level after another, as its memory is without the recording.

    The tensors that operators take tell dtypes and shapes, and their recording may keep memory alive (`profiled`). Then the
    subject is recorded once more without them, and so are the levels that follow. Dtypes and shapes come from the first
    recording.
    """

    def __init__(self, device: Device, sites: Sites, subject: Subject, growth: int = 0, following: int = 0) -> None:
        self._record = partial(record, device, sites, subject, growth=growth, following=following)
        self._consensus = device.consensus
        self._with_operands: Recorded | None = None
        """The recording whose profile kept memory alive."""

    def at(self, level: Level) -> Recorded:
        """Run the subject once, or twice where the profile of the first run keeps memory alive, and return its recording."""
        if self._with_operands is None:
            done = self._record(level)
            if not self._consensus.any(done.kept_by_profiler > 0):
                return done
            self._with_operands = done
        done = self._record(level, operands=False)
        return done.with_tensors_of(self._with_operands)


def record(
    device: Device,
    sites: Sites,
    subject: Subject,
    level: Level,
    *,
    growth: int = 0,
    following: int = 0,
    operands: bool = True,
) -> Recorded:
    """Run ``subject`` once and record it. Its exceptions are kept in the result, except Ctrl-C and the like.

    Python's cyclic collector has to be off, as in the steps that were measured.

    Args:
        device: The device that is recorded.
        sites: Finds the lines of calls.
        subject: The step or call.
        level: The detail of the recording.
        growth: The bytes kept by each step on average.
        following: The number of following steps that are recorded to find the blocks that the first step keeps. All other
            figures come from the first step.
        operands: The argument of `Device.recorded`.
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
    with warnings.catch_warnings(), device.recorded(tokens, operands=operands) as profiles:
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
        followed, ended = 0, ""
        if following and not device.consensus.any(error is not None):
            followed, ended = _follow(device, subject, tracker, following)
    kept_by_profiler = _deleted(profiles, device)
    device.restore_workspaces()
    trace = Trace(
        tuple(tokens), tuple(tracker.marks), tracker.snapshots, before, frozenset(held), results=tracker.results
    ).apart(followed)
    timeline = timeline_of(trace, own_bytes)
    holders: Mapping[int, str] = {}
    if error is None:
        with suppress(Exception):
            # Names of holders are beside the explanation, and must not cost it.
            holders = holders_of(_blocks_to_hold(timeline, growth, trace.freed_at_end))
    return Recorded(
        trace,
        timeline,
        own_bytes,
        cycles,
        error,
        level,
        tracker.failed_in,
        left,
        holders,
        growth,
        ended,
        kept_by_profiler,
    )


def _deleted(profiles: list[Profile], device: Device) -> int:
    """Delete the profiles, and return the bytes that they kept alive."""
    live = device.live()
    profiles.clear()
    return live - device.live()


def _follow(device: Device, subject: Subject, tracker: Tracker, steps: int) -> tuple[int, str]:
    """Run ``steps`` more steps, each in its own mark, and collect garbage after each step.

    Returns:
        The number of completed steps, and the reason why there were no more as a clause: a loop has ended.
    """
    for number in range(steps):
        ended = ""
        with tracker.mark(Mark("next")):
            try:
                with tracker.watching():
                    subject.run(tracker)
            except Exception as raised:  # noqa: BLE001 - the recorded step is there, and is explained without those after it
                clear_frames(raised)
                ended = str(raised).partition("\n")[0] or type(raised).__name__
            tracker.snapshot()
            with tracker.mark(Mark("rest", "workspaces")):
                device.release_workspaces()
            with tracker.mark(Mark("rest", "garbage")):
                gc.collect()
        clause = device.consensus.first(ended or None)
        if clause is not None:
            return number, clause
    return steps, ""


def _blocks_to_hold(timeline: Timeline, growth: int, freed: Collection[int]) -> dict[int, int]:
    """Return the size of each block whose holder is looked for, by address, without the blocks ``freed`` since then."""
    survivors = survivors_of(timeline, growth)
    blocks = [
        *survivors.blocks,
        *(block for pool in survivors.ambiguous for block in pool.blocks),
        *(block for larger in survivors.replacements for block in larger.latest),
        *(renewal.latest for renewal in renewals(timeline) if renewal.latest is not None),
    ]
    return {block.address: block.nbytes for block in blocks if block.address not in freed}


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
    retained = composition_of_retained(timeline, done.growth)
    return Explanation(
        composition_of_peak(timeline, done.own_bytes),
        replace(retained, notes=(*retained.notes, *_notes_on_growth(done))),
        composition_of_garbage(timeline),
        done.cycles,
        holders=holders_in(timeline, done.holders, done.growth),
        holders_of_inputs=holders_of_inputs_in(timeline, done.holders),
        other_phases=compositions_of_phases(timeline, done.own_bytes),
        callers=timeline.callers,
        function_at=timeline.function_at,
    )


def _notes_on_growth(done: Recorded) -> Iterator[str]:
    """Yield clauses if the recorded step kept other bytes than the measured steps."""
    nbytes = done.survivors.nbytes
    if not done.growth:
        return
    if not nbytes:
        yield "no recorded step kept bytes, so the lines that keep bytes are not known"
        return
    if not done.timeline.following:
        yield f"{done.ended}: no step came after the recorded step, so a tensor that each step replaces may be in the table"
    if nbytes != done.growth:
        yield f"the recorded step kept {format_bytes(nbytes)}; on average each step keeps {format_bytes(done.growth)}"


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
