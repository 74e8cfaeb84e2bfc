"""A prepared step, with methods that measure, explain and time it, and find the lines of its counted operators."""

from __future__ import annotations

import functools
from dataclasses import dataclass, field, replace
from itertools import pairwise
from typing import TYPE_CHECKING

from pytest_gpumem.facts.measurement import Workload
from pytest_gpumem.measuring.explain.call_sites import OperatorSites
from pytest_gpumem.measuring.explain.recording import ExpectedFigures, Subject, phase
from pytest_gpumem.measuring.jobs.figures import ALL, PROCESS, PROCESSES
from pytest_gpumem.measuring.measure.counting import NO_COUNTS, TALLIED, count_step, with_lines
from pytest_gpumem.measuring.measure.growth import WINDOW, measure_growth
from pytest_gpumem.measuring.measure.other_processes import (
    StepProcesses,
    figures_in,
    growth_in,
    names_in,
    own_figures,
    process_figures,
)
from pytest_gpumem.measuring.measure.random_numbers import restored_random_numbers
from pytest_gpumem.measuring.measure.reading import run_one_step, run_phases
from pytest_gpumem.measuring.measure.settling import do_equal_work, figures_of_steps, have_same_peaks
from pytest_gpumem.measuring.measure.timed_steps import SECONDS_BETWEEN_SAMPLES, first_times, sample_again
from pytest_gpumem.torch_support.garbage_collector import cyclic_collector_off

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator, Mapping, Sequence

    import torch

    from pytest_gpumem.facts.values.composition import Explanation
    from pytest_gpumem.facts.values.process import ProcessDetails
    from pytest_gpumem.measuring.devices.contract import Device
    from pytest_gpumem.measuring.explain.owners import TensorOwners
    from pytest_gpumem.measuring.explain.sites import Site
    from pytest_gpumem.measuring.explain.tracker import Tracker
    from pytest_gpumem.measuring.measure.context import MeasuringContext
    from pytest_gpumem.measuring.measure.reading import ByDevice, Phase
    from pytest_gpumem.measuring.measure.settling import StepFigures

MOST_WARM_UPS = 6
"""A step runs at most this many times until two consecutive runs have the same peaks."""
MOST_UNSTABLE_WARM_UPS = 16
"""The same limit for steps that may compile again, or whose gradients may overflow, before they repeat."""
FURTHER_STEPS = 4
"""The number of further runs after the first two equal runs, or after `MOST_WARM_UPS` runs without an equal pair."""
MOST_SAMPLES = 3
"""The maximum number of time samples: two, and a third if one of them shows a slowdown and the other is uncertain."""


