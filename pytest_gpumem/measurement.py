"""Frozen values that a measured step gives."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import asdict, dataclass, field
from types import MappingProxyType
from typing import TYPE_CHECKING, Annotated

from pytest_gpumem.metrics import METRICS, MetricAttributes
from pytest_gpumem.units import format_bytes, format_count, format_large_count, format_ratio, format_seconds
from pytest_gpumem.values.composition import NOT_EXPLAINED, Explanation, MissingComposition
from pytest_gpumem.values.operator_counts import KeptTallies
from pytest_gpumem.values.plain import Form, FrozenValue
from pytest_gpumem.values.rates import Rate, return_on
from pytest_gpumem.values.step_peaks import StepPeaks
from pytest_gpumem.values.times import Times

if TYPE_CHECKING:
    from pytest_gpumem.values.composition import Composition


SAMPLES, TOKENS, ITEMS = "samples", "tokens", "items"
"""The items that a step works on: counted in its batch, or given as a number."""
_EXPLAINED = ("measure", "train_step", "infer_step", "load", "loop")


class MissingMetric(AttributeError):
    """A measurement was asked for a metric that its step or device does not have."""


class MeasuringError(RuntimeError):
    """A step could not be measured, so that no figure of it may be believed."""


HELD_NOTHING = (
    "it runs elsewhere, or not at all; put the model and its batch on gpumem.device, or set the device that they are on "
    '(device = "cpu", say)'
)
"""The rest of a reason why nothing was measured on a device, and what to do."""


MOST_OF_A_NAME = 200
"""Characters of the name of a measurement."""


def check_name(name: object) -> None:
    """Raise ``TypeError`` or ``ValueError`` for what cannot be the name of a measurement."""
    if not isinstance(name, str):
        raise TypeError(f"name={name!r}: the name of a measurement is a text; write name={str(name)!r}")
    if not name or name.isspace():
        raise ValueError(f"name={name!r} is empty; leave it out, and the measurement is called after its step")
    if len(name) > MOST_OF_A_NAME:
        raise ValueError(
            f"name={name[:20]!r}... has {len(name)} characters; the name of a measurement has at most {MOST_OF_A_NAME}"
        )
    try:
        name.encode()
    except UnicodeEncodeError as error:
        raise ValueError(
            f"name={name!r}: its character {error.start + 1} is a lone surrogate, which no file can hold; write another name"
        ) from None


@dataclass(frozen=True, slots=True)
class Workload:
    """The step that was run. Two measurements with different workloads are not comparable."""

    step: str
    """``call``, ``region``, ``measure``, ``train_step``, ``infer_step``, ``generate``, ``load`` or ``loop``."""
    config: str | None = None
    """The step config's text, ``fp32`` for a plain step; ``None`` where the test runs its own code.

    With the routing of the settings, if the host read what follows from that assumption: ``"fp32,routing=balanced"``.
    """
    parameters: int | None = None
    """The number of parameters of the model."""
    batch: str | None = None
    """Dtypes and shapes of the batch's tensors: ``int64[4, 256]``."""

    def differences(self, earlier: Workload) -> list[str]:
        """Return a clause for each field in which ``earlier`` was something else."""
        mine, theirs = asdict(self), asdict(earlier)
        return [
            f"{name} {now}, {'were' if name == 'parameters' else 'was'} {was}"
            for name in mine
            if mine[name] != theirs[name]
            for now, was in (_told_apart(mine[name], theirs[name]),)
        ]


def _told_apart(now: str | int | None, was: str | int | None) -> tuple[str, str]:
    """Return two different values of a field as a person reads them; numbers with as many digits as tell them apart."""
    for show in (format_large_count, format_count):
        texts = [show(value) if isinstance(value, int) else str(value or "none") for value in (now, was)]
        if texts[0] != texts[1]:
            break
    return texts[0], texts[1]


