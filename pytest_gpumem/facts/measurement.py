"""Immutable values that describe a measured step: `Workload`, `Environment` and `Measurement`."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import asdict, dataclass, field
from types import MappingProxyType
from typing import TYPE_CHECKING, Annotated

from pytest_gpumem.base.errors import MissingComposition, MissingMetric
from pytest_gpumem.base.units import format_bytes, format_count, format_large_count, format_ratio, format_seconds
from pytest_gpumem.facts.metrics import METRICS, MetricAttributes
from pytest_gpumem.facts.values.annotations import ADDED, Count, Form
from pytest_gpumem.facts.values.composition import NOT_EXPLAINED, Explanation
from pytest_gpumem.facts.values.figures import CountedMetric, Figures, MetricName
from pytest_gpumem.facts.values.operator_counts import KeptTallies
from pytest_gpumem.facts.values.plain import FrozenValue
from pytest_gpumem.facts.values.process import ProcessDetails
from pytest_gpumem.facts.values.rates import Rate, return_on
from pytest_gpumem.facts.values.step_peaks import StepPeaks
from pytest_gpumem.facts.values.times import Times

if TYPE_CHECKING:
    from pytest_gpumem.facts.values.composition import Composition


SAMPLES, TOKENS, ITEMS = "samples", "tokens", "items"
"""Units for a step's items. The plugin counts samples and tokens in the batch. The test counts other items."""
_EXPLAINED = ("measure", "train_step", "infer_step", "load", "loop")


HELD_NOTHING = (
    "it runs on another device, or not at all; put the model and its batch on gpumem.device, or set the device that they are "
    'on (for example device = "cpu")'
)
"""Text for messages about a step that uses no memory on the device, with the cause and the remedy."""


MOST_OF_A_NAME = 200
"""The maximum length of a measurement's name, in characters."""


def check_name(name: object) -> None:
    """Check a measurement's name.

    Raises:
        TypeError: The name is not a string.
        ValueError: The name is empty, has more than 200 characters, or contains a character which UTF-8 cannot encode.
    """
    if not isinstance(name, str):
        raise TypeError(f"name={name!r}: the name of a measurement is a string; write name={str(name)!r}")
    if not name or name.isspace():
        raise ValueError(f"name={name!r} is empty; without this argument, the measurement is named after its step")
    if len(name) > MOST_OF_A_NAME:
        raise ValueError(
            f"name={name[:20]!r}... has {len(name)} characters; the name of a measurement has at most {MOST_OF_A_NAME}"
        )
    try:
        name.encode()
    except UnicodeEncodeError as error:
        raise ValueError(
            f"name={name!r}: its character {error.start + 1} is a lone surrogate, which cannot be stored in a file; choose "
            "another name"
        ) from None


@dataclass(frozen=True, slots=True)
class Workload:
    """The step that ran, with its config, parameter count and batch.

    Measurements with different workloads are not compared. Example:
    ``Workload("train_step", config="fp32", parameters=16640, batch="float32[16, 64]")``
    """

    step: str
    """``call``, ``region``, ``measure``, ``train_step``, ``infer_step``, ``generate``, ``load`` or ``loop``."""
    config: str | None = None
    """The step config as a text. If the config names no precision, the parameters' dtypes are added: ``"fp32"``,
    ``"bf16+fp32"``. The value is ``None`` if the test runs its own code.

    If the host read values that depend on the setting ``routing`` (on an emulated GPU), the text includes this setting:
    ``"fp32,routing=balanced"``.
    """
    parameters: Count | None = None
    """The model's parameter count."""
    batch: str | None = None
    """Dtypes and shapes of the batch's tensors: ``int64[4, 256]``."""

    def differences(self, earlier: Workload) -> list[str]:
        """Return a clause for each field that differs from the ``earlier`` workload.

        Example: ``"parameters 16.64 k, were 16.00 k"``.
        """
        fields, earlier_fields = asdict(self), asdict(earlier)
        return [
            f"{name} {text}, {'were' if name == 'parameters' else 'was'} {earlier_text}"
            for name in fields
            if fields[name] != earlier_fields[name]
            for text, earlier_text in (_distinct_texts(fields[name], earlier_fields[name]),)
        ]


