"""Record a step in a separate run, and explain the step's peak.

A recording contains marks, which are spans for phases, modules and calls. Marks and the profiler may change a step's memory, so
the measured runs use neither. The recorded run must have the same peak and the same sum of allocations as the measured run. If
it does not, the step is recorded again with fewer marks.
"""

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

from pytest_gpumem.base.units import format_bytes, parse_size
from pytest_gpumem.facts.values.composition import Explanation
from pytest_gpumem.facts.values.events import NOWHERE, AllocationEvent, SpanBegin, SpanEnd
from pytest_gpumem.facts.values.module_calls import KindsOfSteps
from pytest_gpumem.measuring.explain.compose import (
    composition_at,
    composition_of_garbage,
    composition_of_peak,
    composition_of_retained,
    compositions_of_phases,
    holders_in,
    holders_of_inputs_in,
)
from pytest_gpumem.measuring.explain.cycles import collect_cycles
from pytest_gpumem.measuring.explain.lifetimes import tensors_of_allocations, timeline_of
from pytest_gpumem.measuring.explain.renewed_inputs import renewals, with_makers_of_inputs
from pytest_gpumem.measuring.explain.survivors import survivors_of
from pytest_gpumem.measuring.explain.trace import WHOLE_STEP, Mark, Trace
from pytest_gpumem.measuring.explain.tracker import Level, Tracker
from pytest_gpumem.torch_support.holders import holders_of
from pytest_gpumem.torch_support.private_api.compiler import compiled_graphs
from pytest_gpumem.torch_support.tracebacks import clear_frames

if TYPE_CHECKING:
    from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence

    import torch

    from pytest_gpumem.facts.values.events import Token
    from pytest_gpumem.measuring.devices.contract import Device
    from pytest_gpumem.measuring.explain.blocks import Timeline
    from pytest_gpumem.measuring.explain.owners import TensorOwners
    from pytest_gpumem.measuring.explain.sites import Site, Sites
    from pytest_gpumem.measuring.explain.survivors import Survivors
    from pytest_gpumem.torch_support.private_api.profiler import Profile

DIFFERING_STEPS = 6
"""The minimum number of steps to record if steps differ. For example, 6 steps include work done in every sixth step.

If steps keep bytes, 6 more steps follow each recorded step. So recordings begin 7 steps apart. Because 7 is a prime number,
recordings meet all kinds of steps even if steps repeat in a period of 2 to 6 steps.
"""
_CLOSELY: tuple[Level, ...] = ("calls", "modules", "phases")
"""The levels of detail, from most marks to fewest."""
FOLLOWING_STEPS = 4
"""The number of following steps in a recording, if steps keep bytes and do not differ.

4 steps distinguish a leak from a list with the latest four entries, and from two alternating buffers. Random batch sizes rarely
rise 4 times in a row, so they are not mistaken for a cache that grows in each step.
"""
_GPU = re.compile(r"\bGPU (\d+) has a total capacity")
_TRIED_TO_ALLOCATE = re.compile(r"[Tt]ried to allocate ([\d.]+ ?\w+)")


@dataclass(frozen=True, slots=True)
class ExpectedFigures:
    """Figures from the measured step, in bytes. A recording has to match these figures.

    Example:
        A step was measured with ``peak=10_575_904``. A recording with marks for each call peaks at 10,575,904 bytes and also
        has the measured ``turnover``, so it matches. If it peaked at 10,700,000 bytes, the step would be recorded again with
        marks for modules only.
    """

    peak: int
    turnover: int | None
    """The sum of all allocations. ``None`` if a second run may allocate less, for example because the first fills a cache."""
    own: int | None = None
    """The measured step's own bytes at its beginning; ``None`` if steps keep nothing.

    The recording runs after further steps. The bytes kept by these further steps do not belong to the measured peak.
    """
    growth: int = 0
    """Bytes kept by each step on average. If this is more than 0, the recording must include a step that keeps bytes. Following
    steps are recorded too, because they free tensors that are only replaced and not kept."""
    steps: int = 1
    """The maximum number of steps to record until a recording matches. This is more than 1 if steps differ."""


