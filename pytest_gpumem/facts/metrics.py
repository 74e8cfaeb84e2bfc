"""The table of metrics. Each row defines a metric's properties, such as its unit and tolerance, for all other modules.

For example, ``METRICS["retained"]`` has the title ``"retained"``, the unit ``"bytes"`` and the tolerance 0.5 % or 64 kB.
The marker's argument ``max_retained`` limits this metric.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Literal, Protocol, overload

Unit = Literal["bytes", "count", "ratio", "seconds", "items/s"]
Shown = Literal["always", "if nonzero", "if changed", "in details"]
Kind = Literal["memory", "work", "time", "throughput"]

WHOLE: tuple[Unit, ...] = ("bytes", "count")
"""The units in which values are whole numbers."""


@dataclass(frozen=True, slots=True)
class Tolerance:
    """The allowed growth of a metric over its baseline: the larger of a relative and an absolute limit.

    Example:
        >>> Tolerance(relative=0.005, absolute=64e3).allowed(40e6)
        200000.0
    """

    relative: float
    """The relative limit as a ratio of the baseline: 0.005 is 0.5 %."""
    absolute: float = 0.0
    """The absolute limit in the metric's unit, for example bytes, seconds or calls."""

    def allowed(self, baseline: float) -> float:
        """Return the largest tolerated growth over the value ``baseline``, in the metric's unit."""
        return max(self.relative * abs(baseline), self.absolute)


@dataclass(frozen=True, slots=True)
class Metric:
    """A row in the table of metrics. Its ``name`` is the name of its attribute in `MetricAttributes`."""

    name: str = field(init=False)
    title: str
    unit: Unit
    tolerance: Tolerance | None = None
    """The growth that a gate allows; ``None`` if the metric is recorded and shown, but never compared with a baseline."""
    shown: Shown = "always"
    """Chooses the tables in which the metric has a column: every table (``"always"``), tables in which a value is not 0
    (``"if nonzero"``), or tables in which a value has changed (``"if changed"``). With ``"in details"``, only the complete
    list of a measurement's figures shows the metric."""
    short: str = ""
    """A short heading for the metric's column in tables; ``""`` if the name or the title is short enough."""
    weight: int | None = 0
    """If a table is too wide, columns with the lowest weights are left out first. A column with the weight ``None`` is
    never left out."""
    precedence: int = 0
    """If several metrics of a measurement fail, the failure's headline names the metric with the lowest number here."""
    budget: str | None = None
    """The marker's argument that limits the metric, for example ``max_memory``. The value is a size such as ``"6.5 GB"``, or a
    number such as 1.2 for a ratio."""
    larger_is_better: bool = False
    peak: bool = False
    """True if the metric is a peak in bytes. A peak includes cuBLAS workspaces, and changes until steps have settled."""
    repeats: bool = True
    """True if the value is always exactly the same when a step is repeated."""
    optional: bool = False
    """True if some devices cannot report the metric, so a missing value does not fail a test."""
    is_counted_by_operator: bool = False
    """True if the metric counts operators or kernels, so a failure can name the additional operators."""
    depends_on: tuple[str, ...] = ()
    """Names of environment details (`Environment.details`) that affect the metric although the code is the same."""
    decided_by: tuple[str, ...] = ()
    """Names of environment details that change the metric unpredictably, up or down and by any amount. If such a detail
    differs from the baseline's, the metric is not compared."""
    value_if_absent: float | None = None
    """The value to assume if a baseline does not have the metric; ``None`` if no value can be assumed."""
    emulated: Tolerance | None = Tolerance(0.0)
    """The minimum tolerance if an emulated GPU's value is compared with a real GPU's value; ``None`` if these two values
    cannot be compared."""

    def __set_name__(self, owner: type, name: str) -> None:
        object.__setattr__(self, "name", name)

    @property
    def details(self) -> tuple[str, ...]:
        """The names of all environment details that affect the metric."""
        return (*self.depends_on, *self.decided_by)

    @property
    def settles(self) -> bool:
        """True if a step is repeated until the metric's value stays the same."""
        return self.peak and self.repeats

    @property
    def kind(self) -> Kind:
        """The metric's kind, for the text of a failure.

        For example, bytes and ratios between bytes are memory, and operator counts are work.
        """
        if self.is_counted_by_operator:
            return "work"
        kinds: dict[Unit, Kind] = {"seconds": "time", "items/s": "throughput"}
        return kinds.get(self.unit, "memory")

    @property
    def is_timed(self) -> bool:
        """True if the metric is a time, or is computed from a time."""
        return self.kind in ("time", "throughput")


