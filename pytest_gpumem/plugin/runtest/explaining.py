"""Decide which measurements in a test are explained, and explain them by running their code once more.

To explain a measurement, the code runs once more while its allocations are recorded. The explanation lists the tensors at the
peak, with the module and line of each.
"""

from __future__ import annotations

from contextlib import suppress
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING

from pytest_gpumem.base.requirements.installed import needed_by_torch, versions
from pytest_gpumem.facts.values.composition import NOT_EXPLAINED
from pytest_gpumem.judging.baselines.update import entries_to_write
from pytest_gpumem.judging.gate.baseline import Baseline, baseline_of
from pytest_gpumem.judging.gate.failing import failing_metrics
from pytest_gpumem.measuring.explain.child_process import process_explanation
from pytest_gpumem.measuring.explain.recording import ExpectedFigures, gpu_that_ran_out, is_out_of_memory
from pytest_gpumem.measuring.jobs.counterparts import counterparts
from pytest_gpumem.measuring.measure.random_numbers import restored_random_numbers
from pytest_gpumem.reporting.reports.explanation import holder_lines, out_of_memory_lines
from pytest_gpumem.torch_support.static_access import reads_any
from pytest_gpumem.torch_support.tracebacks import RAISED_BY_A_STEP, clear_frames

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

    import pytest

    from pytest_gpumem.facts.metrics import Kind
    from pytest_gpumem.facts.values.composition import Explanation
    from pytest_gpumem.facts.values.option_words import UpdateMode
    from pytest_gpumem.measuring.devices.contract import Device
    from pytest_gpumem.measuring.explain.first_use import RetainedBlocks
    from pytest_gpumem.measuring.explain.recording import Subject
    from pytest_gpumem.measuring.jobs.figures import ProcessFigures
    from pytest_gpumem.measuring.measure.context import MeasuringContext
    from pytest_gpumem.measuring.measure.prepared import MeasuredStep, PreparedStep
    from pytest_gpumem.measuring.ranks.consensus import Alone
    from pytest_gpumem.plugin.config.settings import Settings
    from pytest_gpumem.plugin.runtest.judging import JudgedMeasurement, Judging

    RunAgain = Callable[[], Sequence[ProcessFigures]] | str
    """Runs code while its processes record their allocations, or the reason why it cannot run again."""


COMPOSITION = frozenset({"composition", "explanation"})
"""The attributes of a `Measurement` which exist only if the step was explained.

If the code of the test function reads ``measurement.composition``, its steps are explained. If only a function in another
module reads the attribute, the test has to pass ``explain=True``.
"""