@dataclass(frozen=True, slots=True)
class Environment(FrozenValue):
    """The device and software of a step. ``slug`` names the device's folder in the store: only equal slugs are compared."""

    slug: str
    device: str
    details: Mapping[str, str | int] = field(default_factory=dict)
    packages: Mapping[str, str] = field(default_factory=dict)
    """Versions of the installed packages whose code ran in the step, and of those that torch requires and whose release decides
    memory, by name: ``{"transformers": "4.38.2"}``. Known where the step was explained."""

    def __post_init__(self) -> None:
        for name, value in self.details.items():
            if name in ("slug", "device", "packages"):
                raise ValueError(f"environment: {name!r} is the device's own and cannot be added")
            if isinstance(value, bool) or not isinstance(value, (str, int)):
                raise TypeError(f"environment: {name} is {value!r}, expected a string or a whole number")
        self._freeze(details=dict(sorted(self.details.items())), packages=dict(sorted(self.packages.items())))

    @property
    def releases(self) -> dict[str, str]:
        """The versions of torch and of `packages`, by name."""
        torch = {"torch": str(self.details["torch"])} if "torch" in self.details else {}
        return {**torch, **self.packages}


def changed_releases(then: Mapping[str, str], now: Mapping[str, str]) -> tuple[str, ...]:
    """Return a clause for each package that both sides have in another version: ``"transformers 4.38.2, was 4.37.2"``.

    A package that only one of them has is not among them: that code uses another one is a change of the code.
    """
    both = sorted(then.keys() & now.keys())
    return tuple(f"{name} {now[name]}, was {then[name]}" for name in both if now[name] != then[name])


def largest(by_device: Mapping[str, Mapping[str, int]]) -> str | None:
    """Return the device with the largest peak, the first of equal ones; ``None`` of none."""
    return max(by_device, key=lambda device: by_device[device]["peak_allocated"], default=None)