@dataclass(frozen=True, slots=True)
class EarlierBlocks:
    """Blocks left behind by an earlier run. They are a cache, which belongs to the step, or a leak, which does not."""

    nbytes: int = 0
    addresses: frozenset[int] = frozenset()
    """The blocks' addresses, as far as these are known."""


@dataclass(frozen=True)
class Subject:
    """The step or call to record. The defaults fit a repeated step, whose owners are found while the step runs."""

    run: Callable[[Tracker], object]
    """Runs the subject once. The result stays alive until garbage has been collected. Afterwards it is freed, so it does not
    count among the blocks left behind by the subject."""
    own: Callable[[], Sequence[torch.UntypedStorage]]
    """Called before the run. Returns the subject's own storages."""
    own_bytes: Callable[[], int]
    """Called before the run. Returns the subject's own bytes, including blocks that ``own`` cannot find."""
    register: Callable[[TensorOwners], None] = lambda _: None
    """Called before the run. Registers the owners of tensors."""
    prepare: Callable[[], None] = lambda: None
    """Called before the run. Undoes an earlier run's changes, for example empties a cache."""
    earlier_blocks: Callable[[], EarlierBlocks] = EarlierBlocks
    """Called before the run. Returns the blocks left behind by an earlier run."""
    creation_sites: Mapping[int, Site] = field(default_factory=dict)
    is_once: bool = False
    """True to record at a single level of detail only, because each further run repeats the subject's side effects."""
    is_compiled: bool = False
    """True if the subject runs compiled code, which torch would compile again under marks."""


@dataclass(frozen=True)
class Recording:
    """The recording of a step, with the timeline and further results."""

    trace: Trace
    timeline: Timeline
    own_bytes: int
    """The step's own bytes at its beginning."""
    cycles: tuple[str, ...]
    """The types in reference cycles that hold tensors (`collect_cycles`)."""
    error: BaseException | None
    """The exception that ended the step; ``None`` if the step succeeded."""
    level: Level
    failed_in: int = -1
    """The index of the mark for the innermost call that failed; -1 for none."""
    earlier_blocks: EarlierBlocks = field(default_factory=EarlierBlocks)
    holders: Mapping[int, str] = field(default_factory=dict)
    """The path to the holder of each block that the step left or replaced, by address (`holders_of`)."""
    growth: int = 0
    """The measured bytes kept by each step on average."""
    ended: str = ""
    """The reason why fewer steps followed than requested, as a clause."""
    kept_by_profiler: int = 0
    """Bytes that the step freed but the profiler kept alive. If this is more than 0, peak and lifetimes are wrong."""

    def with_tensors_of(self, other: Recording) -> Recording:
        """Return the same recording with dtypes and shapes from ``other``, if both made the same allocations."""
        trace = replace(self.trace, tensors=tensors_of_allocations(other.timeline, self.timeline))
        return replace(self, trace=trace, timeline=timeline_of(trace, self.own_bytes))

    def with_calls_of(self, kinds: KindsOfSteps) -> Recording:
        """Return the same recording with the module calls from all recorded kinds of steps."""
        calls = replace(self.timeline, no_grad=kinds.no_grad, no_backward=kinds.no_backward, callers=kinds.callers)
        return replace(self, timeline=calls)

    def with_left_blocks(self) -> Recording:
        """Return the same recording, but count the blocks left behind by an earlier run as the step's own."""
        trace = replace(self.trace, own=self.trace.own | (self.earlier_blocks.addresses & self.trace.before.keys()))
        own_bytes = self.own_bytes + self.earlier_blocks.nbytes
        return replace(
            self,
            trace=trace,
            timeline=timeline_of(trace, own_bytes),
            own_bytes=own_bytes,
            earlier_blocks=EarlierBlocks(),
        )

    def without_later_growth(self, own_bytes: int) -> Recording:
        """Return the same recording, but count at most ``own_bytes`` of older blocks as the step's own.

        The other older blocks come from steps between the measurement and the recording.
        """
        if own_bytes >= self.own_bytes:
            return self
        return replace(self, timeline=timeline_of(self.trace, own_bytes), own_bytes=own_bytes)

    def adjusted_to(self, expected: ExpectedFigures) -> Recording:
        """Return the recording as if it began with the measured step's own bytes.

        If the recording matches ``expected`` only with the blocks left behind by an earlier run, these blocks are a cache and
        count as the step's own.
        """
        recording = self
        if self.earlier_blocks.nbytes and not self.matches(expected):
            with_left = self.with_left_blocks()
            recording = with_left if with_left.matches(expected) else self
        return recording if expected.own is None else recording.without_later_growth(expected.own)

    def matches(self, expected: ExpectedFigures) -> bool:
        """Return whether the recording matches the measured figures."""
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
        """The step's peak in bytes."""
        return self.own_bytes + self.timeline.peak_bytes

    @property
    def operators(self) -> int:
        """The number of recorded operators."""
        return _operators(self.trace.tokens)

    @property
    def turnover(self) -> int:
        """The sum of the step's allocations in bytes."""
        ended = self.timeline.step_ended
        return sum(
            token.nbytes
            for token in self.trace.tokens[:ended]
            if isinstance(token, AllocationEvent) and token.nbytes > 0
        )