class _HasMetrics(Protocol):
    def _value_of(self, metric: str) -> float: ...


class WholeMetric(Metric):
    """A metric in bytes, or a count. Reading it from a measurement, as in ``measurement.flops``, returns an ``int``."""

    __slots__ = ()

    @overload
    def __get__(self, measured: None, owner: type) -> WholeMetric: ...
    @overload
    def __get__(self, measured: _HasMetrics, owner: type) -> int: ...
    def __get__(self, measured: _HasMetrics | None, owner: type) -> WholeMetric | int:
        return self if measured is None else int(measured._value_of(self.name))  # noqa: SLF001


class RealMetric(Metric):
    """A metric in seconds, in items per second, or a ratio.

    Reading it from a measurement, as in ``measurement.step_time``, returns a ``float``.
    """

    __slots__ = ()

    @overload
    def __get__(self, measured: None, owner: type) -> RealMetric: ...
    @overload
    def __get__(self, measured: _HasMetrics, owner: type) -> float: ...
    def __get__(self, measured: _HasMetrics | None, owner: type) -> RealMetric | float:
        return self if measured is None else float(measured._value_of(self.name))  # noqa: SLF001


# Tensors request exactly the same bytes in each run. So the tolerance only has to cover changes too small to matter.
_EXACT = Tolerance(relative=0.005, absolute=64e3)
# Allow the bytes of about a hundred scalars per step, because people keep scalars on purpose for their logs. Tensors that
# matter are larger.
_SCALARS = Tolerance(relative=0.0, absolute=1024)
# A test fails only if the whole confidence interval of its slowdown exceeds the tolerance. So a slowdown of 10 % is found,
# although the step time of equal code varies by up to 1.5 %.
_SPEED = Tolerance(relative=0.025)
# The allocator reserves segments of up to 20 MiB. By chance, a step may find room in another tensor's segment. So a growth
# by two such segments is tolerated, or less if both runs began with little room (`judging/gate/doubts.py`).
_SEGMENTS = Tolerance(relative=0.02, absolute=2 * 20 * 2**20)

# A peak may change by 0.5 % (`_EXACT`, `_EMULATED`). If one peak grows and another shrinks by 0.5 %, their ratio grows by
# 1.01 %. So a ratio beyond 2 % needs a peak beyond its own tolerance. Only peaks below 6.5 MB are an exception, because the
# 64 kB in `_EXACT` are more than 1 % of them.
_TWO_PEAKS = Tolerance(relative=0.02)

# The same code calls the same operators, unless another release of torch decomposes an operator differently.
_COUNTED = Tolerance(relative=0.0)

# Ten peaks between 4 and 176 GB were published for a B200. An emulated B200 has exactly the same bytes in nine cases. The
# tenth differs by 0.016 % in allocated and 0.53 % in reserved bytes. On a real GPU, allocated bytes change by up to 0.37 %
# from one step to the next, although the requested bytes stay the same (benchmarks/results/emulated-b200).
_EMULATED = Tolerance(relative=0.005)
_EMULATED_SEGMENTS = Tolerance(relative=0.02)