@dataclass(eq=False, repr=False)
class ExplainPolicy:
    """The rules that decide which measurements in a test are explained. They implement ``--gpumem-explain``.

    Example:
        Under ``on-failure``, a test that needs 4 MB more than its baseline is explained, because the failure lists the
        tensors at its peak. A test without growth is explained only if its figures become a baseline, or if it reads
        ``measurement.composition``.
    """

    config: pytest.Config
    settings: Settings
    judging: Judging

    def __post_init__(self) -> None:
        settings = self.settings
        # If `gpumem accept` may write baselines from this session's report, the report needs the same data as
        # `--gpumem-update=all`.
        self.update: UpdateMode | None = "all" if settings.may_be_accepted_later else settings.update
        """The update for which explanations are recorded; ``None`` if no baseline may be written."""

    def should_explain(self, judged: JudgedMeasurement) -> bool:
        """Return whether the test reads the composition, fails because of a figure in bytes, or may get a new baseline."""
        return self._is_read or self._is_needed(judged, "memory")

    def should_show_whole_step(self, judged: JudgedMeasurement) -> bool:
        """Return whether the explanation includes the step's bytes over time.

        These bytes are three quarters of a step's data in a report. They are left out of a report that is only needed for a
        later `gpumem accept`, because no baseline stores them.
        """
        only_later = self.update is not None and self.settings.update is None
        return not only_later or self._is_read or self._is_shown(judged, "memory")

    @property
    def _is_read(self) -> bool:
        # Without the fixture, a test function has no access to a measurement, so it cannot read a composition.
        judging = self.judging
        return judging.measured.has_fixture and reads_any(getattr(judging.item, "function", None), COMPOSITION)

    def device_to_explain(self, judged: JudgedMeasurement) -> str | None:
        """Return the GPU whose peak is explained: the GPU on which a metric fails, or otherwise the GPU with the largest
        peak.
        """
        failing = self.judging.failing_by(judged)
        metrics = judged.verdict.metrics
        failed_on = (metric.gpu for metric in metrics if metric.outcome in failing and metric.gpu is not None)
        return next(failed_on, judged.measurement.largest_device)

    def should_find_holders(self, judged: JudgedMeasurement) -> bool:
        """Return whether to search for the holders of retained tensors, because `retained` fails the test."""
        failing = self.judging.failing_by(judged)
        return "retained" in failing_metrics(judged.verdict, failing)

    def should_locate_counts(self, judged: JudgedMeasurement) -> bool:
        """Return whether to find the source lines of the counted operators, because a count fails the test or may become a
        baseline.
        """
        return self._is_needed(judged, "work")

    def _is_shown(self, judged: JudgedMeasurement, kind: Kind) -> bool:
        """Return whether this session prints the explanation, because every step is explained, or because a metric of this
        ``kind`` (``"memory"`` or ``"work"``) fails the test.
        """
        if self.settings.explain != "on-failure":
            return self.settings.explain == "always"
        failing = self.judging.failing_by(judged)
        return bool(failing_metrics(judged.verdict, failing, kind))

    def _is_needed(self, judged: JudgedMeasurement, kind: Kind) -> bool:
        """Return whether this session prints the explanation, or may write it into a baseline."""
        if self._is_shown(judged, kind):
            return True
        if self.settings.explain != "on-failure":
            return False
        baseline = judged.baseline
        if self.update is None or baseline is None:
            return False
        if self.settings.update == "all" and isinstance(baseline, Baseline):
            lacks_explanation = baseline.composition is None if kind == "memory" else not baseline.has_lines
            if lacks_explanation:
                return True
        key = self.judging.measured.key(judged.measurement.name)
        # Compare without times. If only the times are new, no explanation is needed, because the bytes are the same.
        entry = replace(baseline_of(judged.measurement, "", None), runs=None)
        return bool(entries_to_write(self.update, {key: (judged.verdict, entry)}, {key: baseline}))

    def should_explain_error(self, error: BaseException) -> bool:
        """Return whether ``error`` is an out-of-memory error to explain.

        With ``--pdb`` the error is not explained, because an explanation clears the frames that the debugger shows.
        """
        return not self.config.getoption("usepdb", False) and is_out_of_memory(error)

    def report_out_of_memory(self, explanation: Explanation) -> None:
        """Add the largest rows of the composition at an out-of-memory error to the test's report."""
        lines = out_of_memory_lines(explanation, self.settings.units)
        self.judging.item.add_report_section("call", "gpumem out of memory", "\n".join(lines))


