"""The state of a measured test while it runs: its device, its own bytes, and its measurements so far."""

from __future__ import annotations

from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from functools import partial
from typing import TYPE_CHECKING

from pytest_gpumem.base.errors import MeasuringError
from pytest_gpumem.facts.measurement import HELD_NOTHING, check_name
from pytest_gpumem.measuring.jobs.figures import ALL
from pytest_gpumem.plugin.relations.growth_elsewhere import GrowthElsewhere
from pytest_gpumem.plugin.runtest.gpu_use import at_end
from pytest_gpumem.torch_support.tracebacks import clear_frames

if TYPE_CHECKING:
    from collections.abc import Iterator, Sequence

    from pytest_gpumem.facts.measurement import Measurement
    from pytest_gpumem.facts.values.gpu_use import GpuUse
    from pytest_gpumem.judging.gate.verdict import TestVerdict
    from pytest_gpumem.measuring.jobs.windows import Window
    from pytest_gpumem.measuring.measure.context import MeasuringContext
    from pytest_gpumem.measuring.measure.prepared import MeasuredStep, PreparedStep
    from pytest_gpumem.plugin.runtest.child_processes import OtherProcesses
    from pytest_gpumem.plugin.runtest.explaining import Explainer
    from pytest_gpumem.plugin.runtest.judging import JudgedMeasurement, Judging
    from pytest_gpumem.plugin.runtest.measurements import Measurements
    from pytest_gpumem.plugin.runtest.own_memory import OwnMemory
    from pytest_gpumem.plugin.runtest.time_policy import TimePolicy


@dataclass(frozen=True, slots=True)
class JudgedStep:
    """A step's measurements, each with its verdict."""

    own: JudgedMeasurement | None
    """The own process's measurement; ``None`` if only other processes used memory."""
    processes: Sequence[JudgedMeasurement] = ()
    """A measurement for each other process."""
    of_all: JudgedMeasurement | None = None
    """The measurement for all processes together; ``None`` without other processes."""