@dataclass(frozen=True, slots=True, repr=False)
class Measurement(FrozenValue, MetricAttributes):
    """The figures of one run of one step.

    ``metrics`` maps names of ``pytest_gpumem.metrics.METRICS`` to bytes and counts (int), seconds or items a second (float).
    Each is also an attribute (`MetricAttributes`); one that this step or device does not have raises `MissingMetric`.
    """

    name: str
    workload: Workload
    environment: Environment
    metrics: Mapping[str, float]
    settled: bool = True
    """True if two steps in a row gave the same peak, and so did all that were looked at after them."""
    notes: tuple[str, ...] = ()
    recomputed: int | None = None
    """Module calls that were repeated in backward, of `train_step`; ``None`` of any other step, where nobody counts them."""
    explanation: Annotated[Explanation, Form(Explanation, Explanation.kept, lambda read: read)] | None = None
    """The composition of the peak, and of what was retained, where that was recorded; the largest rows are written."""
    times: Times | None = None
    """The rounds that `step_time` is the median of, where time was taken."""
    work: Annotated[Mapping[str, float], Form(tuple[tuple[str, float], ...], lambda work: work.items(), dict)] = field(
        default_factory=dict
    )
    """The number of ``samples``, ``tokens`` or ``items`` that a step works on. `throughput` is of the first."""
    step_peaks: StepPeaks = field(default_factory=StepPeaks)
    """The peaks of all steps that were looked at; of several GPUs, in each step the largest."""
    by_operator: Mapping[str, KeptTallies] = field(default_factory=dict)
    """The operators, at lines where those are known, that make up ``operators``, ``flops``, ``syncs`` and ``launches``."""
    workspaces: int = 0
    """Bytes of `peak_allocated` that the backend's libraries take for themselves (cuBLAS, on CUDA), whatever the code's size
    is: how much lower it would be without them. Those of one product count where the peak is in it."""
    unused_before: int = 0
    """Bytes that the allocator had reserved without use when the step began: by so much `peak_reserved` may vary by chance."""
    by_device: Mapping[str, Mapping[str, int]] = field(default_factory=dict)
    """The metrics in bytes of each GPU of a process that sees several, if the step held any there, by ``"cuda:1"``.

    Of each metric, ``metrics`` has the largest value among them.
    """
    step_peaks_by_device: Mapping[str, StepPeaks] = field(default_factory=dict)
    """The peaks of the steps on each of ``by_device``."""
    lowest_counts: Mapping[str, int] = field(default_factory=dict)
    """The smallest value of each count that was not the same in each step that was counted; ``metrics`` has the largest."""

    def __post_init__(self) -> None:
        self._freeze(
            metrics=_in_order(self.metrics),
            work=self.work,
            by_operator=self.by_operator,
            by_device={device: MappingProxyType(_in_order(here)) for device, here in sorted(self.by_device.items())},
            lowest_counts=dict(sorted(self.lowest_counts.items())),
            step_peaks_by_device=dict(sorted(self.step_peaks_by_device.items())),
        )

    def _value_of(self, metric: str) -> float:
        try:
            return self.metrics[metric]
        except KeyError:
            raise MissingMetric(
                f"measurement {self.name!r} ({self.workload.step} on {self.environment.device}) has no {metric}; "
                f"it has {', '.join(self.metrics)}"
            ) from None

    @property
    def composition(self) -> Composition:
        """The composition of the peak: category x module x source line x dtype and shape.

        Raises `MissingComposition` where it was not recorded.
        """
        if self.explanation is None:
            failed = next((note for note in self.notes if note.startswith(NOT_EXPLAINED)), None)
            raise MissingComposition(
                f"the composition of {self.name!r} was not recorded: {failed}"
                if failed is not None
                else f"the composition of {self.name!r} was not recorded; --gpumem-explain=always records it for every test, "
                f"and {self.workload.step}(..., explain=True) for this step, unless --gpumem-explain=never"
                if self.workload.step in _EXPLAINED
                else f"the composition of {self.name!r} was not recorded, as of any {self.workload.step}; "
                "gpumem.measure, train_step, infer_step, load and loop record it with explain=True"
            )
        return self.explanation.peak

    @property
    def largest_device(self) -> str | None:
        """The GPU whose peak is `peak_allocated`, such as ``"cuda:1"``; ``None`` where the process sees only one."""
        return largest(self.by_device)

    def saves(self, other: Measurement) -> Rate:
        """Return the memory saving rate against ``other``: (other - this) / other, of `peak_allocated`. 0.3 is 30 % less.

        Workspaces are in neither peak. Raises ``ValueError`` for measurements of different devices, or where ``other`` has no
        bytes to save.
        """
        self._check_comparable(other)
        before = other.peak_allocated - other.workspaces
        if before <= 0:
            raise ValueError(
                f"{other.name!r} has no bytes to save: its peak without workspaces is {format_bytes(before)}"
            )
        mine, theirs = format_bytes(self.peak_allocated), format_bytes(other.peak_allocated)
        rate = (before - self.peak_allocated + self.workspaces) / before
        return Rate(rate, f"peak {mine} against {theirs}{_on_recomputation(self, other)}")

    def costs(self, other: Measurement) -> Rate:
        """Return the time increase rate against ``other``: (this - other) / other, of `step_time`. Negative when faster.

        Raises ``ValueError`` for measurements of different devices, `MissingMetric` when no time was taken.
        """
        self._check_comparable(other)
        rate = (self.step_time - other.step_time) / other.step_time
        return Rate(rate, f"step time {format_seconds(self.step_time)} against {format_seconds(other.step_time)}")

    def roi(self, other: Measurement) -> Rate:
        """Return `saves` over `costs`; above 1.5 is recommended. Infinite when it costs nothing, 0 when it saves nothing."""
        saving, cost = self.saves(other), self.costs(other)
        return Rate(return_on(saving, cost), f"saves {format_ratio(saving)}, costs {format_ratio(cost)}")

    def _check_comparable(self, other: Measurement) -> None:
        if self.environment.slug != other.environment.slug:
            raise ValueError(
                f"{self.name!r} was measured on {self.environment.device}, {other.name!r} on {other.environment.device}: "
                "figures of different devices have no relation"
            )

    def __repr__(self) -> str:
        # Short, since it stands in every failed assertion about a figure.
        what = f"{self.workload.step} {self.workload.config or ''}".rstrip()
        return f"<Measurement {self.name!r}: {what} on {self.environment.device}>"


def _in_order(metrics: Mapping[str, float]) -> dict[str, float]:
    return {name: metrics[name] for name in METRICS if name in metrics}


def _on_recomputation(mine: Measurement, other: Measurement) -> str:
    """Return further evidence for or against recomputation."""
    if mine.recomputed is None or other.recomputed is None:
        return ""
    if mine.recomputed == 0 and mine.peak_allocated >= other.peak_allocated:
        return "; nothing was computed again in backward"
    if mine.recomputed != other.recomputed:
        return f"; {mine.recomputed} module calls were computed again in backward, {other.recomputed} there"
    return ""