def _operators(tokens: Iterable[Token]) -> int:
    return sum(isinstance(token, SpanBegin) and token.kind == "operator" for token in tokens)


def explain(device: Device, sites: Sites, subject: Subject, expected: ExpectedFigures) -> tuple[Explanation, Recording]:
    """Record a subject, and explain its peak.

    Marks can change a step: some modules take another path under a `TorchFunctionMode`, and torch compiles compiled code
    again. After a mismatch, the step is recorded with fewer marks. If no recording has the measured peak and allocations, the
    recording with the closest peak is used. If this peak differs from the measured peak, a note says so. Among equally close
    recordings, the most detailed recording is used.

    If steps differ, the measured peak comes from the step with the highest peak. So several steps are recorded with the most
    marks, until a step has this peak: at least `DIFFERING_STEPS` steps, and at most ``expected.steps``. If several recordings
    have this peak, the recording with the most operators is used. Module calls are collected from all recorded steps, for
    example from a validation in every fifth step. If steps keep bytes, a recording also contains the following steps.

    All ranks make the same number of recordings, because they decide together (`Device.consensus`).

    Args:
        device: The device whose peak is explained.
        sites: Finds the lines of calls.
        subject: The step or call.
        expected: The measured figures.

    Returns:
        The explanation and its recording.

    Raises:
        BaseException: The subject's exception, if the subject also fails with the fewest marks.
    """
    attempts = max(device.consensus.exchange(expected.steps))
    growth = expected.growth if any(device.consensus.exchange(expected.growth)) else None
    following = 0 if growth is None else FOLLOWING_STEPS if attempts == 1 else DIFFERING_STEPS
    levels = _CLOSELY[2:] if subject.is_compiled else _CLOSELY[:1] if subject.is_once else _CLOSELY
    recorder = SubjectRecorder(device, sites, subject, growth or 0, following)
    recordings = _Recordings(expected, attempts)
    for level in (*levels[:1] * attempts, *levels[1:]):
        graphs = compiled_graphs()
        recorded = recorder.at(level)
        if device.consensus.any(recorded.error is not None):
            if recordings.matching is not None:
                break  # the user's loop has ended, and an earlier recording matches
            if level == levels[-1] and recorded.error is not None and recordings.closest is None:
                raise recorded.error
            continue
        unadjusted, recorded = recorded, recorded.adjusted_to(expected)
        matches = device.consensus.all(recorded.matches(expected) and compiled_graphs() == graphs)
        recordings.add(recorded, matches=matches)
        if recordings.matching is not None and device.consensus.all(recordings.suffice):
            break
        # A cache that grows in each step never has the measured size again, so further recordings cannot match.
        becomes_larger = bool(recorded.survivors.replacements) and recorded.peak > expected.peak
        if recordings.matching is None and device.consensus.all(becomes_larger):
            recordings.closest = unadjusted
            break
    return recordings.explained()