@dataclass(eq=False, repr=False)
class Explainer:
    """Explains a test's measurements, if `ExplainPolicy` asks for it. For this, the measured code runs again with a recording.

    Example:
        The peak of ``gpumem.train_step(model, batch)`` regressed. `explain_step` runs the step again, and `explained` adds the
        composition of the peak to the measurement. A load runs only once, so `explain_once` calls its function again.
    """

    policy: ExplainPolicy
    context: MeasuringContext
    judging: Judging

    @property
    def _consensus(self) -> Alone:
        return self.context.device.consensus

    def explain_step(
        self, prepared: PreparedStep, step: MeasuredStep, judged: JudgedMeasurement, explain: bool | None
    ) -> tuple[MeasuredStep, Explanation | str | None]:
        """Find the source lines of the step's counts, and explain its peak, if `ExplainPolicy` needs them. Return the step
        and the explanation.

        At this moment the step is not timed yet, so its times do not affect the decision.
        """
        consensus, policy = self._consensus, self.policy
        if explain is not False and consensus.any(policy.should_locate_counts(judged)):
            step = prepared.locate(step)
        if not consensus.any(policy.should_explain(judged) if explain is None else explain):
            return step, None
        return step, prepared.explain(step, policy.device_to_explain(judged))

    def explain_once(
        self,
        judged: JudgedMeasurement,
        subject: Callable[[Device], Subject],
        *,
        explain: bool | None = None,
        retained: Callable[[Device], RetainedBlocks | None] | None = None,
    ) -> JudgedMeasurement:
        """Run code a second time with a recording, and explain its peak, if `ExplainPolicy` asks for an explanation.

        Args:
            judged: The measurement, with its verdict.
            subject: Returns the code to record, as a `Subject`, for a device in `Device.everywhere`.
            explain: Whether to explain the peak; ``None`` if the verdict and the settings decide.
            retained: Returns the tensors that the first run retained on a device. If they fail the test, their holders are
                found before the second run.

        Returns:
            The measurement, with its explanation if there is one.
        """
        policy, sites = self.policy, self.context.sites
        if sites is None:
            return judged
        sites.packages.clear()
        if not self._consensus.any(policy.should_explain(judged) if explain is None else explain):
            return judged
        measurement, gpu = judged.measurement, policy.device_to_explain(judged)
        device = self.context.device_named(gpu)
        retained_blocks = retained(device) if retained is not None and policy.should_find_holders(judged) else None
        peak = measurement.peak_allocated if gpu is None else measurement.by_device[gpu]["peak_allocated"]
        explanation = self.context.explain(subject(device), ExpectedFigures(peak, turnover=None), device)
        if isinstance(explanation, str):
            judged = self.noted(judged, retained_blocks)
        elif retained_blocks is not None:
            explanation = retained_blocks.extend_explanation(explanation)
        return self.with_packages(self.explained(judged, explanation, explain))

    def explain_processes(
        self,
        judged: Sequence[JudgedMeasurement],
        names: Sequence[str],
        run_again: RunAgain,
        *,
        explain: bool | None = None,
    ) -> list[JudgedMeasurement]:
        """Run code a second time while its processes record their allocations, and explain the processes' peaks, if
        `ExplainPolicy` asks for an explanation.

        Args:
            judged: Each process's measurement.
            names: Each process's name.
            run_again: Runs the code, and returns the figures of its processes with the recorded blocks. A text is the reason
                why the code cannot run again.
            explain: Whether to explain the peaks; ``None`` if the verdicts and the settings decide.

        Returns:
            The measurements, with explanations.
        """
        sites = self.context.sites
        should_explain = any(map(self.policy.should_explain, judged)) if explain is None else explain
        if sites is None or not should_explain:
            return list(judged)
        if isinstance(run_again, str):
            return [_unrecorded(result, run_again) for result in judged]
        sites.packages.clear()
        try:
            with restored_random_numbers(self.context.device):
                processes = {process.name: process for process in run_again()}
        except RAISED_BY_A_STEP as error:
            note = f"{NOT_EXPLAINED}: " + f"{type(error).__name__}: {error}".partition("\n")[0]
            return [result.with_notes([note]) for result in judged]
        peaks = {name: result.measurement.peak_allocated for name, result in zip(names, judged, strict=True)}
        programs = {name: process.program for name, process in processes.items()}
        again = counterparts(names, programs, lambda name, other: peaks[name] == processes[other].peak_allocated)
        return [
            self._explain_process(result, processes.get(again.get(name, "")), explain)
            for name, result in zip(names, judged, strict=True)
        ]

    def _explain_process(
        self, judged: JudgedMeasurement, process: ProcessFigures | None, explain: bool | None
    ) -> JudgedMeasurement:
        assert self.context.sites is not None, "only called if steps are explained"
        measurement = judged.measurement
        gpus = measurement.by_device or (() if process is None else process.recorded)
        gpu = self.policy.device_to_explain(judged) or next(iter(gpus), "")
        if process is None or gpu not in process.recorded:
            reason = "no such process ran again" if process is None else process.unrecorded or "it was not told in time"
            return _unrecorded(judged, reason)
        peak = measurement.by_device.get(gpu, {}).get("peak_allocated", measurement.peak_allocated)
        recorded_peak = process.by_gpu[gpu]["peak_allocated"]
        explanation = process_explanation(
            process.recorded[gpu],
            recorded_peak,
            peak,
            self.context.sites.site_of,
            repeats="growth" in measurement.metrics,
        )
        return self.with_packages(self.explained(judged, explanation, explain))

    def explained(
        self, judged: JudgedMeasurement, explanation: Explanation | str, explain: bool | None
    ) -> JudgedMeasurement:
        """Return the measurement with its explanation.

        If ``explanation`` is a text, it says why recording failed, and becomes a note.
        """
        measurement = judged.measurement
        shows_whole_step = self._consensus.any(bool(explain) or self.policy.should_show_whole_step(judged))
        if isinstance(explanation, str):
            return judged.explained(replace(measurement, notes=(*measurement.notes, explanation)))
        if not shows_whole_step:
            explanation = replace(explanation, over_time=None)
        return judged.explained(replace(measurement, explanation=explanation))

    def with_packages(self, judged: JudgedMeasurement) -> JudgedMeasurement:
        """Add the versions of packages to the measurement's environment, and return the measurement.

        The packages are those whose code ran in the recorded step, and those in the baseline's environment.
        """
        assert self.context.sites is not None, "only called if steps are explained"
        names = {package.name for package in self.context.sites.packages}
        if judged.measurement.explanation is not None:
            names.update(needed_by_torch())
        if isinstance(judged.baseline, Baseline):
            names.update(judged.baseline.environment.packages)
        if not names:
            return judged
        environment = replace(judged.measurement.environment, packages=versions(names))
        return judged.explained(replace(judged.measurement, environment=environment))

    def noted(self, judged: JudgedMeasurement, retained_blocks: RetainedBlocks | None) -> JudgedMeasurement:
        """Return the measurement with notes on the holders of retained tensors, if it has no explanation that shows them."""
        holders = () if retained_blocks is None else retained_blocks.holders(is_once=True)
        return judged.with_notes(holder_lines(holders, self.judging.settings.units))

    def explain_out_of_memory(self, error: BaseException, subject: Callable[[Device], Subject]) -> None:
        """If ``error`` is an out-of-memory error, run the code again with a recording, and report the largest rows.

        Args:
            error: The error.
            subject: Returns the code to record, as a `Subject`, for a device in `Device.everywhere`.
        """
        if self.context.sites is None or not self.policy.should_explain_error(error):
            return
        if self.judging.ranks.rank is not None:
            return  # the other ranks may not have failed, and would not run the step again with this rank
        # Free the objects in the failed frames. Otherwise memory would run out earlier in the second run.
        clear_frames(error)
        with suppress(*RAISED_BY_A_STEP):
            device = self.context.device_named(gpu_that_ran_out(error))
            explanation = self.context.explain_out_of_memory(subject(device), device)
            if explanation is not None:
                self.policy.report_out_of_memory(explanation)


def _unrecorded(judged: JudgedMeasurement, reason: str) -> JudgedMeasurement:
    """Return a process's measurement with a note on the reason why it has no explanation."""
    return judged.with_notes([f"its allocations were not recorded, because {reason}"])