@dataclass(eq=False, repr=False)
class TestRun:
    """A measured test from its set-up to the end of its call.

    A run measures steps, and passes their figures to the gate (`Judging`) and to the `Explainer`.

    Example:
        ``gpumem.train_step(model, batch)`` calls `alone`, prepares the step, and calls `measure` (memory and counts), then
        `judge` (verdict, explanation, times) and `keep_step`. After the test's call, `verdict` combines all measurements.
    """

    __test__ = False

    judging: Judging
    explainer: Explainer
    time_policy: TimePolicy
    context: MeasuringContext
    memory: OwnMemory
    measurements: Measurements
    processes: OtherProcesses
    relations: int = 0
    """The number of relations that the test has asserted with success, for example by ``gpumem.assert_no_growth``."""
    lost: str | None = None
    """The reason why the test's figures are not valid, as a clause."""
    is_called: bool = False
    """True during the test's call."""
    gpu_uses: tuple[GpuUse, ...] = ()
    """The memory outside this process's allocator before the test's set-up."""
    has_failed_subtest: bool = False
    """True if a subtest failed, so the test may have skipped some measurements."""
    _errors: list[BaseException] = field(default_factory=list)
    """The errors raised in the test. Until `release`, their tracebacks keep the test's tensors alive."""
    _under_way: list[str] = field(default_factory=list)
    """The running measurement as the text of its call, for example ``"gpumem.measure('forward')"``. Nested regions have several
    texts."""
    _nested: MeasuringError | None = None
    """The error that a nested measurement raised, because it began while another measurement was running."""

    def __post_init__(self) -> None:
        self.item, self.device = self.judging.item, self.context.device
        self.measures_itself = self.judging.measured.has_fixture
        """True if the test has the fixture ``gpumem``, so its call as a whole is not measured."""

    def verdict(self) -> TestVerdict:
        """Return the verdict on the test at the end of its call."""
        judged: list[JudgedMeasurement] = []
        if self.lost is not None:
            verdict = self.judging.measured.not_measured(self.lost)
        else:
            judged = [result.with_changes() for result in self.measurements.judged]
            verdict = self.judging.verdict(judged, self.relations)
        missing = () if self.has_failed_subtest else self.judging.missing(judged)
        verdict = replace(
            verdict,
            missing=missing,
            jobs_beside_torch=dict(self.processes.beside_torch),
            unmeasured_processes=tuple(self.processes.unmeasured),
        )
        return replace(verdict, gpu_uses=at_end(self.device, self.gpu_uses)) if self.gpu_uses else verdict

    def refused(self, why: str) -> TestVerdict:
        """Return the verdict on a test if it cannot be measured. ``why`` is the reason, as a clause."""
        return replace(self.judging.measured.not_measured(why), missing=self.judging.missing([]))

    def begin_call(self) -> None:
        """Read the device's memory before the test's call. All later allocations belong to the test."""
        self.is_called = True
        self.memory.begin_call(finds_holders=not self.measures_itself)

    @contextmanager
    def alone(self, method: str, name: str | None = None) -> Iterator[None]:
        """Guard against nested measurements.

        A measurement runs its code several times and needs memory itself, so the figures of nested measurements would mix.
        Only regions may be nested, because a region runs once. If the measured code catches the error from a nested
        measurement, the outer measurement raises the error again.

        Args:
            method: The called fixture method: ``"train_step"``.
            name: The measurement's name, if the test gave one.

        Raises:
            MeasuringError: Another measurement is running.
            TypeError: The name is not a string.
            ValueError: The name is empty, too long, or cannot be stored in a file.
        """
        if name is not None:
            check_name(name)
        call = f"gpumem.{method}({'' if name is None else repr(name)})"
        outer_call = self._under_way[-1] if self._under_way else None
        if outer_call is not None and not (method == "track" and outer_call.startswith("gpumem.track(")):
            self._nested = MeasuringError(
                f"{call} is called within {outer_call}: their figures would mix, because measuring runs the code several "
                "times; measure one after the other, and move the inner call out of the measured code"
            )
            raise self._nested
        self._under_way.append(call)
        try:
            yield
            if outer_call is None and self._nested is not None:
                raise self._nested
        finally:
            self._under_way.pop()
            self._nested = self._nested if self._under_way else None

    def measure(self, prepared: PreparedStep) -> MeasuredStep:
        """Measure a step. If memory runs out, add the largest rows of the composition to the test's report."""
        try:
            return prepared.measure()
        except Exception as error:
            self.explainer.explain_out_of_memory(error, prepared.subject)
            raise

    def judge(
        self, prepared: PreparedStep, step: MeasuredStep, name: str | None, *, explain: bool | None = None
    ) -> JudgedStep:
        """Judge a measured step by its memory, explain and time the step if necessary, and judge it again with its times.

        If only other processes used memory, the step's times belong to the measurement of all processes.

        Args:
            prepared: The step, which is run again for the explanation and for timing.
            step: The step's memory figures and counts.
            name: The measurement's name; by default the step's name, for example ``train_step``.
            explain: Whether to explain the step; ``None`` if the verdict and the settings decide.

        Returns:
            The measurements with their verdicts.
        """
        consensus, sites, time_budget = self.device.consensus, self.context.sites, self.context.time_budget
        processes: Sequence[JudgedMeasurement] = ()
        if step.processes:
            name = name or self.measurements.free_name(step.workload)
            processes = self._judge_processes_of(prepared, step, name, explain)
        judged = self.judging.judge(self.measurements.of_step(step, name))
        explanation = None
        if sites is not None:
            sites.packages.clear()
            if not step.is_elsewhere:
                step, explanation = self.explainer.explain_step(prepared, step, judged, explain)
        if time_budget is not None and consensus.all(step.may_be_timed):
            step = prepared.time(step)
            judged = self.judging.judge(self.measurements.of_step(step, name))
        while consensus.all(step.may_be_timed_again) and consensus.any(
            self.time_policy.should_time_again(judged, time_budget)
        ):
            step = prepared.time_again(step)
            judged = self.judging.judge(self.measurements.of_step(step, name))
        if sites is not None:
            by_operator = step.figures.counted.by_operator
            if by_operator != judged.measurement.by_operator and not step.is_elsewhere:
                judged = judged.explained(replace(judged.measurement, by_operator=by_operator))
            if explanation is not None:
                judged = self.explainer.explained(judged, explanation, explain)
            judged = self.explainer.with_packages(judged)
            consensus.release()  # the caller frees the step's objects next
        return self._judged_step(step, name, judged, processes)

    def _judged_step(
        self, step: MeasuredStep, name: str | None, judged: JudgedMeasurement, processes: Sequence[JudgedMeasurement]
    ) -> JudgedStep:
        if step.is_elsewhere:
            return JudgedStep(None, processes, judged)
        if not step.processes:
            return JudgedStep(judged)
        of_all = self.measurements.of_step(step.processes[ALL], f"{name}: {ALL}")
        return JudgedStep(judged, processes, self.judging.judge(of_all))

    def _judge_processes_of(
        self, prepared: PreparedStep, step: MeasuredStep, name: str, explain: bool | None
    ) -> Sequence[JudgedMeasurement]:
        """Judge each other process in a step, and explain their peaks and growth if necessary."""
        names = [process for process in step.processes if process != ALL]
        judged = [
            replace(
                self.judging.judge(self.measurements.of_step(step.processes[each], f"{name}: {each}")),
                pids=step.processes[each].pids,
            )
            for each in names
        ]
        growing = {each for each in names if any(step.processes[each].figures.growth.values())}
        run_again = self.processes.if_alone(partial(self.processes.recorded_step, prepared.run_again, growing))
        return self.explainer.explain_processes(judged, names, run_again, explain=explain)

    def growth_elsewhere(self) -> GrowthElsewhere:
        """Return the other processes for `assert_no_growth`. Several ranks do not look for the kept tensors."""
        sites = self.context.sites if self.judging.ranks.rank is None else None
        return GrowthElsewhere(self.context.end_step, None if sites is None else self.processes.recorded_step, sites)

    def keep_step(self, judged: JudgedStep, window: Window) -> Measurement:
        """Add a step's measurements.

        Args:
            judged: The measurements.
            window: The other processes while the step was measured, counted and timed.

        Returns:
            The measurement of the own process, or of all processes together if only others used memory.

        Raises:
            MeasuringError: The memory of another process is not known. The measurements are added before.
        """
        measurement = self.keep_all(judged)
        self.processes.check(window)
        return measurement

    def keep_all(self, judged: JudgedStep) -> Measurement:
        """Add measurements. Return the own process's measurement, or the one for all processes."""
        self.processes.note_beside_torch(judged.processes, self.processes.bounds)
        parts = (judged.own, *judged.processes, judged.of_all)
        kept = [self.keep(part) for part in parts if part is not None]
        return kept[-1 if judged.own is None else 0]

    def keep(self, judged: JudgedMeasurement) -> Measurement:
        """Add a measurement to this test, call the hook ``pytest_gpumem_measurement``, and return the measurement."""
        measurement = judged.measurement
        if measurement.peak_allocated <= 0:
            self.lost = self.held_nothing(measurement.name)
        self.measurements.judged.append(judged)
        self.item.config.hook.pytest_gpumem_measurement(item=self.item, measurement=measurement)
        return measurement

    def held_nothing(self, name: str) -> str:
        """Return the reason why a measurement or a step called ``name`` is not valid: it held no tensor on the device."""
        held_nothing = (
            f"{name} held no tensor on {self.device.torch_device}{' or another GPU' if self.device.others else ''}"
        )
        # If another process may have the tensors, advice on this process would mislead.
        processes = self.processes.unmeasured
        return "; ".join((held_nothing, *processes)) if processes else f"{held_nothing}: {HELD_NOTHING}"

    def failed(self, *errors: BaseException) -> None:
        """Store the errors that ended the test, so `release` can free the tensors in their tracebacks."""
        self._errors += errors

    def release(self) -> None:
        """Release the test's objects, including the frames in its errors' tracebacks, and close the device."""
        for error in self._errors:
            clear_frames(error)
        self._errors.clear()
        self.memory.call_begin = None
        self.device.close()
