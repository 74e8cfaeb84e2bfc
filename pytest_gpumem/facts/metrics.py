"""The table of metrics. Each row defines a metric completely, and other code reads all its properties from the row.

For example, ``METRICS["retained"]`` has the title ``"retained"``, the unit ``"bytes"``, the marker's argument ``max_retained``
and a tolerance of 0.5 % or 64 kB.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Literal, Protocol, overload

if TYPE_CHECKING:
    from collections.abc import Collection

Unit = Literal["bytes", "count", "seconds", "items/s"]
Shown = Literal["always", "if nonzero", "if changed", "in details"]
Kind = Literal["memory", "work", "time", "throughput"]

WHOLE: tuple[Unit, ...] = ("bytes", "count")
"""Units of whole numbers."""


@dataclass(frozen=True, slots=True)
class Tolerance:
    """The allowed growth of a metric over its baseline. The larger of the two parts counts.

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
    """A row of the table. ``name`` is its attribute in `MetricAttributes`."""

    name: str = field(init=False)
    title: str
    unit: Unit
    tolerance: Tolerance | None = None
    """The tolerance; ``None`` if the metric is recorded and shown, but not judged."""
    shown: Shown = "always"
    """The tables in which the metric has a column: every table, tables with a value other than 0, or tables with a changed
    value. With ``"in details"`` only the complete list of a measurement's figures shows the metric."""
    short: str = ""
    """The head of the metric's column, if it differs from the name and the title."""
    weight: int | None = 0
    """If a table is too wide, columns with less weight are left out first. A column with ``None`` is never left out."""
    precedence: int = 0
    """Rank in a failure: if a measurement fails by several metrics, the failure's headline names the lowest number's metric."""
    budget: str | None = None
    """The marker's argument that limits the metric. It takes a size."""
    larger_is_better: bool = False
    peak: bool = False
    """True for a peak of bytes. A peak includes cuBLAS workspaces, and changes until steps have settled."""
    repeats: bool = True
    """True if the same step has the same value every time, to the byte."""
    optional: bool = False
    """True if some devices cannot report the metric. A missing value is then no fault of the code."""
    is_counted_by_operator: bool = False
    """True for work that is counted operator by operator, so a failure names the operators' lines."""
    depends_on: tuple[str, ...] = ()
    """Environment details that affect the metric although the code is the same."""
    decided_by: tuple[str, ...] = ()
    """Environment details that affect the metric by any amount in either direction. If they differ, nothing is compared."""
    value_if_absent: float | None = None
    """The value for a baseline without the metric; ``None`` if no value can be assumed."""
    emulated: Tolerance | None = Tolerance(0.0)
    """The least tolerance between an emulated GPU's value and a real GPU's; ``None`` if they cannot be compared."""

    def __set_name__(self, owner: type, name: str) -> None:
        object.__setattr__(self, "name", name)

    @property
    def details(self) -> tuple[str, ...]:
        """All environment details that affect the metric."""
        return (*self.depends_on, *self.decided_by)

    @property
    def settles(self) -> bool:
        """True if a step is repeated until the metric's value stays the same."""
        return self.peak and self.repeats

    @property
    def kind(self) -> Kind:
        """The kind of figure in a failure's text. Bytes are memory, and counts of operators are work."""
        if self.is_counted_by_operator:
            return "work"
        kinds: dict[Unit, Kind] = {"seconds": "time", "items/s": "throughput"}
        return kinds.get(self.unit, "memory")

    def has_column(self, values: Collection[float], *, changed: bool = False) -> bool:
        """Return whether a table has a column for the metric.

        Args:
            values: The values of the measurements in the table.
            changed: Whether a value differs from its baseline, or the table should have all columns.
        """
        if self.shown == "if changed":
            return changed
        return any(values) if self.shown == "if nonzero" else self.shown == "always" and bool(values)


class _HasMetrics(Protocol):
    def _value_of(self, metric: str) -> float: ...


class WholeMetric(Metric):
    """A metric in bytes, or a count. Its attribute of a measurement is an int."""

    __slots__ = ()

    @overload
    def __get__(self, measured: None, owner: type) -> WholeMetric: ...
    @overload
    def __get__(self, measured: _HasMetrics, owner: type) -> int: ...
    def __get__(self, measured: _HasMetrics | None, owner: type) -> WholeMetric | int:
        return self if measured is None else int(measured._value_of(self.name))  # noqa: SLF001


class RealMetric(Metric):
    """A metric in seconds, or in items per second. Its attribute of a measurement is a float."""

    __slots__ = ()

    @overload
    def __get__(self, measured: None, owner: type) -> RealMetric: ...
    @overload
    def __get__(self, measured: _HasMetrics, owner: type) -> float: ...
    def __get__(self, measured: _HasMetrics | None, owner: type) -> RealMetric | float:
        return self if measured is None else float(measured._value_of(self.name))  # noqa: SLF001