def _distinct_texts(value: str | int | None, earlier: str | int | None) -> tuple[str, str]:
    """Return texts for two different values of a field, with enough digits to show the difference.

    For example, 16,640 and 16,000 become ``16.64 k`` and ``16.00 k``, but 16,640 and 16,641 become ``16,640`` and
    ``16,641``.
    """
    for show in (format_large_count, format_count):
        texts = [show(number) if isinstance(number, int) else str(number or "none") for number in (value, earlier)]
        if texts[0] != texts[1]:
            break
    return texts[0], texts[1]


@dataclass(frozen=True, slots=True)
class Environment(FrozenValue):
    """The device and the software with which a step was measured.

    Example: ``Environment("cpu-x86_64", "CPU (x86_64)", {"cpu_capability": "AVX512", "torch": "2.13.0+cpu"})``
    """

    slug: str
    """The name of the device's folder in the store. Only measurements with equal slugs are compared."""
    device: str
    """The device's name in messages: ``CPU (x86_64)``."""
    details: Mapping[str, str | int] = field(default_factory=dict)
    """Versions and settings by name.

    All devices have ``torch`` and ``machine`` (the host's processor and the number of cores that pytest may use). The CPU
    also has ``cpu_capability`` and ``cpu_bfloat16`` (its instructions for bfloat16: ``AMX``, ``AVX512_BF16`` or ``none``).
    A GPU also has ``total_memory`` (bytes), ``cuda``, ``driver`` and ``allocator``. On an emulated GPU, ``emulated_cudnn``
    is the cuDNN release that chose the convolutions' algorithms, or ``none``. If recurrent layers ran there,
    ``emulated_rnn`` is ``lower bound``, because these layers' memory is only a lower bound. The hook
    ``pytest_gpumem_environment`` adds further names.
    """
    packages: Mapping[str, str] = field(default_factory=dict, metadata=ADDED)
    """Package versions by name, if the step was explained: ``{"transformers": "4.38.2"}``. The mapping contains the
    installed packages whose code ran in the step, and packages used by torch whose release affects memory (cuDNN, cuBLAS,
    NCCL, Triton).
    """

    def __post_init__(self) -> None:
        for name, value in self.details.items():
            if name in ("slug", "device", "packages"):
                raise ValueError(f"environment: {name!r} is reserved for the device and cannot be added to the details")
            if isinstance(value, bool) or not isinstance(value, (str, int)):
                raise TypeError(f"environment: {name} is {value!r}, expected a string or a whole number")
        self._freeze(details=dict(sorted(self.details.items())), packages=dict(sorted(self.packages.items())))

    @property
    def releases(self) -> dict[str, str]:
        """The versions in `packages` and torch's version, by name."""
        torch = {"torch": str(self.details["torch"])} if "torch" in self.details else {}
        return {**torch, **self.packages}


def changed_releases(earlier: Mapping[str, str], current: Mapping[str, str]) -> tuple[str, ...]:
    """Return a clause for each package with another version: ``"transformers 4.38.2, was 4.37.2"``.

    A package in only one mapping is left out, because using an additional package is a change in the code.
    """
    common = sorted(earlier.keys() & current.keys())
    return tuple(f"{name} {current[name]}, was {earlier[name]}" for name in common if current[name] != earlier[name])


def largest(by_device: Mapping[str, Mapping[str, int]]) -> str | None:
    """Return the device with the largest peak (the first if several are equal); ``None`` if ``by_device`` is empty."""
    return max(by_device, key=lambda device: by_device[device]["peak_allocated"], default=None)


