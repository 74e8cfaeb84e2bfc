"""The table of metrics: a row has everything that the package knows of one, and all else is derived from the rows."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Literal, Protocol, overload

if TYPE_CHECKING:
    from collections.abc import Collection

Unit = Literal["bytes", "count", "seconds", "items/s"]
Shown = Literal["always", "if nonzero", "if changed", "in details"]
Kind = Literal["memory", "work", "time", "throughput"]

WHOLE: tuple[Unit, ...] = ("bytes", "count")
"""Units of metrics that are whole numbers."""


@dataclass(frozen=True, slots=True)
class Tolerance:
    """The growth over the baseline that a metric is allowed. The larger of the two parts holds.

    Example:
        >>> Tolerance(relative=0.005, absolute=64e3).allowed(40e6)
        200000.0
    """

    relative: float
    """A ratio of the baseline: 0.005 is 0.5 %."""
    absolute: float = 0.0
    """A number in the metric's unit: bytes, seconds or calls."""

    def allowed(self, baseline: float) -> float:
        """Return the largest tolerated growth over the value ``baseline``, in the metric's unit."""
        return max(self.relative * abs(baseline), self.absolute)


@dataclass(frozen=True, slots=True)
class Metric:
    """A row of the table. ``name`` is the attribute of `MetricAttributes` that it is assigned to."""

    name: str = field(init=False)
    title: str
    unit: Unit
    tolerance: Tolerance | None = None
    """``None`` for what is recorded and shown but not judged."""
    shown: Shown = "always"
    """Tables of measurements in which it has a column: in each; where a value is not 0; where one has changed; in none, only
    where all of a measurement is shown."""
    short: str = ""
    """The head of its column, where that is neither its name nor its title."""
    weight: int | None = 0
    """Columns of less weight give way first where there is no room for all; ``None`` for one that never does."""
    precedence: int = 0
    """Rank as a cause: of several metrics by which a measurement fails, the one with the least heads the failure."""
    budget: str | None = None
    """The marker's argument that limits it, which takes a size."""
    larger_is_better: bool = False
    peak: bool = False
    """True if it is a peak of bytes: it has the backend's workspaces, and moves as long as steps have not settled."""
    repeats: bool = True
    """True if the same step gives the same value every time, to the byte."""
    optional: bool = False
    """True if a device may be unable to tell it, which is not the code's fault."""
    made_of_operators: bool = False
    """True if it is counted operator by operator, so that a failure names their lines: work, and not memory."""
    depends_on: tuple[str, ...] = ()
    """Details of an environment that move this metric though nobody changed the code."""
    decided_by: tuple[str, ...] = ()
    """Details that move it by any amount, to either side, so that no change of it means anything where they differ."""
    where_absent: float | None = None
    """The value in a baseline that does not have it; ``None`` where it is not known."""
    emulated: Tolerance | None = Tolerance(0.0)
    """The least tolerance of an emulated GPU's value against a real one's; ``None`` where they cannot be compared."""

    def __set_name__(self, owner: type, name: str) -> None:
        object.__setattr__(self, "name", name)

    @property
    def details(self) -> tuple[str, ...]:
        """All details of an environment that it depends on."""
        return (*self.depends_on, *self.decided_by)

    @property
    def settles(self) -> bool:
        """True if a step is repeated until this stays as it is."""
        return self.peak and self.repeats

    @property
    def kind(self) -> Kind:
        """The kind of figure that a failure names; a count that is not made of operators is memory."""
        if self.made_of_operators:
            return "work"
        kinds: dict[Unit, Kind] = {"seconds": "time", "items/s": "throughput"}
        return kinds.get(self.unit, "memory")

    def has_column(self, values: Collection[float], *, changed: bool = False) -> bool:
        """Return whether a table has a column for it.

        Args:
            values: Those of the measurements in the table.
            changed: Whether one of them is another than its baseline's, or all columns are wanted.
        """
        if self.shown == "if changed":
            return changed
        return any(values) if self.shown == "if nonzero" else self.shown == "always" and bool(values)


