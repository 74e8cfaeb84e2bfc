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
    """The most by which a metric may be worse than its baseline.

    ``relative`` is a ratio of the baseline (0.005 is 0.5 %), ``absolute`` is in the metric's unit; the larger of the two holds.
    """

    relative: float
    absolute: float = 0.0

    def allowed(self, baseline: float) -> float:
        """Return the largest change of ``baseline`` that is still no change, in the metric's unit."""
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
        depends_on=("cpu_capability",),
        decided_by=("emulated_cudnn",),
        emulated=_EMULATED,
    )
    """The most bytes that tensors held at once, as they asked for them, less everybody else's."""

    peak_forward = WholeMetric("peak forward", "bytes", shown="in details", peak=True)
    """`peak_allocated` within the forward pass."""

    peak_backward = WholeMetric("peak backward", "bytes", shown="in details", peak=True)
    """`peak_allocated` within the backward pass."""

    peak_optimizer = WholeMetric("peak optimizer", "bytes", shown="in details", peak=True)
    """`peak_allocated` within the optimizer's step."""

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
    """The most bytes that the allocator took from the GPU, less those held for others at the start (CUDA only)."""

    # A step that keeps more each time has a higher peak because of that.
    growth = WholeMetric(
        "growth per step", "bytes", _SCALARS, shown="if nonzero", weight=5, precedence=-1, where_absent=0
    )
    """Bytes that every further step keeps: a leak. 0 of a step that repeats."""

    retained = WholeMetric("retained", "bytes", _EXACT, shown="if nonzero", weight=4, budget="max_retained")
    """Bytes that outlived the step, or the call, and that its fixtures do not hold."""

    loaded = WholeMetric("loaded", "bytes", _EXACT, shown="if nonzero", weight=4)
    """Bytes that what a `load` gives holds: the model."""

    cyclic_garbage = WholeMetric("cyclic garbage", "bytes", _EXACT, shown="if nonzero", short="cycles", weight=3)
    """Bytes that only Python's cyclic collector freed afterwards."""

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
    """Floating-point operations of a step: matrix products, convolutions and attention, a multiply-add being two.

    As ``torch.utils.flop_counter`` counts them. Not those of compiled steps.
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
    """Calls of operators that compute or copy in a step: neither views nor allocations. Not those of compiled steps."""

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
    """The number of times that a step makes the host wait for a GPU: values that are read, and copies that block.

    On the CPU, how often it would on a GPU. Not those of compiled steps.
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
    """CUDA kernels that a step launches (CUDA only)."""

    step_time = RealMetric("step time", "seconds", _SPEED, weight=6, precedence=5, repeats=False)
    """Median seconds of a step; `Measurement.times` has the rounds and their percentiles."""

    forward_time = RealMetric("forward time", "seconds", shown="in details", repeats=False)
    """Median seconds of the forward pass, from rounds of their own."""

    backward_time = RealMetric("backward time", "seconds", shown="in details", repeats=False)
    """Median seconds of the backward pass."""

    optimizer_time = RealMetric("optimizer time", "seconds", shown="in details", repeats=False)
    """Median seconds of the optimizer's step, with clipping and ``zero_grad``."""

    throughput = RealMetric("throughput", "items/s", precedence=5, larger_is_better=True, repeats=False)
    """Items per second at `step_time`."""


METRICS: dict[str, Metric] = {row.name: row for row in vars(MetricAttributes).values() if isinstance(row, Metric)}