# Tensors request exactly the same bytes in each run. So the tolerance only has to cover changes too small to matter.
_EXACT = Tolerance(relative=0.005, absolute=64e3)
# The bytes of about a hundred scalars per step, which people keep on purpose to log them. Tensors that matter are larger.
_SCALARS = Tolerance(relative=0.0, absolute=1024)
# The whole confidence interval has to exceed the tolerance. So a slowdown of 10 % is found although equal code varies by up
# to 1.5 %.
_SPEED = Tolerance(relative=0.025)
# The allocator reserves segments of up to 20 MiB. By chance, a step may find room in a segment that other bytes keep
# open. So two such segments are tolerated, or fewer if less room was left (`judging/gate/judge.py`).
_SEGMENTS = Tolerance(relative=0.02, absolute=2 * 20 * 2**20)

# The same code calls the same operators, unless another release of torch decomposes an operator differently.
_COUNTED = Tolerance(relative=0.0)

# Nine of ten published peaks from a B200, between 4 and 176 GB, are equal to the byte on an emulated B200. The tenth differs by
# 0.016 % in allocated and 0.53 % in reserved bytes. Allocated bytes move by up to 0.37 % from one step to the next at the same
# requested bytes (benchmarks/results/emulated-b200).
_EMULATED = Tolerance(relative=0.005)
_EMULATED_SEGMENTS = Tolerance(relative=0.02)