class MetricAttributes:
    """The table of metrics, in the order in which metrics are shown and stored.

    Each metric is an attribute of a measurement.
    """

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
    """The maximum number of bytes in tensors at the same time. Each tensor counts with its requested bytes, before the
    allocator rounds them up.

    The peak includes memory from the test and its fixtures, or from the step's model, optimizer and batch. All other live
    memory is subtracted. If several steps run, the metric is the highest of their peaks. On a GPU the peak includes cuBLAS
    workspaces (`Measurement.workspaces`), but a relative tolerance is computed from the peak without workspaces.
    """

    peak_forward = WholeMetric("peak forward", "bytes", shown="in details", peak=True)
    """`peak_allocated` within the forward pass of a `gpumem.train_step`. With micro-batches, it is the largest peak of
    their forward passes. A pipeline stage does not have this metric."""

    peak_backward = WholeMetric("peak backward", "bytes", shown="in details", peak=True)
    """`peak_allocated` within the backward pass of a `gpumem.train_step`. With micro-batches, it is the largest peak of
    their backward passes."""

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
    """The largest growth of the memory that torch's caching allocator reserves on the GPU, plus the test's own bytes at the
    start (CUDA only). The metric is never less than `peak_allocated`. The CPU does not have this metric, so `max_reserved`
    has no effect there, and a note says so.

    The allocator reserves segments of 2 MiB for blocks up to 1 MiB, segments of 20 MiB for blocks up to 10 MiB, and a
    segment for each larger block. A step reserves fewer segments if it finds room in segments that exist because of other
    tests' tensors. `Measurement.unused_before` is this room when the step begins. If the room is the same as in the
    baseline, the same code reserves the same bytes, and the absolute tolerance is 2 MiB. If the two rooms differ, the larger
    room is rounded up to whole segments of 20 MiB, and the tolerance is 2 MiB more than this, but at most 40 MiB. If the
    baseline does not have ``unused_before``, the tolerance is 40 MiB.
    """

    # A failure names the growth before the peak, because a step that keeps more and more bytes also has a higher peak.
    growth = WholeMetric(
        "growth per step", "bytes", _SCALARS, shown="if nonzero", weight=5, precedence=-1, value_if_absent=0
    )
    """Bytes that every further step keeps, as a leak does. The value is 0 for a step without a leak, and is assumed to be 0
    for a baseline without this metric.

    If one of a step's last five runs left bytes behind, the step runs 18 more times. If only a few of these runs kept
    bytes, too few to be certain, 12 more runs follow. Growth is the average number of bytes kept by each of the last 12 (or
    24) runs. It is 0 unless both the minimum and the maximum of the live bytes are higher in the second half of these runs
    than in the first half. If steps allocate different amounts, only steps with equal amounts are compared. In a
    `gpumem.loop`, growth comes from the last 12 (or 24) steps. A region, a call and a ``load`` do not have this metric.

    Each other process that a step uses, for example a server, has its own growth. If each step leaves a process running,
    only the measurement of all processes grows.
    """

    retained = WholeMetric("retained", "bytes", _EXACT, shown="if nonzero", weight=4, budget="max_retained")
    """Bytes that are still allocated after a step, region, call or ``load`` and a garbage collection. Bytes of the test's
    fixtures and of the loaded object do not count. If steps differ, the metric is the smallest value of any step, or
    `growth` if `growth` is larger."""

    loaded = WholeMetric("loaded", "bytes", _EXACT, shown="if nonzero", weight=4)
    """Bytes held by the object that `gpumem.load` returned, usually the model. Only a ``load`` has this metric. On the CPU,
    memory mapped from a file (``torch.load(mmap=True)``) is a part of `loaded`, but not of any peak."""

    cyclic_garbage = WholeMetric("cyclic garbage", "bytes", _EXACT, shown="if nonzero", short="cycles", weight=3)
    """Bytes in reference cycles, which only Python's cyclic garbage collector frees. The collector is switched off during
    the measurement and runs after it."""

    imbalance = RealMetric(
        "imbalance over ranks",
        "ratio",
        _TWO_PEAKS,
        short="imbalance",
        weight=3,
        precedence=1,
        budget="max_imbalance",
        decided_by=("emulated_cudnn",),
        emulated=_TWO_PEAKS,
    )
    """The largest peak of any rank in a job, divided by the smallest peak of any rank. For example, it is 1.25 if rank 0 has a
    peak of 4 GB and rank 1 has 5 GB. Only the measurement of a `gpumem.launch`, or of all processes in a call, region or step,
    has this metric, and only if at least two ranks used the device.

    Processes with the same rank in their environments belong together. A rank's peak is the largest
    `peak_allocated` of its processes on any GPU, because their sum would depend on whether they run at the same time. If
    torchrun restarted the job, only the ranks of the last attempt count. A note names the ranks with the largest and the
    smallest peak, unless the metric is 1. The metric also grows if the smallest peak shrinks.
    """

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

    Causal attention counts like full attention. Attention counts as two matrix products in the forward pass and five in the
    backward pass. The same rule applies on the CPU, although torch's counter does not know the CPU's attention kernel.
    Elementwise operators, norms, matrix-vector products and fused operators (such as an LSTM on the CPU) do not count.

    The metrics `flops`, `operators`, `syncs` and `launches` are called counts. They come from one more step, which runs
    after the memory was measured and before the step is timed. On CUDA, a separate step counts `launches`. If the peaks or
    the allocated bytes of the last five measured steps differ, five more steps are counted. If a count differs among these
    steps, the metric is the largest count, and a note says so. If the smallest count (`Measurement.lowest_counts`) is not
    above the baseline, the verdict is ``uncertain``. Work in only some steps is not seen if it allocates nothing. An
    example is an ``.item()`` in every tenth step. A call, a region and a ``load`` have no counts.

    Operators in code that ``torch.compile`` compiled cannot be counted. So a step config with ``compile`` has only
    `launches`, and a function that the test compiles itself is counted as if it were not compiled. Some steps raise an
    error only while they are counted, for example with ``flex_attention`` or an 8-bit optimizer. They are measured without
    counts, and a note says so.

    A failure names the additional operators, with their modules and lines. Finding the lines takes a further run of the
    step. The step runs again only if a test fails because of its counts, if the counts become a baseline, or with
    ``--gpumem-explain=always``. With ``--gpumem-explain=never`` or ``explain=False`` it never runs again.
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
    """Calls to ATen operators and custom operators in a step, counted below autograd. A composite operator is not counted
    itself, but the operators inside are.

    Operators that only make a view or allocate (``view``, ``t``, ``expand``, ``detach``, ``empty``) do not count, because
    their number differs between releases of torch. A call with a tensor subclass (such as int8 weights) counts as one
    operator, even if it runs several. In a failure, an operator in the backward pass has the line of the forward call that
    created its autograd node, and a recomputed operator has the line of its first call.
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
    """The number of times that the host waits for the device in a step.

    The host waits for values (``.item()``, ``.tolist()``, ``nonzero``, ``x[mask]``, ``torch.equal``, ``if tensor:``,
    printing). It also waits for copies between host and device without ``non_blocking=True``, such as
    ``torch.tensor(2.0, device="cuda")``. Two kinds of waits are not seen: waits within an operator, and waits that read no
    value (``torch.cuda.synchronize()``).

    On the CPU, the metric estimates how many times the host would wait if the step ran on a GPU. Every tensor counts as a
    GPU tensor, except for an optimizer's counters (``step``), tensors that the step creates without ``device=``, tensors
    copied with ``.cpu()`` or ``.to("cpu")``, and results computed only from these tensors. If a model keeps tensors on the
    host on purpose, or creates them with ``torch.from_numpy``, these wrongly count as GPU tensors.
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
        emulated=None,  # A cuBLAS product is always one launch on an emulated GPU, but sometimes two launches on a real GPU.
    )
    """The number of CUDA kernels that a step launches, without copies and fills (CUDA only). CUPTI, CUDA's profiling
    library, reports them. If CUPTI reports nothing, the measurement does not have this metric. A failure names the
    additional kernels, but not their lines."""

    step_time = RealMetric("step time", "seconds", _SPEED, weight=6, precedence=5, repeats=False)
    """The median time of a step in seconds. `Measurement.times` has the timed rounds and their percentiles. A call, a
    region and a ``load`` are not timed.

    A test fails only if its slowdown is larger than the tolerance and certain: the step is timed twice, and both samples
    are compared with the baseline by their 95 % confidence intervals.
    """

    forward_time = RealMetric("forward time", "seconds", shown="in details", repeats=False)
    """The median time of the forward pass in a `gpumem.train_step`, in seconds, from up to three separate rounds."""

    backward_time = RealMetric("backward time", "seconds", shown="in details", repeats=False)
    """The median time of the backward pass in a `gpumem.train_step`, in seconds, from the same rounds as `forward_time`."""

    optimizer_time = RealMetric("optimizer time", "seconds", shown="in details", repeats=False)
    """The median time of the optimizer's step in a `gpumem.train_step`, in seconds, from the same rounds as `forward_time`.
    It includes clipping and ``zero_grad``."""

    throughput = RealMetric("throughput", "items/s", precedence=5, larger_is_better=True, repeats=False)
    """The number of items per second, computed from `step_time`. By default, the items in a model's step are its samples.
    The argument ``items`` sets another number. `gpumem.measure` and `gpumem.loop` have this metric only with ``items``. The
    metric has no tolerance. The marker's argument ``min_throughput`` sets a lower limit.

    A throughput below this limit has the verdict ``over_budget`` if it is
    [certainly below](../concepts/step-time.md#throughput), otherwise ``uncertain``.
    """


METRICS: dict[str, Metric] = {row.name: row for row in vars(MetricAttributes).values() if isinstance(row, Metric)}