class _Measured(Protocol):
    def _value_of(self, metric: str) -> float: ...


class WholeMetric(Metric):
    """Bytes, or a count: an int, as an attribute of a measurement."""

    __slots__ = ()

    @overload
    def __get__(self, measured: None, owner: type) -> WholeMetric: ...
    @overload
    def __get__(self, measured: _Measured, owner: type) -> int: ...
    def __get__(self, measured: _Measured | None, owner: type) -> WholeMetric | int:
        return self if measured is None else int(measured._value_of(self.name))  # noqa: SLF001


class RealMetric(Metric):
    """Seconds, or items a second: a float, as an attribute of a measurement."""

    __slots__ = ()

    @overload
    def __get__(self, measured: None, owner: type) -> RealMetric: ...
    @overload
    def __get__(self, measured: _Measured, owner: type) -> float: ...
    def __get__(self, measured: _Measured | None, owner: type) -> RealMetric | float:
        return self if measured is None else float(measured._value_of(self.name))  # noqa: SLF001


# Bytes that tensors ask for repeat exactly, so the tolerance only has to swallow what nobody would act on.
_EXACT = Tolerance(relative=0.005, absolute=64e3)
# Some hundred scalars a step, which people keep on purpose to log them; any tensor that matters is larger.
_SCALARS = Tolerance(relative=0.0, absolute=1024)
# The whole interval has to lie beyond it, so that 10 % is found where runs of the same code vary by up to 1.5 %.
_SPEED = Tolerance(relative=0.025)
# The allocator reserves in segments of up to 20 MiB, and whether a step finds room in a segment that somebody else's
# bytes keep open is chance: two such segments are noise at most, and less where there was less room (`gate/judge.py`).
_SEGMENTS = Tolerance(relative=0.02, absolute=2 * 20 * 2**20)

# The same code calls the same operators, until a release of torch takes one apart in another way.
_COUNTED = Tolerance(relative=0.0)

# Of peaks between 4 and 176 GB that others measured on a B200 nine of ten are equal to the byte on an emulated one; the tenth
# is 0.016 % off in what is allocated and 0.53 % in what is reserved. What is allocated moves by up to 0.37 % from one step to
# the next at the same requested bytes (benchmarks/results/emulated-b200).
_EMULATED = Tolerance(relative=0.005)
_EMULATED_SEGMENTS = Tolerance(relative=0.02)