class _Recordings:
    """Collects the recordings of a subject, and chooses the recording to explain.

    Args:
        expected: The measured figures.
        attempts: The maximum number of steps to record, equal on all ranks.
    """

    def __init__(self, expected: ExpectedFigures, attempts: int) -> None:
        self._expected = expected
        self._wanted = min(attempts, DIFFERING_STEPS)
        self._number = 0
        self._steps = 0
        self._most_operators = 0
        """The largest number of operators in a step, which may be a recorded or a following step."""
        self._kinds: defaultdict[Level, KindsOfSteps] = defaultdict(KindsOfSteps)
        self.closest: Recording | None = None
        """The recording whose peak is closest to the measured peak. Among equally close recordings, the most detailed."""
        self.matching: Recording | None = None
        """The matching recording with the most operators."""

    def add(self, recorded: Recording, *, matches: bool) -> None:
        """Add a recording without an error. ``matches`` is True if the recording matches the measured figures."""
        self._number += 1
        for step in (recorded.timeline, *recorded.timeline.following):
            self._steps += 1
            self._kinds[recorded.level].add(step.no_grad, step.no_backward, step.callers)
        following = map(_operators, recorded.trace.following)
        self._most_operators = max(self._most_operators, recorded.operators, *following)
        if matches and (self.matching is None or recorded.operators > self.matching.operators):
            self.matching = recorded
        if self.closest is None or self._distance(recorded) < self._distance(self.closest):
            self.closest = recorded

    @property
    def suffice(self) -> bool:
        """True if a recording matches, and enough kinds of steps were seen.

        Following steps also count as seen, unless a following step has more operators than the matching recording.
        """
        if self.matching is None or self._steps < self._wanted:
            return False
        return self._number >= self._wanted or self.matching.operators == self._most_operators

    def explained(self) -> tuple[Explanation, Recording]:
        """Return the explanation of the best recording, and this recording."""
        best = self.matching or self.closest
        assert best is not None, "without a recording, explain() has raised the error"
        best = best.with_calls_of(self._kinds[best.level])
        explanation = _explained(best)
        if best.peak == self._expected.peak:
            return explanation, best
        note = _note_on_another(best, self._expected)
        return replace(explanation, peak=replace(explanation.peak, notes=(note,))), best

    def _distance(self, recorded: Recording) -> int:
        return abs(recorded.peak - self._expected.peak)


def _note_on_another(closest: Recording, expected: ExpectedFigures) -> str:
    """Return a clause with the difference between the recorded step's peak and the measured peak."""
    needed, measured = format_bytes(closest.peak), format_bytes(expected.peak)
    if closest.survivors.replacements:
        return f"each step needs more than the previous step: the recorded step needed {needed}, the measured step {measured}"
    if expected.steps > 1:
        return (
            f"the table shows a step with {needed}, because the step with {measured} has not come again in {expected.steps} "
            "more steps; let batches repeat within that many steps, or measure the largest batch separately"
        )
    change = closest.peak - expected.peak
    compared = f"{format_bytes(abs(change))} {'more' if change > 0 else 'less'}"
    return (
        f"the recorded run needed {needed}, {compared} than the measured run, so some rows are missing or wrong; let "
        "runs repeat exactly: fix the seed, and fill caches before the measurement"
    )


def explain_out_of_memory(device: Device, sites: Sites, subject: Subject) -> tuple[Explanation, Recording] | None:
    """Record ``subject`` until memory runs out again, and return the composition at this moment with the recording.

    The result is ``None`` if memory does not run out again.
    """
    recorded = SubjectRecorder(device, sites, subject).at("phases" if subject.is_compiled else "calls")
    if recorded.error is None or not is_out_of_memory(recorded.error):
        return None
    peak = composition_at(recorded.timeline, _moment_of_failure(recorded), recorded.own_bytes)
    return Explanation(peak, asked=asked_for(recorded.error)), recorded


