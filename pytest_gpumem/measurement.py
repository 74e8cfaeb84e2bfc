"""Frozen values that a measured step returns."""

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
    """Raised if a measurement does not have a metric. The message lists the metrics that it has."""


class MeasuringError(RuntimeError):
    """Raised if no figure of a step can be believed, for example because the step held nothing on the device."""


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
    """The step that was run. Measurements with different workloads are not compared.

    Example:
        ``Workload("train_step", config="fp32", parameters=16640, batch="float32[16, 64]")``
    """

    step: str
    """``call``, ``region``, ``measure``, ``train_step``, ``infer_step``, ``generate``, ``load`` or ``loop``."""
    config: str | None = None
    """The text of the step config. Without a precision in it, the parameters' precision is added: ``"fp32"``, ``"bf16+fp32"``.
    ``None`` if the test runs its own code.

    If the host read values that follow from the setting ``routing``, the text has it: ``"fp32,routing=balanced"``.
    """
    parameters: int | None = None
    """The number of parameters of the model."""
    batch: str | None = None
    """Dtypes and shapes of the batch's tensors: ``int64[4, 256]``."""

    def differences(self, earlier: Workload) -> list[str]:
        """Return a clause for each field that differs from ``earlier``."""
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
    """The device and the software of a step.

    Example:
        ``Environment("cpu-x86_64", "CPU (x86_64)", {"cpu_capability": "AVX512", "torch": "2.13.0+cpu"})``
    """

    slug: str
    """The name of the device's folder in the store. Only measurements with equal slugs are compared."""
    device: str
    """The name of the device for people: ``CPU (x86_64)``."""
    details: Mapping[str, str | int] = field(default_factory=dict)
    """Versions and settings by name.

    ``torch`` and ``machine`` (the host's processor, and the cores that pytest may use); ``cpu_capability`` and
    ``cpu_bfloat16`` (instructions for bfloat16: ``AMX``, ``AVX512_BF16`` or ``none``) on the CPU;
    ``total_memory`` (bytes), ``cuda``, ``driver`` and ``allocator`` on a GPU; the names that the hook
    ``pytest_gpumem_environment`` adds. On an emulated GPU ``emulated_cudnn`` is the release of cuDNN that planned
    convolutions, or ``none``, and ``emulated_rnn`` is ``lower bound`` if recurrent layers ran.
    """
    packages: Mapping[str, str] = field(default_factory=dict)
    """Versions by name, if the step was explained: ``{"transformers": "4.38.2"}``. They are the installed packages whose code
    ran in the step, and the packages that torch requires and whose release decides memory (cuDNN, cuBLAS, NCCL, Triton).
    """

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
    """The figures of one measured step, a frozen value.

    Each [metric](metrics.md) is an attribute, for example ``measurement.peak_allocated``: bytes and counts are int, seconds
    and items per second float. A metric that this step or device does not have raises `MissingMetric`.
    """

    name: str
    """The name, a part of the baseline's key: ``train_step``."""
    workload: Workload
    """The step that was run."""
    environment: Environment
    """The device and the software."""
    metrics: Mapping[str, float]
    """The metrics that this measurement has, by name."""
    settled: bool = True
    """True if two steps in a row had the same peaks, and all steps after them as well."""
    notes: tuple[str, ...] = ()
    """Clauses, for example about peaks that moved from step to step."""
    recomputed: int | None = None
    """The number of module calls that backward repeated, because of the config or of the model itself. Only a ``train_step``
    has it; otherwise ``None``.
    """
    explanation: Annotated[Explanation, Form(Explanation, Explanation.kept, lambda read: read)] | None = None
    """The result of the recorded run; ``None`` if nothing was recorded."""
    times: Times | None = None
    """The timed rounds, whose median is `step_time`; ``None`` if the step was not timed."""
    work: Annotated[Mapping[str, float], Form(tuple[tuple[str, float], ...], lambda work: work.items(), dict)] = field(
        default_factory=dict
    )
    """The items that one step works on, by unit: 8 ``samples``, 8192 ``tokens``. `throughput` counts the first entry."""
    step_peaks: StepPeaks = field(default_factory=StepPeaks)
    """The peaks of all steps that were looked at. With several GPUs it is the largest peak in each step."""
    by_operator: Mapping[str, KeptTallies] = field(default_factory=dict)
    """The parts of `flops`, `operators`, `syncs` and `launches`, by metric. Places are empty unless lines were recorded."""
    workspaces: int = 0
    """Bytes of `peak_allocated` that cuBLAS takes from torch's allocator for itself (CUDA only). Without workspaces the peak
    would be lower by this number. For a region or call that keeps workspaces, it is their size at the end. [cuBLAS
    workspaces](../concepts/measuring.md#cublas-workspaces) explains them.
    """
    unused_before: int = 0
    """Bytes that the allocator had reserved without use when the step began (CUDA only). `peak_reserved` can vary by this
    amount between identical runs.
    """
    by_device: Mapping[str, Mapping[str, int]] = field(default_factory=dict)
    """The metrics in bytes of each GPU on which the step held any, by name (``"cuda:1"``), if the process sees several GPUs.

    `Measurement.metrics` has the largest value of each metric.
    """
    step_peaks_by_device: Mapping[str, StepPeaks] = field(default_factory=dict)
    """The peaks of the steps on each GPU in ``by_device``."""
    lowest_counts: Mapping[str, int] = field(default_factory=dict)
    """The smallest value of each count that differed between the counted steps; `Measurement.metrics` has the largest."""

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
        """The composition of the peak: bytes by category, module, source line, dtype and shape.

        It is recorded if the test reads it, with ``explain=True``, and with ``--gpumem-explain=always``. Otherwise it raises
        `MissingComposition`.
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
        """The GPU with the largest peak: ``"cuda:1"``; ``None`` if the process sees only one."""
        return largest(self.by_device)

    def saves(self, other: Measurement) -> Rate:
        """Return the memory saving rate: (other - this) / other, for `peak_allocated` without workspaces. 0.3 is 30 % less.

        Args:
            other: A measurement on the same device.

        Returns:
            A float that shows both peaks in a failed assertion.

        Raises:
            ValueError: The measurements come from different devices, or ``other`` has no bytes to save.
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
        """Return the time increase rate: (this - other) / other, for `step_time`. It is negative if this step is faster.

        Args:
            other: A measurement on the same device.

        Returns:
            A float that shows both times in a failed assertion.

        Raises:
            MissingMetric: A step was not timed, for example with ``--no-gpumem-time``.
            ValueError: The measurements come from different devices.
        """
        self._check_comparable(other)
        rate = (self.step_time - other.step_time) / other.step_time
        return Rate(rate, f"step time {format_seconds(self.step_time)} against {format_seconds(other.step_time)}")

    def roi(self, other: Measurement) -> Rate:
        """Return the saving over the cost. It is infinite if this step costs no time, and 0 if it saves nothing.

        A technique with more than 1.5 is recommended.

        Args:
            other: A measurement on the same device.

        Returns:
            A float that shows saving and cost in a failed assertion.

        Raises:
            MissingMetric: A step was not timed.
            ValueError: The measurements come from different devices.
        """
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