class MetricAttributes:
    """The rows, each of which is an attribute of a measurement; in the order in which they are shown and stored."""

    __slots__ = ()

    peak_allocated = WholeMetric(
        "peak allocated",
        "bytes",
        _EXACT,
        short="peak",
        weight=None,
        budget="max_memory",
        peak=True,
        depends_on=("cpu_capability", "cpu_bfloat16"),
        decided_by=("emulated_cudnn",),
        emulated=_EMULATED,
    )
    """The most bytes that tensors held at once, as they asked for them, before the allocator rounds up.

    It counts the memory that the test allocates and that its fixtures hold, or the step's model, optimizer and batch. All
    other live memory is subtracted. Of several steps it is the highest peak. On a GPU it has the workspaces of cuBLAS
    (`Measurement.workspaces`), and the relative tolerance is a ratio of the peak without them.
    """

    peak_forward = WholeMetric("peak forward", "bytes", shown="in details", peak=True)
    """`peak_allocated` within the forward pass of a `gpumem.train_step`. With micro-batches it is the largest of
    theirs. A pipeline stage has none."""

    peak_backward = WholeMetric("peak backward", "bytes", shown="in details", peak=True)
    """`peak_allocated` within the backward pass of a `gpumem.train_step`. With micro-batches it is the largest of theirs."""

    peak_optimizer = WholeMetric("peak optimizer", "bytes", shown="in details", peak=True)
    """`peak_allocated` within the optimizer's step of a `gpumem.train_step`."""

    peak_reserved = WholeMetric(
        "peak reserved",
        "bytes",
        _SEGMENTS,
        short="reserved",
        weight=2,
        budget="max_reserved",
        peak=True,
        repeats=False,
        depends_on=("allocator",),
        decided_by=("emulated_cudnn",),
        emulated=_EMULATED_SEGMENTS,
    )
    """The growth of the memory that the CUDA caching allocator holds from the GPU, at its most, plus the test's own bytes at
    the start (CUDA only). It is never less than `peak_allocated`. The CPU has no such metric, so `max_reserved` has no effect
    there, and a note says so.

    The allocator reserves segments of 2 MiB for blocks up to 1 MiB, segments of 20 MiB for blocks up to 10 MiB, and a segment
    for each larger block. A step takes fewer segments if it finds room in a segment that other tests' bytes keep. The room at
    its start is `Measurement.unused_before`. If it equals the baseline's, the same code reserves the same bytes, and the
    absolute tolerance is 2 MiB. Otherwise it is 2 MiB plus the 20 MiB segments that the larger of the two is part of, at most
    40 MiB. If the baseline does not have ``unused_before``, it is 40 MiB.
    """

    # A step that keeps more each time has a higher peak because of that.
    growth = WholeMetric(
        "growth per step", "bytes", _SCALARS, shown="if nonzero", weight=5, precedence=-1, where_absent=0
    )
    """Bytes that every further step keeps: a leak. It is 0 for a step that repeats, and a baseline without it stands for 0.

    If one of a step's last five runs left bytes behind, 18 more runs follow, and 12 more if some of these kept bytes too
    seldom to tell. Growth is the average that each of the last 12 (24) runs keeps, if both the lowest and the highest live
    bytes after them rise from their first half to their second. If steps allocate different amounts, only steps with equal
    amounts are compared. In a `gpumem.loop` it comes from the last 12 steps, or 24. A region, a call and a ``load`` have
    none.
    """

    retained = WholeMetric("retained", "bytes", _EXACT, shown="if nonzero", weight=4, budget="max_retained")
    """Bytes that outlive the step, region, loading or call after garbage collection, and that neither the test's fixtures nor
    the loaded object hold. In steps that differ it is the least that one of them leaves, or `growth` if that is more."""

    loaded = WholeMetric("loaded", "bytes", _EXACT, shown="if nonzero", weight=4)
    """Bytes held by the object that `gpumem.load` returned, usually the model. Only a ``load`` has it. Memory that is
    mapped from a file on the CPU (``torch.load(mmap=True)``) is loaded, and is in no peak."""

    cyclic_garbage = WholeMetric("cyclic garbage", "bytes", _EXACT, shown="if nonzero", short="cycles", weight=3)
    """Bytes that only Python's cyclic collector freed afterwards. The collector is switched off during the measurement."""

    flops = WholeMetric(
        "FLOPs",
        "count",
        _COUNTED,
        shown="if changed",
        weight=1,
        precedence=2,
        made_of_operators=True,
        depends_on=("torch",),
    )
    """Floating-point operations of a step in matrix products, convolutions and attention, as ``torch.utils.flop_counter``
    counts them. A multiply-add is two operations.

    Causal attention counts in full. Attention counts as two products forward and five backward, also on the CPU, whose kernel
    torch's counter does not know. Elementwise operators, norms, matrix-vector products and operators that do everything at
    once (an LSTM on the CPU) do not count.

    `flops`, `operators`, `syncs` and `launches` are the counts. They come from one more step after the memory was measured
    and before any time is taken; on CUDA a further step counts `launches`. If the peaks or the allocated bytes of the last
    two measured steps differ, three more steps are counted. A count that differs among them is the largest, with a note, and
    it is ``uncertain`` if the smallest (`Measurement.lowest_counts`) is not above the baseline. Work that only some steps do
    and that allocates nothing is not seen, such as an ``.item()`` in every tenth step. A call, a region and a ``load`` have
    no counts.

    Counts do not see operators in code that ``torch.compile`` compiled. A step config with ``compile`` has `launches` only,
    and a function that the test compiles itself counts as if it were not compiled. A step that raises only while it is
    counted (``flex_attention`` and 8-bit optimizers do) is measured without counts, and a note says so.

    A failure names the operators that are more, with their modules and lines. A further run of the step finds the lines. It
    is made only if a test fails by its counts, if the counts become a baseline, and with ``--gpumem-explain=always``. With
    ``--gpumem-explain=never`` or ``explain=False`` it is never made.
    """

    operators = WholeMetric(
        "operators",
        "count",
        _COUNTED,
        shown="if changed",
        weight=1,
        precedence=3,
        made_of_operators=True,
        depends_on=("torch",),
    )
    """Calls of operators in a step, ATen's and custom ones, below autograd and with composite operators taken apart.

    Operators that only make a view or allocate (``view``, ``t``, ``expand``, ``detach``, ``empty``) do not count: releases of
    torch differ in their number. An operator of a tensor subclass (int8 weights) counts once. An operator in backward has the
    line of the forward call that made its node, and a recomputed operator has the line where it was computed first.
    """

    syncs = WholeMetric(
        "syncs",
        "count",
        _COUNTED,
        shown="if changed",
        weight=1,
        precedence=1,
        made_of_operators=True,
        depends_on=("torch",),
    )
    """The number of times that a step makes the host wait for the device.

    The host waits for values (``.item()``, ``.tolist()``, ``nonzero``, ``x[mask]``, ``torch.equal``, ``if tensor:``,
    printing) and for copies between host and device without ``non_blocking=True``, such as ``torch.tensor(2.0,
    device="cuda")``. Waits within an operator, and waits without a value (``torch.cuda.synchronize()``), are not seen.

    On the CPU it is the number of waits for a GPU in the CPU's place. Every tensor counts as a GPU tensor, except for an
    optimizer's counters (``step``), tensors that the step makes without ``device=``, tensors copied with ``.cpu()`` or
    ``.to("cpu")``, and results computed from such tensors alone. A tensor that a model keeps on the host on purpose, or makes
    with ``torch.from_numpy``, cannot be recognized there.
    """

    launches = WholeMetric(
        "kernel launches",
        "count",
        _COUNTED,
        shown="if changed",
        weight=1,
        precedence=4,
        optional=True,  # whether they can be counted is a matter of the driver's permissions
        made_of_operators=True,
        depends_on=("torch", "cuda", "driver"),
        emulated=None,  # a product of cuBLAS is one launch there, and on a GPU sometimes two
    )
    """CUDA kernels that a step launches, without copies and fills, as CUPTI reports them (CUDA only). Absent if CUPTI reports
    nothing. A failure names the kernels, and no line."""

    step_time = RealMetric("step time", "seconds", _SPEED, weight=6, precedence=5, repeats=False)
    """Median seconds of a step. `Measurement.times` has the rounds and their percentiles. A call, a region and a ``load`` are
    not timed.

    A slowdown is judged by two samples and their 95 % confidence intervals, so it must be larger than the tolerance and
    certain.
    """

    forward_time = RealMetric("forward time", "seconds", shown="in details", repeats=False)
    """Median seconds of the forward pass of a `gpumem.train_step`, from up to three rounds of their own."""

    backward_time = RealMetric("backward time", "seconds", shown="in details", repeats=False)
    """Median seconds of the backward pass of a `gpumem.train_step`, from the same rounds as `forward_time`."""

    optimizer_time = RealMetric("optimizer time", "seconds", shown="in details", repeats=False)
    """Median seconds of the optimizer's step in a `gpumem.train_step`, with clipping and ``zero_grad``, from the same rounds as
    `forward_time`."""

    throughput = RealMetric("throughput", "items/s", precedence=5, larger_is_better=True, repeats=False)
    """Items per second at `step_time`: samples in a model's step, or the number or word given as ``items``.
    `gpumem.measure` and `gpumem.loop` have it only with ``items``. It has no tolerance; the argument ``min_throughput``
    limits it.

    A throughput below the budget is ``over_budget`` if it is [certainly below](../concepts/step-time.md#throughput), otherwise
    ``uncertain``.
    """


METRICS: dict[str, Metric] = {row.name: row for row in vars(MetricAttributes).values() if isinstance(row, Metric)}