class SubjectRecorder:
    """Records a subject at several levels of detail. In the recordings, the profiler keeps no memory alive.

    A profile with operands (the tensors passed to operators) shows dtypes and shapes, but may keep the operands alive
    (`profiled`). In this case, the subject is recorded again without operands, also at all later levels. Dtypes and shapes then
    come from the first recording.
    """

    def __init__(self, device: Device, sites: Sites, subject: Subject, growth: int = 0, following: int = 0) -> None:
        self._record = partial(record, device, sites, subject, growth=growth, following=following)
        self._consensus = device.consensus
        self._with_operands: Recording | None = None
        """The recording with operands, if its profile kept memory alive."""

    def at(self, level: Level) -> Recording:
        """Run the subject and return its recording. If the profile keeps memory alive, the subject runs twice."""
        if self._with_operands is None:
            recorded = self._record(level)
            if not self._consensus.any(recorded.kept_by_profiler > 0):
                return recorded
            self._with_operands = recorded
        recorded = self._record(level, operands=False)
        return recorded.with_tensors_of(self._with_operands)


def record(
    device: Device,
    sites: Sites,
    subject: Subject,
    level: Level,
    *,
    growth: int = 0,
    following: int = 0,
    operands: bool = True,
) -> Recording:
    """Run a subject once and record the run.

    Python's cyclic collector has to be off, as in measured steps.

    Args:
        device: The device to record.
        sites: Finds the lines of calls.
        subject: The step or call.
        level: The level of detail.
        growth: The bytes kept by each step on average.
        following: The number of following steps to record. They show which blocks the recorded step keeps. All other figures
            come from the recorded step.
        operands: True to record the tensors passed to operators (`Device.recorded`).

    Returns:
        The recording. Its ``error`` is the subject's exception. Other exceptions, such as ``KeyboardInterrupt``, are raised.
    """
    subject.prepare()
    if subject.is_once:
        device.quiesce()  # the measured run began with empty caches too
    else:
        device.settle()
    device.workspaces()  # this drops the workspaces and creates them anew
    own = list(subject.own())
    device.register_existing(own)
    held = {storage.data_ptr(): storage.nbytes() for storage in own}
    del own
    before = {**held, **device.blocks()}
    earlier_blocks = subject.earlier_blocks()
    own_bytes = subject.own_bytes()
    tracker = Tracker(device.torch_device, sites, level, subject.creation_sites)
    tokens: list[Token] = []
    error: BaseException | None = None
    cycles: tuple[str, ...] = ()
    result: object = None
    # The measured run has already shown these warnings.
    with warnings.catch_warnings(), device.recorded(tokens, operands=operands) as profiles:
        warnings.simplefilter("ignore")
        subject.register(tracker.owners)
        tracker.snapshot()
        try:
            # On GPUs, the profiler leaves out allocations outside of all spans, for example torch.load's storages.
            with tracker.watching(), phase(tracker, WHOLE_STEP) if subject.is_once else nullcontext():
                result = subject.run(tracker)
        except Exception as raised:  # noqa: BLE001 - returned to the caller
            # Tracebacks would keep the step's tensors alive.
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
            # The result does not count as left behind, because the subject's caller uses the result.
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
            # An error in the search for holders must not prevent the explanation.
            holders = holders_of(_blocks_to_hold(timeline, growth, trace.freed_at_end))
    return Recording(
        trace,
        timeline,
        own_bytes,
        cycles,
        error,
        level,
        tracker.failed_in,
        earlier_blocks,
        holders,
        growth,
        ended,
        kept_by_profiler,
    )


def _deleted(profiles: list[Profile], device: Device) -> int:
    """Delete the profiles, and return the bytes kept alive by the profiles."""
    live = device.live()
    profiles.clear()
    return live - device.live()


def _follow(device: Device, subject: Subject, tracker: Tracker, steps: int) -> tuple[int, str]:
    """Run ``steps`` more steps, each in its own mark, and collect garbage after each step.

    Returns:
        The number of completed steps, and a clause with the reason if a step failed, for example because a loop has ended.
    """
    for number in range(steps):
        ended = ""
        with tracker.mark(Mark("next")):
            try:
                with tracker.watching():
                    subject.run(tracker)
            except Exception as raised:  # noqa: BLE001 - the recorded step is explained without this following step
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
    """Return the size of each block whose holder is searched, by address. The addresses in ``freed`` are left out."""
    survivors = survivors_of(timeline, growth)
    blocks = [
        *survivors.blocks,
        *(block for pool in survivors.ambiguous for block in pool.blocks),
        *(block for larger in survivors.replacements for block in larger.latest),
        *(renewal.latest for renewal in renewals(timeline) if renewal.latest is not None),
    ]
    return {block.address: block.nbytes for block in blocks if block.address not in freed}