@dataclass(frozen=True, slots=True)
class MeasuredStep:
    """A measured step's figures, workload and notes."""

    figures: StepFigures
    workload: Workload
    work: Mapping[str, float]
    """The numbers of samples, tokens or items in the step, by name. Throughput is computed from the first entry.

    Example: ``{"samples": 8, "tokens": 2048}``.
    """
    notes: tuple[str, ...] = ()
    recomputed: int | None = None
    """The number of module calls repeated by backward; ``None`` if the step is not a training step."""
    is_over: bool = False
    """True if the step cannot run again, because its loop has ended."""
    processes: Mapping[str, MeasuredStep] = field(default_factory=dict)
    """The figures of other processes in this step, by name, and of all processes together (`ALL`). Empty if there are none."""
    gained_before: int = 0
    """`Measurement.gained_before`"""
    imbalance: float | None = None
    """The largest peak of a rank divided by the smallest, for all processes together."""
    process: ProcessDetails | None = None
    """`Measurement.process`"""
    pids: tuple[int, ...] = ()
    """The pids of the process in the runs of the step. A step may start a new process in each run."""
    simultaneous: Mapping[str, int] = field(default_factory=dict)
    """`Measurement.simultaneous`"""

    @property
    def is_own(self) -> bool:
        """True if these are the figures of the test's own process."""
        return self.workload.step not in (PROCESS, PROCESSES)

    @property
    def is_elsewhere(self) -> bool:
        """True if only other processes used memory."""
        return bool(self.processes) and not any(
            figures.memory.own_peak > 0 for figures in self.figures.devices.values()
        )

    def of_all_processes(self) -> MeasuredStep:
        """Return the figures of all processes together, with this step's times and items."""
        step = self.processes[ALL]
        return replace(step, figures=replace(step.figures, times=self.figures.times), work=self.work)

    @property
    def may_be_timed(self) -> bool:
        """True if the step has no times yet and can run again."""
        return self.figures.times is None and not self.is_over

    @property
    def may_be_timed_again(self) -> bool:
        times = self.figures.times
        return times is not None and len(times.samples) < MOST_SAMPLES and not self.is_over

    def metrics(self) -> dict[str, float]:
        """Return all metrics by name: bytes, counts, seconds, and items per second."""
        figures = self.figures
        metrics: dict[str, float] = {**figures.memory_metrics(), **figures.counted.counts.metrics()}
        if self.workload.step == PROCESSES:
            # A process may be there in the first step only, which also creates the own process's state.
            del metrics["retained"]
        if self.imbalance is not None:
            metrics["imbalance"] = self.imbalance
        times = figures.times
        if times is not None:
            metrics["step_time"] = times.median
            metrics |= {f"{name}_time": seconds for name, seconds in times.phases.items()}
            items = next(iter(self.work.values()), None)
            if items is not None and times.median > 0:
                metrics["throughput"] = items / times.median
        return metrics


def with_processes(
    step: MeasuredStep,
    processes: StepProcesses,
    seen: Sequence[ByDevice],
    figures_of: Callable[[str, Sequence[ByDevice]], StepFigures],
) -> MeasuredStep:
    """Return a measured step with the figures of other processes.

    Args:
        step: The figures of the test's own process.
        processes: The other processes.
        seen: Figures for each run whose peak counts, from `StepProcesses.beside`.
        figures_of: Returns a process's figures. The arguments are its name and its figures in each run with this process.
    """
    measured = {}
    for name in names_in(seen):
        figures = figures_of(name, [run for run in (figures_in(run, name) for run in seen) if run])
        remarks = processes.remarks(name, figures)
        measured[name] = MeasuredStep(
            figures,
            Workload(PROCESSES if name == ALL else PROCESS),
            {},
            (*figures.notes(), *remarks.notes),
            gained_before=remarks.gained_before,
            imbalance=remarks.imbalance,
            process=remarks.details,
            pids=remarks.pids,
            simultaneous=remarks.simultaneous,
        )
    return replace(step, processes=measured) if measured else step