class MetricAttributes:
    """The rows of the table, in the order in which metrics are shown and stored. Each row is an attribute of a measurement."""

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
    """The most bytes that tensors held at once. Requested bytes count, before the allocator rounds them up.

    The metric counts memory from the test and its fixtures, or the step's model, optimizer and batch. All
    other live memory is subtracted. With several steps, the highest peak counts. On a GPU the peak includes cuBLAS workspaces
    (`Measurement.workspaces`), and the relative tolerance is a ratio of the peak without workspaces.
    """

    peak_forward = WholeMetric("peak forward", "bytes", shown="in details", peak=True)
    """`peak_allocated` within the forward pass of a `gpumem.train_step`. With micro-batches, the largest peak counts.
    A pipeline stage does not have this metric."""

    peak_backward = WholeMetric("peak backward", "bytes", shown="in details", peak=True)
    """`peak_allocated` within the backward pass of a `gpumem.train_step`. With micro-batches, the largest peak
    counts."""

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
    """The largest growth of the memory that CUDA's caching allocator reserves on the GPU, plus the test's own bytes at the
    start (CUDA only). It is never less than `peak_allocated`. The CPU does not have this metric, so `max_reserved` has no
    effect there, and a note says so.

    The allocator reserves segments of 2 MiB for blocks up to 1 MiB, segments of 20 MiB for blocks up to 10 MiB, and a segment
    for each larger block. A step reserves fewer segments if it finds room in a segment that other tests' bytes keep. The room
    at its start is `Measurement.unused_before`. If this room equals the baseline's, the same code reserves the same bytes, and
    the absolute tolerance is 2 MiB. Otherwise the tolerance is 2 MiB plus the 20 MiB segments that the larger room touches, up
    to 40 MiB. If the baseline does not have ``unused_before``, the tolerance is 40 MiB.
    """

    # Growth precedes the peak in a failure, because a step that keeps more each time also has a higher peak.
    growth = WholeMetric(
        "growth per step", "bytes", _SCALARS, shown="if nonzero", weight=5, precedence=-1, value_if_absent=0
    )
    """Bytes that every further step keeps: a leak. A repeating step has 0, and so does a baseline without this metric.

    If one of a step's last five runs left bytes behind, 18 more runs follow. If some of these kept bytes, but too
    seldom to be certain, 12 more follow. Growth is the average that each of the last 12 (24) runs keeps, if both the
    lowest and the highest live bytes after the runs rise from the first half of the runs to the second. If steps allocate
    different amounts, only steps with equal amounts are compared. In a `gpumem.loop` growth comes from the last 12 steps,
    or 24. A region, a call and a ``load`` do not have this metric.
    """

    retained = WholeMetric("retained", "bytes", _EXACT, shown="if nonzero", weight=4, budget="max_retained")
    """Bytes that outlive the step, region, loading or call after garbage collection, and that neither the test's fixtures nor
    the loaded object hold. If steps differ, the least value in any step counts, or `growth` if `growth` is larger."""

    loaded = WholeMetric("loaded", "bytes", _EXACT, shown="if nonzero", weight=4)
    """Bytes held by the object that `gpumem.load` returned, usually the model. Only a ``load`` has this metric. Memory that is
    mapped from a file on the CPU (``torch.load(mmap=True)``) counts as loaded, but not in any peak."""

    cyclic_garbage = WholeMetric("cyclic garbage", "bytes", _EXACT, shown="if nonzero", short="cycles", weight=3)
    """Bytes that only Python's cyclic collector freed afterwards. The collector is switched off during the measurement."""

    flops = WholeMetric(
        "FLOPs",
        "count",
        _COUNTED,
        shown="if changed",
        weight=1,
        precedence=2,
        is_counted_by_operator=True,
        depends_on=("torch",),
    )
    """Floating-point operations of a step in matrix products, convolutions and attention, as ``torch.utils.flop_counter``
    counts them. A multiply-add is two operations.

    Causal attention counts in full. Attention counts as two products forward and five backward, also on the CPU, although
    torch's counter does not know the CPU's kernel. Elementwise operators, norms, matrix-vector products and operators that do
    everything at once (an LSTM on the CPU) do not count.

    `flops`, `operators`, `syncs` and `launches` are the counts. They come from one more step after the memory was measured
    and before the step is timed. On CUDA a further step counts `launches`. If the peaks or the allocated bytes of the last
    two measured steps differ, three more steps are counted. If a count differs among these steps, the largest is taken, with a
    note. The count is ``uncertain`` if the smallest (`Measurement.lowest_counts`) is not above the baseline. Work in some steps
    only is not seen if it allocates nothing, such as an ``.item()`` in every tenth step. A call, a region and a ``load`` have
    no counts.

    Counts do not see operators in code that ``torch.compile`` compiled. A step config with ``compile`` has `launches` only,
    and a function that the test compiles itself counts as if it were not compiled. A step that raises only while it is
    counted (``flex_attention`` and 8-bit optimizers do) is measured without counts, and a note says so.

    A failure names the additional operators, with their modules and lines. A further run of the step finds the lines. This run
    takes place only if a test fails by its counts, if the counts become a baseline, or with ``--gpumem-explain=always``.
    ``--gpumem-explain=never`` and ``explain=False`` prevent it.
    """

    operators = WholeMetric(
        "operators",
        "count",
        _COUNTED,
        shown="if changed",
        weight=1,
        precedence=3,
        is_counted_by_operator=True,
        depends_on=("torch",),
    )
    """Calls of ATen's and custom operators in a step, below autograd. Composite operators count by their parts.

    Operators that only make a view or allocate (``view``, ``t``, ``expand``, ``detach``, ``empty``) do not count, because
    their number differs between releases of torch. An operator of a tensor subclass (int8 weights) counts once. An operator in
    backward has the line of the forward call that made its node, and a recomputed operator has the line of its first
    computation.
    """

    syncs = WholeMetric(
        "syncs",
        "count",
        _COUNTED,
        shown="if changed",
        weight=1,
        precedence=1,
        is_counted_by_operator=True,
        depends_on=("torch",),
    )
    """The number of times in a step when the host waits for the device.

    The host waits for values (``.item()``, ``.tolist()``, ``nonzero``, ``x[mask]``, ``torch.equal``, ``if tensor:``,
    printing) and for copies between host and device without ``non_blocking=True``, such as ``torch.tensor(2.0,
    device="cuda")``. Waits within an operator, and waits without a value (``torch.cuda.synchronize()``), are not seen.

    On the CPU, the metric is the number of waits that a GPU in its place would cause. Every tensor counts as a GPU tensor,
    except for an optimizer's counters (``step``), tensors that the step makes without ``device=``, tensors copied with
    ``.cpu()`` or ``.to("cpu")``, and results computed only from these. On the CPU, tensors that a model keeps on the host
    on purpose, or makes with ``torch.from_numpy``, cannot be recognized.
    """

    launches = WholeMetric(
        "kernel launches",
        "count",
        _COUNTED,
        shown="if changed",
        weight=1,
        precedence=4,
        optional=True,  # The driver may forbid counting launches.
        is_counted_by_operator=True,
        depends_on=("torch", "cuda", "driver"),
        emulated=None,  # A cuBLAS product is one launch on an emulated GPU, and sometimes two launches on a real GPU.
    )
    """CUDA kernels that a step launches, without copies and fills, as CUPTI reports them (CUDA only). The metric is absent if
    CUPTI reports nothing. A failure names the kernels, but not their lines."""

    step_time = RealMetric("step time", "seconds", _SPEED, weight=6, precedence=5, repeats=False)
    """Median seconds of a step. `Measurement.times` has the rounds and their percentiles. A call, a region and a ``load`` are
    not timed.

    A slowdown is judged by two samples and their 95 % confidence intervals, so it must be larger than the tolerance and
    certain.
    """

    forward_time = RealMetric("forward time", "seconds", shown="in details", repeats=False)
    """Median seconds of the forward pass in a `gpumem.train_step`, from up to three separate rounds."""

    backward_time = RealMetric("backward time", "seconds", shown="in details", repeats=False)
    """Median seconds of the backward pass in a `gpumem.train_step`, from the same rounds as `forward_time`."""

    optimizer_time = RealMetric("optimizer time", "seconds", shown="in details", repeats=False)
    """Median seconds of the optimizer's step in a `gpumem.train_step`, with clipping and ``zero_grad``, from the same rounds as
    `forward_time`."""

    throughput = RealMetric("throughput", "items/s", precedence=5, larger_is_better=True, repeats=False)
    """Items per second at `step_time`: samples in a model's step, or the items in the argument ``items``. `gpumem.measure` and
    `gpumem.loop` have this metric only with ``items``. The metric has no tolerance. The argument ``min_throughput`` sets
    its limit.

    A throughput below the budget is ``over_budget`` if it is [certainly below](../concepts/step-time.md#throughput), otherwise
    ``uncertain``.
    """


METRICS: dict[str, Metric] = {row.name: row for row in vars(MetricAttributes).values() if isinstance(row, Metric)}
