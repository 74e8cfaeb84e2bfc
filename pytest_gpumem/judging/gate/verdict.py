"""Verdicts of the gate on metrics, measurements and tests."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from enum import Enum
from typing import TYPE_CHECKING, ClassVar, Literal

from pytest_gpumem.facts.measurement import Measurement, changed_releases
from pytest_gpumem.facts.metrics import METRICS
from pytest_gpumem.facts.values.annotations import ADDED, KEY, Count
from pytest_gpumem.facts.values.figures import CountedMetric, MetricName, WholeByMetric
from pytest_gpumem.facts.values.gpu_use import GpuUse
from pytest_gpumem.facts.values.operator_counts import Tallies
from pytest_gpumem.judging.gate.difference import Difference

if TYPE_CHECKING:
    from collections.abc import Iterable


class Outcome(str, Enum):
    """The verdicts, from the least to the most serious.

    Each metric gets a verdict. A measurement has the most serious verdict among its metrics. A test has the most serious
    verdict among its measurements. A test that fails by itself is not judged.

    With ``--gpumem-strict``, a test also fails if it used a process [whose memory was not
    measured](../guide/servers-and-launched-jobs.md#what-fails-the-test). A test on an emulated GPU also fails if an uncomputed
    value decided a branch.
    """

    RECORDED = "recorded"
    """The figure is shown, but not compared, because there is no budget and the session does not compare with baselines.
    ``--gpumem-strict`` fails a test if none of its figures was compared."""
    OK = "ok"
    """Within the budget, and within the tolerance of the baseline. A test without a measurement is ``ok`` if it asserts a true
    relation (``gpumem.assert_same_gradients``, ``gpumem.assert_no_growth``)."""
    IMPROVED = "improved"
    """Better than the baseline by more than the tolerance."""
    NEW = "new"
    """The test has no baseline on any device.

    A metric is ``new`` if the test has a baseline without this metric. The output names the option that adds the metric. If
    only the baseline has a metric other than a time, the metric has no verdict, and a note says so. The same holds for a
    metric that cannot be compared between an emulated GPU and a real GPU.

    A time is ``new`` if the baseline has no times. Memory and counts were compared, so the measurement keeps their verdict, for
    example ``ok``. A note and the last line of the output count the tests with such a time, and only ``--gpumem-strict`` fails
    them."""
    FOREIGN = "foreign"
    """The test has baselines on other devices only. The output names these devices. If a test has ``max_slowdown``, its time is
    ``foreign`` if the baseline's time comes from another machine."""
    STALE = "stale"
    """The baseline belongs to another workload, for example to another batch size, and no figure in bytes grew by more than its
    tolerance. The output says what differs, and shows both figures."""
    UNMEASURED = "unmeasured"
    """The test measured nothing, for example because the machine has no GPU, or because the test put no tensor on the device.
    The output says why. ``--gpumem-strict`` does not fail a test that pytest skipped."""
    UNCERTAIN = "uncertain"
    """Worse than the baseline, but perhaps not because of the code. There are five such cases:

    - The peak differs from step to step, and the increase may be chance.
    - A count differs from step to step, and its smallest value is within the tolerance.
    - An environment detail on which the metric depends differs from the baseline's. For example, counts depend on the torch
      release. Each [metric](metrics.md) names its details.
    - A time is longer, but its samples do not prove a slowdown.
    - A server held more or fewer bytes [when the test began](../concepts/verdicts.md#a-server-that-grew-before) than in the
      baseline.

    If a figure in bytes grew by more than 40 %, no other environment explains this growth. The only exception is
    ``emulated_cudnn``: if it differs, the figures of an emulated GPU are ``uncertain``."""
    MISSING = "missing"
    """The test ran to its end, but did not take a measurement that has a baseline on this device.

    A test is also ``missing`` if it was not measured although the device with its baseline is available. For example, the test
    lost its marker, its fixture or its pattern in the setting ``mark``, or its marker or the settings now name an unavailable
    device. The device with the baseline is the session's device, or the device that the marker named when the baseline was
    recorded."""
    REGRESSED = "regressed"
    """Worse than the baseline by more than the tolerance. A figure in bytes regresses even if the baseline belongs to another
    workload."""
    OVER_BUDGET = "over_budget"
    """Above a limit from a marker or the settings, or below ``min_throughput``."""

    @property
    def words(self) -> str:
        return self.value.replace("_", " ")

    @property
    def importance(self) -> int:
        """The outcome's position among all outcomes: 0 is the least serious."""
        return list(Outcome).index(self)


ALWAYS_FAILING = frozenset({Outcome.OVER_BUDGET})
"""The verdicts that fail a test in every session."""
FAILING = ALWAYS_FAILING | {Outcome.MISSING, Outcome.REGRESSED}
"""The verdicts that fail a test with ``--gpumem-baseline``."""
PASSING = frozenset({Outcome.RECORDED, Outcome.OK, Outcome.IMPROVED})
"""The verdicts that do not fail a test with ``--gpumem-strict``."""
COMPARED = frozenset({Outcome.OK, Outcome.IMPROVED, Outcome.REGRESSED, Outcome.OVER_BUDGET, Outcome.UNCERTAIN})
CHANGED = COMPARED - {Outcome.OK}
WORSE = (Outcome.UNCERTAIN, Outcome.REGRESSED, Outcome.OVER_BUDGET)
"""The outcomes for a metric that is worse or may be worse, the least serious first."""


def worst(outcomes: Iterable[Outcome]) -> Outcome:
    """Return the most serious outcome, or `Outcome.RECORDED` if there are no outcomes."""
    return max(outcomes, key=lambda outcome: outcome.importance, default=Outcome.RECORDED)


@dataclass(frozen=True, slots=True)
class MetricVerdict:
    """The verdict on one metric. All values are in the metric's unit, for example in bytes."""

    PLAIN_RULE: ClassVar[WholeByMetric] = WholeByMetric(("value", "baseline", "budget"))

    metric: MetricName
    """The name of the metric."""
    outcome: Outcome
    """The [verdict](verdicts.md) as a word: ``regressed``."""
    value: float
    """The measured value."""
    baseline: float | None = None
    """The value in the baseline; ``None`` without a baseline."""
    allowed: float | None = None
    """The tolerated difference from the baseline; ``None`` if the value was not compared with a baseline."""
    budget: float | None = None
    """The limit in the budget; ``None`` if the budget does not limit this metric."""
    reason: str | None = None
    """A clause on the outcome, for example why the value was not compared or is uncertain."""
    interval: tuple[float, float] | None = None
    """The 95 % confidence interval of the ratio between a time and the baseline's time, as its lower and its upper end."""
    of: str | None = None
    """The unit of a throughput: ``samples``, ``tokens``, ``steps`` or ``items``."""
    gpu: str | None = field(default=None, metadata=ADDED)
    """The GPU whose bytes decided the verdict, such as ``cuda:1``, if the step used several GPUs."""
    at_same_time: bool = field(default=False, metadata=ADDED)
    """True if ``value`` is the most bytes that several processes held at the same time. The baseline has the sum of their
    peaks, so the two values cannot be compared."""

    @property
    def gated(self) -> bool:
        """True if the value was compared with a budget or with a baseline."""
        return self.budget is not None or self.outcome in COMPARED

    @property
    def lacks_time(self) -> bool:
        """True if this is a time, and the measurement's baseline has no time yet."""
        return self.metric == "step_time" and self.outcome is Outcome.NEW


UNKNOWN_RELEASE = "?"
"""The torch release in an origin if the baseline does not record a release."""


@dataclass(frozen=True, slots=True)
class Origin:
    """A baseline's origin: the date, device, releases, commit and reason with which the baseline was recorded."""

    recorded: str
    """The date of the recording, in UTC: ``2026-11-21``."""
    device: str
    """The name of the device as reports show it, such as ``NVIDIA H100 80GB HBM3``."""
    torch: str
    """The torch release."""
    commit: str | None = None
    """The abbreviated hash of the checked-out commit; ``None`` outside a git repository."""
    reason: str | None = None
    """The reason for accepting the baseline, in one line; ``None`` without a reason."""
    packages: Mapping[str, str] = field(default_factory=dict, metadata=ADDED)
    """The releases of other packages by name, as in `Environment.packages`."""


@dataclass(frozen=True, slots=True)
class FormerTest:
    """A deleted test whose baseline is unused. A new test may be this test under another name."""

    file: str
    """The deleted test's file, relative to pytest's root directory."""
    test: str
    """The deleted test's id without the file."""
    metrics: tuple[MetricVerdict, ...] = ()
    """The verdicts on the new test's bytes and counts against this baseline, the most serious first. Metrics that are ``ok`` or
    ``recorded`` are left out."""
    accept: str = field(default="", metadata=ADDED)
    """The command for accepting the new test's figures."""
    prune: str = ""
    """The command for removing the baseline, in case the two tests are different."""

    @property
    def fits(self) -> bool:
        """True if the new test's bytes and counts equal this baseline's, within their tolerances."""
        return not self.metrics


@dataclass(frozen=True, slots=True)
class Verdict:
    """The verdict on one measurement."""

    measurement: Measurement
    """The measurement."""
    metrics: tuple[MetricVerdict, ...]
    """The verdict on each metric."""
    origin: Origin | None = None
    """The origin of the baseline; ``None`` without a baseline."""
    reason: str | None = None
    """The reason why the measurement cannot be compared, as a sentence; ``None`` if it was compared, or if the session does not
    compare with baselines."""
    elsewhere: tuple[str, ...] = ()
    """The devices on which the measurement has baselines, if it has none on this device."""
    difference: Difference | None = field(default=None, metadata={KEY: "growth"})
    """The changes in the peak's composition, if the baseline and this measurement have a composition."""
    count_changes: Mapping[CountedMetric, Tallies] = field(default_factory=dict)
    """The changed operators for each larger count, if the baseline and this measurement list its operators. Disappeared
    operators have negative numbers."""
    candidates: tuple[FormerTest, ...] = field(default=(), metadata=ADDED)
    """Deleted tests that may be this test under a former name. They are listed if this measurement has no baseline, and their
    baselines have the same step, config, batch and device."""

    @property
    def outcome(self) -> Outcome:
        """The most serious outcome among the metrics. A time without a baseline is left out."""
        return worst(metric.outcome for metric in self.metrics if not metric.lacks_time)

    @property
    def lacks_time(self) -> bool:
        """True if a time was measured, and the baseline has no times."""
        return any(metric.lacks_time for metric in self.metrics)

    @property
    def gated(self) -> bool:
        return any(metric.gated for metric in self.metrics)

    @property
    def changed_packages(self) -> tuple[str, ...]:
        """A clause for each package with another release, torch included: ``"transformers 4.38.2, was 4.37.2"``."""
        if self.origin is None:
            return ()
        baseline_releases = {
            **self.origin.packages,
            **({} if self.origin.torch == UNKNOWN_RELEASE else {"torch": self.origin.torch}),
        }
        return changed_releases(baseline_releases, self.measurement.environment.releases)

    @property
    def deciding(self) -> MetricVerdict | None:
        """The deciding metric for the measurement's outcome, or ``None`` if every metric is ``ok`` or was not compared.

        If several metrics have this outcome, the result is the metric for a failure's headline. For example, ``growth`` comes
        before ``peak_allocated``.
        """
        changed = (metric for metric in self.metrics if metric.outcome in CHANGED and metric.outcome is self.outcome)
        return min(changed, key=lambda metric: METRICS[metric.metric].precedence, default=None)

    def of(self, name: str) -> MetricVerdict | None:
        """Return the verdict on the metric called ``name``, or ``None`` if it was not measured."""
        return next((metric for metric in self.metrics if metric.metric == name), None)


@dataclass(frozen=True, slots=True)
class Cell:
    """A test's cell in one matrix of step configs (``gpumem_configs``)."""

    matrix: str
    """The common id of all tests in the matrix: ``"tests/test_gpt.py::test_matrix"``."""
    config: str
    """The text of the step config."""
    index: Count
    """The number of this config's row in the matrix. Reports compare every row with the row that has the lowest number. This
    number is 0 if the test has no other parameters."""


@dataclass(frozen=True, slots=True)
class Location:
    """The file and the line at which a test's function is defined."""

    file: str
    """The path of the file from the root directory."""
    line: Count
    """The number of the line. The first line in the file has the number 1."""


SKIPPED = "it was skipped"
"""The reason why a test that skipped itself was not measured."""

NOT_MARKED = "it no longer has the marker or the fixture gpumem, and no pattern in the setting mark matches it"
"""The reason why a test with baselines was not measured, if it lost its marker, its fixture or its pattern in the settings."""

FailedIn = Literal["setup", "call", "subtest", "teardown", "worker"]
"""The parts of a test's run in which the test can fail. ``worker`` means that the process crashed."""

WHY_FAILED: Mapping[FailedIn | None, str] = {
    "setup": "its set-up failed",
    "call": "the test itself failed",
    "subtest": "a subtest failed",
    "teardown": "its tear-down failed",
    "worker": "the process that ran it crashed",
    None: "it failed in its set-up, its tear-down or a subtest",
}
"""A clause for each part of a test's run: why the test failed by itself. ``None`` stands for an unknown part."""


@dataclass(frozen=True, slots=True)
class TestVerdict:
    """The verdict on a test."""

    __test__ = False

    file: str
    """The test file, from the root directory. The test's id is ``file::test``."""
    test: str
    """The test's id without its file: ``TestTrain::test_step[fp32]``."""
    verdicts: tuple[Verdict, ...] = ()
    """The verdict on each measurement."""
    unmeasured: str | None = None
    """The reason why nothing was measured, as a clause; ``None`` if the test was measured."""
    failed_by_itself: bool = False
    """True if the test failed for another reason than the gate."""
    relations: Count = 0
    """The number of true relations that the test asserted with the fixture, for example by ``assert_no_growth``."""
    cell: Cell | None = None
    """The test's cell in a matrix of step configs; ``None`` outside a matrix."""
    location: Location | None = None
    """The location of the test's function; ``None`` if pytest does not know this location."""
    failure: str | None = None
    """The text with which the gate failed the test; ``None`` if the test passed the gate."""
    missing: tuple[str, ...] = ()
    """The names of measurements that the test did not take although they have baselines on this device."""
    missing_on: tuple[str, ...] = field(default=(), metadata=ADDED)
    """The slugs of the devices with the ``missing`` baselines, if the test was not measured because its device is absent."""
    accept: str | None = field(default=None, metadata=ADDED)
    """The command for accepting the figures for which the gate failed the test; ``None`` if no command can accept them."""
    bisect: str | None = field(default=None, metadata=ADDED)
    """The command for finding the package release behind a regression; ``None`` if no package differs from the baseline's."""
    named_device: str | None = field(default=None, metadata=ADDED)
    """The device that the test's marker names; ``None`` if the test runs on the session's device."""
    gpu_uses: tuple[GpuUse, ...] = field(default=(), metadata=ADDED)
    """The memory outside the test's allocator on each GPU that the test used, as NVML reports it. Without NVML, and on an
    emulated GPU, the array is empty. No baseline stores these figures."""
    jobs_beside_torch: Mapping[str, Count | None] = field(default_factory=dict, metadata=ADDED)
    """For each other process, by the name of its measurement: a lower bound for its bytes beside torch on all GPUs. ``None`` if
    NVML never reported more bytes than the peak of torch's reserved bytes, for example because it did not list the process.
    NVML was read several times a second. Without NVML, and on an emulated GPU, the object is empty."""

    unmeasured_processes: tuple[str, ...] = field(default=(), metadata=ADDED)
    """A clause for each other process in the test whose memory was not measured, although it loads torch or CUDA. For example,
    it has an environment of its own, so it does not report."""

    @property
    def nodeid(self) -> str:
        """``tests/test_gpt.py::TestTrain::test_step[fp32]``."""
        return f"{self.file}::{self.test}"

    @property
    def outcome(self) -> Outcome:
        outcomes = [Outcome.MISSING] if self.missing else []
        if self.unmeasured:
            return worst([Outcome.UNMEASURED, *outcomes])
        outcomes += [Outcome.OK] if self.relations and not self.verdicts else []
        return worst([*outcomes, *map(self.outcome_of, self.verdicts)])

    def outcome_of(self, verdict: Verdict) -> Outcome:
        """Return the outcome of one measurement. A time without a baseline counts only if the gate failed the test."""
        counts = verdict.lacks_time and self.failure is not None
        return worst([verdict.outcome, *([Outcome.NEW] if counts else [])])

    @property
    def lacks_time(self) -> bool:
        """True if the test passed the gate, but a time in it has no baseline yet."""
        return not self.unmeasured and self.failure is None and any(verdict.lacks_time for verdict in self.verdicts)

    @property
    def missing_text(self) -> str | None:
        """A sentence on the baselines whose measurements the test no longer takes; ``None`` if there are none."""
        if not self.missing:
            return None
        names = ", ".join(self.missing)
        if self.missing_on:
            devices = ", ".join(self.missing_on)
            return f"it has baselines on {devices} ({names}) and is not measured there any more: {self.unmeasured}"
        if self.unmeasured:
            return f"it has baselines on this device ({names}) and is not measured any more: {self.unmeasured}"
        return f"it has baselines on this device for measurements that it no longer takes: {names}"

    @property
    def gated(self) -> bool:
        return not self.unmeasured and (self.relations > 0 or any(verdict.gated for verdict in self.verdicts))

    @property
    def compared(self) -> bool:
        """True if any figure was compared with a baseline."""
        return any(metric.allowed is not None for verdict in self.verdicts for metric in verdict.metrics)