@dataclass(frozen=True, slots=True, kw_only=True)
class PreparedStep:
    """A step that is ready to run.

    ``model`` is ``None`` if the step calls a test's function.
    """

    context: MeasuringContext
    workload: Workload
    work: Mapping[str, float]
    """The numbers of samples, tokens or items in a step, as in `MeasuredStep`."""
    phases: Sequence[Phase]
    other_bytes: Sequence[int]
    """Other code's live bytes before the step's model was built, on each device in `Device.everywhere`."""
    held: object
    """Objects such as the model and the batch, from which every tensor that lives from step to step can be reached."""
    model: torch.nn.Module | None = None
    optimizer: torch.optim.Optimizer | None = None
    batch: object = None
    is_compiled: bool = False
    """True if the step is compiled. Then operators are not counted."""
    state: Callable[[], object] | None = None
    """Returns state that may change in a step, for example the gradient scale or the graphs compiled so far. A run that changes
    this state does not count as equal, and the step runs up to `MOST_UNSTABLE_WARM_UPS` times."""
    notes: tuple[str, ...] = ()
    recomputed: Callable[[], int] | None = None
    """Returns the number of module calls repeated by backward. Call this after the first run."""
    creation_sites: Mapping[int, Site] = field(default_factory=dict)
    buckets: Mapping[int, torch.Tensor] = field(default_factory=dict)
    """The buffers in which ``DistributedDataParallel`` collects gradients, by bucket number."""

    def measure(self) -> MeasuredStep:
        """Run the step until its peak repeats, then measure its memory and its counts.

        The step runs until two consecutive runs have the same peaks, at least twice and at most `MOST_WARM_UPS` times. By then,
        the optimizer has created its lazy state, and autotuning is finished. `FURTHER_STEPS` more runs follow, which show work
        that the step does only every second to sixth time. All ranks decide together, so all run equally many steps
        (`Device.consensus`). See `settling` for an example.

        All of this is also true for the figures of other processes, for example of a server that the step asks. If only a
        server keeps bytes, its growth is measured.
        """
        device, state, peak_only = self.context.device, self.state, self.context.peak_only
        processes = StepProcesses(self.context.end_step)

        def run_step(*, older_garbage: bool = True) -> ByDevice:
            return processes.beside(run_one_step(self.phases, device, self.other_bytes, older_garbage=older_garbage))

        step = functools.partial(run_phases, self.phases)
        device.quiesce()
        with cyclic_collector_off():
            seen = [run_step()]
            steady: list[bool] = []
            settled_at = None
            most_warm_ups = MOST_UNSTABLE_WARM_UPS if device.consensus.any(state is not None) else MOST_WARM_UPS
            while settled_at is None and len(seen) < most_warm_ups:
                previous_state = state() if state is not None else None
                seen.append(run_step())
                steady.append(state is None or state() == previous_state)
                if device.consensus.all(have_same_peaks(*seen[-2:]) and steady[-1]):
                    settled_at = len(seen) - 2
            latest = seen[-1]
            further = [latest, *(run_step() for _ in range(0 if peak_only else FURTHER_STEPS))]
            seen += further[1:]
            own_runs = list(map(own_figures, seen))
            if settled_at is None and names_in(seen):
                # Perhaps only the peaks of another process differ.
                pairs = zip(pairwise(own_runs), steady, strict=False)
                equal = (
                    number for number, (pair, is_steady) in enumerate(pairs) if is_steady and have_same_peaks(*pair)
                )
                settled_at = next(equal, None)
            growth: Mapping[str, int] = (
                measure_growth(run_step, device)
                if device.consensus.any(any(figures.keeps_bytes for run in further for figures in run.values()))
                else {}
            )
            # Count before timing. Timing trains for an unpredictable number of steps, and a step's work may depend on the
            # weights.
            with device.peak_ignored():
                alike = device.consensus.all(
                    settled_at is not None and all(do_equal_work(*pair) for pair in pairwise(map(own_figures, further)))
                )
                counted = (
                    NO_COUNTS if peak_only else count_step(step, device, is_compiled=self.is_compiled, repeats=alike)
                )
        own = figures_of_steps(own_runs, settled_at)
        figures = replace(own, counted=counted, growth=growth_in(growth))
        recomputed = None if self.recomputed is None else self.recomputed()
        measured = MeasuredStep(figures, self.workload, self.work, (*self.notes, *figures.notes()), recomputed)
        return with_processes(
            measured, processes, seen, lambda name, runs: process_figures(runs, growth_in(growth, name))
        )

    def run_again(self) -> None:
        """Run the step once more, for a recording in other processes. The run does not count for the test's own process."""
        device = self.context.device
        with cyclic_collector_off(), restored_random_numbers(device), device.peak_ignored():
            run_one_step(self.phases, device, self.other_bytes)

    def time(self, step: MeasuredStep) -> MeasuredStep:
        """Return the measured ``step`` with its times, or ``step`` itself if this session times no steps.

        Explain a step before timing it, because timing runs hundreds of steps, and a leak grows in each of them.
        """
        time_budget = self.context.time_budget
        if time_budget is None or not step.may_be_timed:
            return step
        times = first_times(self.phases, self.context.device, self._storages, time_budget)
        return replace(step, figures=replace(step.figures, times=times))

    def time_again(self, step: MeasuredStep) -> MeasuredStep:
        """Return the timed ``step`` with another time sample."""
        times, time_budget = step.figures.times, self.context.time_budget
        assert times is not None, "only a step with times is timed again"
        assert time_budget is not None, "a step has times only if this session times steps"
        context, seconds = self.context, time_budget.second_sample
        sample = sample_again(self.phases, context.device, self._storages, seconds)
        time_budget.spend_on_second_sample(SECONDS_BETWEEN_SAMPLES + sample.spent)
        times = replace(times, samples=(*times.samples, sample))
        return replace(step, figures=replace(step.figures, times=times))

    def locate(self, step: MeasuredStep) -> MeasuredStep:
        """Run the step once more, and return ``step`` with the source lines of its counted operators."""
        counted, context = step.figures.counted, self.context
        # Kernel launches have no source lines, because they are counted on the GPU.
        has_lines = any(counted.by_operator.get(name) for name in TALLIED)
        if not context.device.consensus.any(has_lines):
            return step
        assert context.sites is not None, "only called if steps are explained"
        places = OperatorSites(context.sites, context.device.torch_device)
        with cyclic_collector_off(), restored_random_numbers(context.device), context.device.peak_ignored():
            counted = with_lines(self._run_counted, context.device, counted, places)
        return replace(step, figures=replace(step.figures, counted=counted))

    def _run_counted(self) -> None:
        """Run the step while its operators are counted. `PreparedLoop` overrides this method."""
        run_phases(self.phases)

    def explain(self, step: MeasuredStep, device: str | None = None) -> Explanation | str:
        """Run the step again, record its allocations, and explain the peak.

        Args:
            step: The measured step.
            device: The name of the GPU with the peak, if the step uses several GPUs.

        Returns:
            The explanation, or a clause with the reason why the peak cannot be explained.
        """
        figures, peak_device = step.figures, self.context.device_named(device)
        grows = any(figures.growth.values())
        device_figures = figures.devices[str(peak_device.torch_device)]
        memory = device_figures.latest_keeping_run if grows else device_figures.memory
        alike = self.context.device.consensus.all(figures.allocates_equally)
        expected = ExpectedFigures(
            memory.memory_metrics()["peak_allocated"],
            memory.turnover if peak_device.turnover() and alike else None,
            memory.own if grows else None,
            device_figures.growth if grows else 0,
            # If memory grows, but some steps keep no bytes, record as many steps as were used to measure growth.
            steps=max(1 if alike else len(figures.runs), WINDOW if grows and not device_figures.always_keeps else 0),
        )
        return self.context.explain(self.subject(peak_device), expected, peak_device)

    def subject(self, device: Device) -> Subject:
        """Return the step in the form that `explain` can record, for a device from `Device.everywhere`."""
        other_bytes = self.other_bytes[self.context.device.everywhere.index(device)]

        def run(tracker: Tracker) -> None:
            for step_phase in self.phases:
                with phase(tracker, step_phase.name):
                    step_phase.run()

        return Subject(
            run,
            own=lambda: list(self._storages(device)),
            own_bytes=lambda: device.live() - other_bytes,
            register=self._register,
            creation_sites=self.creation_sites,
            is_compiled=self.is_compiled,
        )

    def _register(self, owners: TensorOwners) -> None:
        if self.model is None:
            owners.within(self.held)
            owners.inputs(self.held)
            return
        owners.model(self.model)
        if self.optimizer is not None:
            owners.optimizer(self.optimizer)
        owners.inputs(self.batch)
        owners.buckets(self.buckets)

    def _storages(self, device: Device | None = None) -> Iterator[torch.UntypedStorage]:
        return self.context.storages(self.held, device)
