"""The table of metrics: what is measured, in which unit, and how far it may move before it counts."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

Unit = Literal["bytes", "count", "seconds", "items/s"]

WHOLE: tuple[Unit, ...] = ("bytes", "count")
"""Units of metrics that repeat exactly and are whole numbers."""


@dataclass(frozen=True, slots=True)
class Tolerance:
    """How much worse than its baseline a metric may be.

    ``relative`` is a ratio of the baseline (0.005 is 0.5 %), ``absolute`` is in the metric's unit; the larger of the two holds.
    """

    relative: float
    absolute: float = 0.0

    def allowed(self, baseline: float) -> float:
        """The largest change of ``baseline`` that is still no change, in the metric's unit."""
        return max(self.relative * abs(baseline), self.absolute)


@dataclass(frozen=True, slots=True)
class Metric:
    """A named quantity. ``tolerance`` is ``None`` for what is recorded and shown but not judged."""

    name: str
    title: str
    unit: Unit
    tolerance: Tolerance | None
    larger_is_better: bool = False
    depends_on: tuple[str, ...] = ()
    """Details of an environment that move this metric though nobody changed the code."""
    decided_by: tuple[str, ...] = ()
    """Details that move it by any amount, to either side, so that no change of it means anything where they differ."""
    where_absent: float | None = None
    """Its value in a baseline that does not have it; ``None`` where nothing can be said of that."""

    @property
    def details(self) -> tuple[str, ...]:
        """All details of an environment that it depends on."""
        return (*self.depends_on, *self.decided_by)


# Bytes that tensors ask for repeat exactly, so the tolerance only has to swallow what nobody would act on.
_EXACT = Tolerance(relative=0.005, absolute=64e3)
# Some hundred scalars a step, which people keep on purpose to log them; any tensor that matters is larger.
_SCALARS = Tolerance(relative=0.0, absolute=1024)
# The whole interval has to lie beyond it, so that 10 % is found where runs of the same code vary by up to 1.5 %.
_SPEED = Tolerance(relative=0.025)
# The allocator reserves in segments of up to 20 MiB, and whether a step finds room in a segment that somebody else's
# bytes keep open is chance: two such segments are noise.
_SEGMENTS = Tolerance(relative=0.02, absolute=2 * 20 * 2**20)

# The same code calls the same operators, until a release of torch takes one apart in another way.
_COUNTED = Tolerance(relative=0.0)

METRICS: dict[str, Metric] = {
    metric.name: metric
    for metric in (
        Metric(
            "peak_allocated",
            "peak allocated",
            "bytes",
            _EXACT,
            depends_on=("cpu_capability",),
            decided_by=("emulated_cudnn",),
        ),
        Metric("peak_forward", "peak forward", "bytes", None),
        Metric("peak_backward", "peak backward", "bytes", None),
        Metric("peak_optimizer", "peak optimizer", "bytes", None),
        Metric(
            "peak_reserved",
            "peak reserved",
            "bytes",
            _SEGMENTS,
            depends_on=("allocator",),
            decided_by=("emulated_cudnn",),
        ),
        Metric("growth", "growth per step", "bytes", _SCALARS, where_absent=0),
        Metric("retained", "retained", "bytes", _EXACT),
        Metric("cyclic_garbage", "cyclic garbage", "bytes", _EXACT),
        Metric("flops", "FLOPs", "count", _COUNTED, depends_on=("torch",)),
        Metric("operators", "operators", "count", _COUNTED, depends_on=("torch",)),
        Metric("syncs", "syncs", "count", _COUNTED, depends_on=("torch",)),
        Metric("launches", "kernel launches", "count", _COUNTED, depends_on=("torch", "cuda", "driver")),
        Metric("step_time", "step time", "seconds", _SPEED),
        Metric("forward_time", "forward time", "seconds", None),
        Metric("backward_time", "backward time", "seconds", None),
        Metric("optimizer_time", "optimizer time", "seconds", None),
        Metric("throughput", "throughput", "items/s", None, larger_is_better=True),
    )
}