@dataclass(frozen=True, slots=True, repr=False)
class Measurement(FrozenValue, MetricAttributes):
    """The figures of one measured step.

    The object cannot be changed. Each [metric](metrics.md) is an attribute, for example ``measurement.peak_allocated``.
    Bytes and counts are ``int``, seconds and items per second are ``float``. If this measurement lacks a metric, for
    example because the device cannot report it, reading the attribute raises `MissingMetric`.
    """

    name: str
    """The measurement's name, for example ``train_step``. The baseline's key contains this name."""
    workload: Workload
    """The step that ran."""
    environment: Environment
    """The device and the software with which the step was measured."""
    metrics: Annotated[Mapping[str, float], Figures()]
    """The measurement's metrics, by name."""
    settled: bool = True
    """True if two steps in a row had the same peaks, and all later steps also had these peaks."""
    notes: tuple[str, ...] = ()
    """Remarks on the measurement, each a clause. For example, a note says that the peaks changed from step to step."""
    recomputed: Count | None = None
    """The number of module calls repeated in the backward pass, because the config or the model recomputes activations.

    ``None`` unless the step is a ``train_step``.
    """
    explanation: Annotated[Explanation, Form(Explanation, Explanation.kept, lambda read: read)] | None = None
    """The explanation of the peak, from an additional recorded run; ``None`` if no run was recorded."""
    times: Times | None = None
    """The timed rounds, in seconds. Their median is `step_time`. The value is ``None`` if the step was not timed."""
    work: Annotated[Mapping[str, float], Form(tuple[tuple[str, float], ...], lambda work: work.items(), dict)] = field(
        default_factory=dict
    )
    """The items in one step, as a number for each unit: ``{"samples": 8, "tokens": 8192}``. `throughput` uses the first
    entry."""
    step_peaks: StepPeaks = field(default_factory=StepPeaks, metadata=ADDED)
    """The peak of each measured step. With several GPUs, the entry for a step is its largest peak on any GPU."""
    by_operator: Mapping[CountedMetric, KeptTallies] = field(default_factory=dict)
    """The counts by operator, for the metrics `flops`, `operators`, `syncs` and `launches`. The counts have no source lines
    unless a further run recorded the lines."""
    workspaces: Count = 0
    """Bytes in `peak_allocated` that cuBLAS allocated from torch's allocator as workspaces (CUDA only). Without workspaces
    the peak would be lower by this number. For a region or a call after which workspaces stay allocated, the value is the
    workspaces' size at the end. See [cuBLAS workspaces](../concepts/measuring.md#cublas-workspaces).
    """
    unused_before: Count = field(default=0, metadata=ADDED)
    """The allocator's reserved but unused bytes when the step began (CUDA only). `peak_reserved` can vary by this amount
    between identical runs.
    """
    gained_before: int = field(default=0, metadata=ADDED)
    """The growth of a server, or of another process that tests share, before this measurement: its bytes in tensors when the
    measurement began, minus the bytes when the session first saw the process. The value is negative if the process has freed
    bytes since then. Other tests caused this change, so the process's `peak_allocated` [may
    differ](../concepts/verdicts.md#a-server-that-grew-before) from its baseline by these bytes.

    The session first sees a process when the first call, region or step with this process begins. If the process starts
    there, it has 0 bytes at first. With several GPUs, the value is from the GPU with the largest change. The test's own
    process has 0.
    """
    by_device: Mapping[str, Annotated[Mapping[str, int], Figures()]] = field(default_factory=dict, metadata=ADDED)
    """If the process sees several GPUs: for each GPU that the step used, such as ``"cuda:1"``, the metrics in bytes.

    For each metric, `Measurement.metrics` has the largest value on these GPUs.
    """
    step_peaks_by_device: Mapping[str, StepPeaks] = field(default_factory=dict, metadata=ADDED)
    """The peaks of the steps on each GPU in ``by_device``."""
    simultaneous: Mapping[str, Count] = field(default_factory=dict, metadata=ADDED)
    """If several processes used a GPU: the most bytes that they held at the same time, by GPU, or an upper bound for them.

    `peak_allocated` is the sum of their peaks. It may be larger, because the peaks may be at different times, but it repeats
    from run to run. So a baseline has the sum, and a budget limits the bytes here. If a process cannot publish each change of
    its memory, its GPUs are missing, and a budget limits the sum. See [the peaks of several
    processes](../guide/servers-and-launched-jobs.md#what-is-measured).
    """
    lowest_counts: Mapping[MetricName, int] = field(default_factory=dict, metadata=ADDED)
    """For each count that differed between the counted steps, its smallest value. `Measurement.metrics` has the largest
    value."""
    process: ProcessDetails | None = field(default=None, metadata=ADDED)
    """The process; ``None`` for the test's own process, and for all processes together."""

    def __post_init__(self) -> None:
        self._freeze(
            metrics=_in_order(self.metrics),
            work=self.work,
            by_operator=self.by_operator,
            by_device={
                device: MappingProxyType(_in_order(values)) for device, values in sorted(self.by_device.items())
            },
            simultaneous=dict(sorted(self.simultaneous.items())),
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

        The composition is recorded if the test function's code reads this attribute, if the test passes ``explain=True``,
        or with ``--gpumem-explain=always``. If no composition was recorded, reading the attribute raises
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
                else f"the composition of {self.name!r}, a {self.workload.step}, was not recorded; "
                "gpumem.measure, train_step, infer_step, load and loop record it with explain=True"
            )
        return self.explanation.peak

    @property
    def largest_device(self) -> str | None:
        """The GPU with the largest peak, for example ``"cuda:1"``; ``None`` if the process sees only one GPU."""
        return largest(self.by_device)

    def saves(self, other: Measurement) -> Rate:
        """Return the memory saving rate (other - this) / other, computed from `peak_allocated` without workspaces.

        For example, this step needs 30 % less memory than the other step if the rate is 0.3.

        Args:
            other: A measurement on the same device.

        Returns:
            The rate, a float. If an assertion on the rate fails, its message also shows both peaks.

        Raises:
            ValueError: The measurements come from different devices, or ``other`` has no bytes to save.
        """
        self._check_comparable(other)
        other_bytes = other.peak_allocated - other.workspaces
        if other_bytes <= 0:
            raise ValueError(
                f"{other.name!r} has no bytes to save: its peak without workspaces is {format_bytes(other_bytes)}"
            )
        peak, other_peak = format_bytes(self.peak_allocated), format_bytes(other.peak_allocated)
        rate = (other_bytes - self.peak_allocated + self.workspaces) / other_bytes
        return Rate(rate, f"peak {peak} against {other_peak}{_on_recomputation(self, other)}")

    def costs(self, other: Measurement) -> Rate:
        """Return the time increase rate (this - other) / other, computed from `step_time`.

        The rate is negative if this step is faster.

        Args:
            other: A measurement on the same device.

        Returns:
            The rate, a float. If an assertion on the rate fails, its message also shows both times.

        Raises:
            MissingMetric: A step was not timed, for example with ``--no-gpumem-time``.
            ValueError: The measurements come from different devices.
        """
        self._check_comparable(other)
        rate = (self.step_time - other.step_time) / other.step_time
        return Rate(rate, f"step time {format_seconds(self.step_time)} against {format_seconds(other.step_time)}")

    def roi(self, other: Measurement) -> Rate:
        """Return the memory saving rate divided by the time increase rate.

        The quotient is infinite if this step costs no time, and 0 if this step saves no memory. For example, a technique that
        saves 30 % of the memory and takes 15 % more time has the quotient 2.0. A technique is recommended if its quotient is
        above 1.5.

        Args:
            other: A measurement on the same device.

        Returns:
            The quotient, a float. If an assertion on the quotient fails, its message also shows the saving and the cost.

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
                "figures from different devices cannot be compared"
            )

    def __repr__(self) -> str:
        # Keep the text short, because every failed assertion about a figure shows it.
        step = f"{self.workload.step} {self.workload.config or ''}".rstrip()
        return f"<Measurement {self.name!r}: {step} on {self.environment.device}>"


def _in_order(metrics: Mapping[str, float]) -> dict[str, float]:
    return {name: metrics[name] for name in METRICS if name in metrics}


def _on_recomputation(measurement: Measurement, other: Measurement) -> str:
    """Return a clause about module calls that backward repeated, because these calls show whether checkpointing worked.

    The text is empty if the repeated calls do not explain a difference between the two measurements.
    """
    if measurement.recomputed is None or other.recomputed is None:
        return ""
    if measurement.recomputed == 0 and measurement.peak_allocated >= other.peak_allocated:
        return "; nothing was computed again in backward"
    if measurement.recomputed != other.recomputed:
        return (
            f"; {measurement.recomputed} module calls were computed again in backward, against {other.recomputed} in the other "
            "step"
        )
    return ""