def is_out_of_memory(error: BaseException) -> bool:
    """Return whether an exception means that memory ran out. The CPU's allocator raises a plain ``RuntimeError``."""
    import torch

    return isinstance(error, torch.OutOfMemoryError) or (
        isinstance(error, RuntimeError) and "DefaultCPUAllocator" in str(error)
    )


def gpu_that_ran_out(error: BaseException) -> str | None:
    """Return the GPU that ran out of memory, from the error's message; ``None`` if the message names no GPU.

    Example:
        ``"cuda:1"`` for ``GPU 1 has a total capacity of 79.19 GiB``.
    """
    match = _GPU.search(str(error))
    return None if match is None else f"cuda:{match.group(1)}"


def asked_for(error: BaseException) -> int | None:
    """Return the bytes that could not be allocated, from the error's message; ``None`` if the message does not mention them.

    Example:
        21,474,836,480 for ``Tried to allocate 20.00 GiB``.
    """
    match = _TRIED_TO_ALLOCATE.search(str(error))
    if match is None:
        return None
    size = match.group(1)
    if size.endswith("bytes"):
        return int(size.removesuffix("bytes"))
    return parse_size(size)


@contextmanager
def phase(tracker: Tracker, name: str) -> Iterator[None]:
    """Mark a phase in the recorded step, and take an ownership snapshot at its end."""
    with tracker.mark(Mark("phase", name)):
        yield
    tracker.snapshot()


def _explained(recorded: Recording) -> Explanation:
    timeline = with_makers_of_inputs(recorded.timeline)
    retained = composition_of_retained(timeline, recorded.growth)
    return Explanation(
        composition_of_peak(timeline, recorded.own_bytes),
        replace(retained, notes=(*retained.notes, *_notes_on_growth(recorded))),
        composition_of_garbage(timeline),
        recorded.cycles,
        holders=holders_in(timeline, recorded.holders, recorded.growth),
        holders_of_inputs=holders_of_inputs_in(timeline, recorded.holders),
        other_phases=compositions_of_phases(timeline, recorded.own_bytes),
        callers=timeline.callers,
        function_at=timeline.function_at,
    )


def _notes_on_growth(recorded: Recording) -> Iterator[str]:
    """Yield notes if the recorded step did not keep the same bytes as the measured steps."""
    nbytes = recorded.survivors.nbytes
    if not recorded.growth:
        return
    if not nbytes:
        yield "no recorded step kept bytes, so the lines that keep bytes are not known"
        return
    if not recorded.timeline.following:
        yield f"{recorded.ended}: no step came after the recorded step, so a tensor that each step replaces may be in the table"
    if nbytes != recorded.growth:
        yield f"the recorded step kept {format_bytes(nbytes)}; on average each step keeps {format_bytes(recorded.growth)}"


def _moment_of_failure(recorded: Recording) -> int:
    """Return the moment when memory ran out.

    CUDA's allocator records this moment. On the CPU, the failed allocation is not among the events. After the failed
    allocation, the call only frees memory. So the result is the moment with the most live bytes within the innermost call that
    failed.
    """
    tokens = recorded.trace.tokens
    reported = [n for n, token in enumerate(tokens) if isinstance(token, AllocationEvent) and token.address == NOWHERE]
    if reported:
        return reported[-1]
    opened = next(
        (n for n, token in enumerate(tokens) if isinstance(token, SpanBegin) and 0 <= token.mark == recorded.failed_in),
        None,
    )
    if opened is None:
        return recorded.timeline.peak
    depths = accumulate(isinstance(token, SpanBegin) - isinstance(token, SpanEnd) for token in tokens[opened:])
    ended = next((n for n, depth in enumerate(depths, opened) if depth == 0), len(tokens) - 1)
    return max(range(opened, ended + 1), key=recorded.timeline.live.__getitem__)
