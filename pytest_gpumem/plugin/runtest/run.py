"""The state of a measured test while it runs: its device, its own bytes, and its measurements so far."""

from __future__ import annotations

import itertools
from contextlib import contextmanager, nullcontext, suppress
from dataclasses import dataclass, field, replace
from functools import partial
from typing import TYPE_CHECKING, Any

from pytest_gpumem.base.errors import MeasuringError
from pytest_gpumem.facts.measurement import HELD_NOTHING, Measurement, Workload, check_name
from pytest_gpumem.facts.values.rank import name_on, rank_in, without_rank
from pytest_gpumem.judging.gate.verdict import Outcome
from pytest_gpumem.measuring.devices.contract import Peak
from pytest_gpumem.measuring.explain.first_use import NewTensors, blocks_retained_by_run
from pytest_gpumem.measuring.explain.recording import EarlierBlocks, Subject
from pytest_gpumem.measuring.jobs.beside_torch import ProcessBytes, beside_torch
from pytest_gpumem.measuring.jobs.counterparts import places
from pytest_gpumem.measuring.jobs.figures import ALL, PROCESS, PROCESSES, JobFigures
from pytest_gpumem.measuring.jobs.windows import Window
from pytest_gpumem.measuring.measure.growth import WINDOW
from pytest_gpumem.measuring.measure.random_numbers import RandomNumbers
from pytest_gpumem.measuring.measure.reading import Figures, largest_of, live_everywhere, notes_on_missing, read_once
from pytest_gpumem.plugin.relations.growth_elsewhere import GrowthElsewhere
from pytest_gpumem.plugin.runtest.child_processes import check_processes, figures_of_processes, unmeasured_processes
from pytest_gpumem.plugin.runtest.explaining import call_again
from pytest_gpumem.plugin.runtest.gpu_use import at_end
from pytest_gpumem.plugin.runtest.judging import NOT_TIMED
from pytest_gpumem.torch_support.garbage_collector import everything_in_sight
from pytest_gpumem.torch_support.reachability import alive, blocks_of, reachable_tensors
from pytest_gpumem.torch_support.static_access import instance_dict
from pytest_gpumem.torch_support.tracebacks import clear_frames

if TYPE_CHECKING:
    from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
    from contextlib import AbstractContextManager

    from pytest_gpumem.facts.measurement import Environment
    from pytest_gpumem.facts.values.gpu_use import GpuUse
    from pytest_gpumem.facts.values.option_words import Routing
    from pytest_gpumem.facts.values.unknown_reads import UnknownReads
    from pytest_gpumem.judging.gate.verdict import TestVerdict
    from pytest_gpumem.measuring.devices.contract import BlockIds, Device
    from pytest_gpumem.measuring.explain.first_use import RetainedBlocks
    from pytest_gpumem.measuring.explain.owners import TensorOwners
    from pytest_gpumem.measuring.jobs.figures import ProcessFigures
    from pytest_gpumem.measuring.measure.context import MeasuringContext
    from pytest_gpumem.measuring.measure.prepared import MeasuredStep, PreparedStep
    from pytest_gpumem.measuring.measure.reading import ByDevice
    from pytest_gpumem.plugin.runtest.child_processes import SessionProcesses
    from pytest_gpumem.plugin.runtest.explaining import Explainer, RunAgain
    from pytest_gpumem.plugin.runtest.judging import JudgedMeasurement, Judging
    from pytest_gpumem.plugin.runtest.ownership import Ownership


_CALL = "call"
_RUNS_ONCE = "a region runs only once. To explain it, pass its code to gpumem.measure as a function"
_SCRIPT_RUNS_ONCE = "a script without steps runs only once"
_OTHER_RANKS = "the other ranks would not run the code again with this rank"


@dataclass(frozen=True, slots=True)
class JudgedStep:
    """A step's measurements, each with its verdict."""

    own: JudgedMeasurement | None
    """The measurement of the test's own process; ``None`` if only other processes used memory."""
    processes: Sequence[JudgedMeasurement] = ()
    """The measurement of each other process."""
    of_all: JudgedMeasurement | None = None
    """The measurement of all processes together; ``None`` if there are no other processes."""


@dataclass(eq=False, repr=False)
class TestRun:
    """A measured test from its set-up to the end of its call.

    A run measures steps and regions, and passes their figures to the gate (`Judging`) and to the `Explainer`.

    Example:
        ``gpumem.train_step(model, batch)`` calls `alone`, prepares the step, and calls `measure` (memory and counts), then
        `judge` (verdict, explanation, times) and `keep`. After the test's call, `verdict` combines all measurements.
    """

    __test__ = False

    judging: Judging
    explainer: Explainer
    context: MeasuringContext
    _ownership: Ownership
    _environment: Environment
    processes: SessionProcesses | None = None
    """The processes that the session starts; ``None`` to leave them alone."""
    _reads: Callable[[], UnknownReads] | None = None
    """Returns the uncomputed values read so far by the test and its fixtures; ``None`` if all values are computed."""
    judged: list[JudgedMeasurement] = field(default_factory=list)
    """The test's measurements so far, each with its verdict."""
    relations: int = 0
    """The number of relations that the test has asserted with success, for example by ``gpumem.assert_no_growth``."""
    lost: str | None = None
    """The reason why the test's figures are not valid, as a clause."""
    is_called: bool = False
    """True during the test's call."""
    gpu_uses: tuple[GpuUse, ...] = ()
    """The memory outside this process's allocator before the test's set-up."""
    beside_torch: dict[str, int | None] = field(default_factory=dict)
    """`TestVerdict.jobs_beside_torch` so far."""
    unmeasured_processes: dict[str, None] = field(default_factory=dict)
    """`TestVerdict.unmeasured_processes` so far."""
    has_failed_subtest: bool = False
    """True if a subtest failed, so the test may have skipped some measurements."""
    _errors: list[BaseException] = field(default_factory=list)
    """The errors raised in the test. Until `release`, their tracebacks keep the test's tensors alive."""
    _at_call: tuple[list[int], list[int]] | None = None
    """The readings when the call began: the test's own bytes, and all live bytes, each as a list with a value for each
    device in `Device.everywhere`."""
    _random: RandomNumbers | None = None
    """The state of the random number generators when the call began."""
    _known_at_call: BlockIds = frozenset()
    """The blocks that the device knew when the call began."""
    _made_by_call: NewTensors | None = None
    _beside_torch: Mapping[int, int | None] | None = None
    """The bytes beside torch in the last window by pid, from `beside_torch`; ``None`` if NVML was not read."""
    _attributes: frozenset[str] = frozenset()
    """The attributes of the test's instance when its call began."""
    _under_way: list[str] = field(default_factory=list)
    """The running measurement as the text of its call, for example ``"gpumem.measure('forward')"``. Nested regions have several
    texts."""
    _nested: MeasuringError | None = None
    """The error that a nested measurement raised, because it began while another measurement was running."""

    def __post_init__(self) -> None:
        self.item, self.device = self.judging.item, self.context.device
        self.measures_itself = self.judging.measured.has_fixture
        """True if the test has the fixture ``gpumem``, so its call as a whole is not measured."""

    @property
    def measurements(self) -> list[Measurement]:
        return [judged.measurement for judged in self.judged]

    def verdict(self) -> TestVerdict:
        """Return the verdict on the test at the end of its call."""
        if self.lost is not None:
            verdict, judged = self.judging.measured.not_measured(self.lost), []
        else:
            judged = [judged_measurement.with_changes() for judged_measurement in self.judged]
            verdict = self.judging.verdict(judged, self.relations)
        missing = () if self.has_failed_subtest else self.judging.missing(judged, self._environment.slug)
        verdict = replace(
            verdict,
            missing=missing,
            jobs_beside_torch=dict(self.beside_torch),
            unmeasured_processes=tuple(self.unmeasured_processes),
        )
        return replace(verdict, gpu_uses=at_end(self.device, self.gpu_uses)) if self.gpu_uses else verdict

    def refused(self, why: str) -> TestVerdict:
        """Return the verdict on a test if it cannot be measured. ``why`` is the reason, as a clause."""
        missing = self.judging.missing([], self._environment.slug)
        return replace(self.judging.measured.not_measured(why), missing=missing)

    def begin_call(self) -> None:
        """Read the device's memory before the test's call. All later allocations belong to the test."""
        self.is_called = True
        self.device.quiesce()
        self._random = RandomNumbers.current(self.device)
        own = self._own_bytes()
        existing = self._ownership.storages(self.item)
        with self.device.one_moment():
            self.device.register_existing(existing)
            self._at_call = own, live_everywhere(self.device)
            self._known_at_call = self.device.known()
        self._made_by_call = None if self.measures_itself else self._tensors_made()
        self._attributes = frozenset(self._instance_dict())

    @property
    def other_bytes(self) -> tuple[int, ...]:
        """The live bytes that did not belong to the test or its fixtures when the call began, on each device."""
        if self._at_call is None:
            raise RuntimeError("the test's call has not begun")
        return tuple(live - own for own, live in zip(*self._at_call, strict=True))

    def _own_bytes(self) -> list[int]:
        """Return the bytes that belong to the test at this moment, on each device in `Device.everywhere`."""
        return [
            ownership.own(self.item).total if ownership.device.is_used else 0
            for ownership in self._ownership.everywhere
        ]

    def reached(self, values: Sequence[object]) -> list[int]:
        """Return the bytes of tensors that can be reached from ``values`` or from the test's fixtures and class, on each
        device.
        """
        tensors = list(reachable_tensors([*self._ownership.values(self.item), *values]))
        return [
            sum(blocks_of(tensors, device.torch_device).values()) if device.is_used else 0
            for device in self.device.everywhere
        ]

    def other_blocks(self) -> frozenset[int]:
        """Return the addresses of live tensors that do not belong to the test or its fixtures.

        Tensors without a Python object are not included.
        """
        import torch

        if self.context.time_budget is not None:
            # The first call to `pace` may create tensors that stay alive, so call it before searching for tensors.
            with self.device.unrecorded():
                self.device.pace()
        with everything_in_sight():
            tensors = alive(torch.Tensor)
        live = {address for device in self.device.everywhere for address in blocks_of(tensors, device.torch_device)}
        own = {
            storage.data_ptr() for ownership in self._ownership.everywhere for storage in ownership.storages(self.item)
        }
        return frozenset(live - own - {address for address, _ in self.device.known() - self._known_at_call})

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

    @contextmanager
    def tracked(self) -> Iterator[Callable[[], Measurement]]:
        """Measure the test's call, which runs in the ``with`` block. Yield a function that judges the figures after the block,
        and adds them to the test.

        The block begins right after `begin_call`, and the figures use the readings from this method.
        """
        with (
            self.processes_window() as window,
            read_once(self.device, self.other_bytes, self._own_bytes, self._at_call) as figures,
        ):
            yield lambda: self._keep_once(figures(), window, partial(self.judge_figures, Workload(_CALL)))
            if self._made_by_call is not None:
                self._made_by_call.record()

    @contextmanager
    def region(self, name: str | None) -> Iterator[Callable[[], Measurement]]:
        """Measure the code in the ``with`` block, which runs once.

        Yield a function to call after the block. This function judges the measurement, adds it to the test, and returns it.
        """
        self.device.settle()
        new_tensors = self._tensors_made()
        judge = partial(self._judged_region, name=name, new_tensors=new_tensors)
        with self.processes_window() as window, read_once(self.device, self.other_bytes, self._own_bytes) as figures:
            yield lambda: self._keep_once(figures(), window, judge, _RUNS_ONCE)
            if new_tensors is not None:
                new_tensors.record()

    @contextmanager
    def processes_window(self) -> Iterator[Window]:
        """Read the figures of the processes that the session starts, within the context."""
        if self.processes is None:
            yield Window()
            return
        process_bytes = ProcessBytes(self.device.everywhere)
        with self.processes.window(look=process_bytes.look) as window:
            yield window
        self._beside_torch = beside_torch(window.usage.usages, process_bytes.by_pid) if process_bytes.is_read else None
        self.unmeasured_processes |= dict.fromkeys(unmeasured_processes(window.usage, self.device))

    def _keep_once(
        self,
        figures: ByDevice,
        window: Window,
        judge: Callable[[ByDevice], JudgedMeasurement],
        run_again: RunAgain | None = None,
    ) -> Measurement:
        """Add the measurements of code that ran once."""
        return self.keep_with_processes(judge(figures), figures, window, run_again)

    def keep_with_processes(
        self,
        own: JudgedMeasurement,
        own_figures: ByDevice,
        window: Window,
        run_again: RunAgain | None = None,
        *,
        explain: bool | None = None,
    ) -> Measurement:
        """Add the measurements of the test's own process, and of other processes that it used.

        If only other processes used a GPU, the own process has no measurement.

        Args:
            own: The own process's measurement with its verdict.
            own_figures: The own process's figures in the window.
            window: The other processes.
            run_again: As for `Explainer.explain_processes`. ``None`` if the processes are explained later.
            explain: Whether to explain the processes; ``None`` if the verdicts and the settings decide.

        Returns:
            The measurement of the own process, or of all processes together.

        Raises:
            MeasuringError: The memory of another process is not known. If the own process used memory, its measurement is
                added before.
        """
        has_own = own.measurement.peak_allocated > 0
        try:
            job = figures_of_processes(window.usage, self.device, own_figures)
        except MeasuringError:
            if has_own:
                self._keep_all(JudgedStep(own))
            raise
        if not job.processes:
            return self._keep_all(JudgedStep(own))
        name = without_rank(own.measurement.name)
        job = self.with_names_by_baseline(job, name)
        processes = self.judge_processes(job.processes, name)
        if run_again is not None:
            names = [process.name for process in job.processes]
            processes = self.explainer.explain_processes(processes, names, run_again, explain=explain)
        of_all = self.judge_job(Workload(PROCESSES), job, f"{name}: {ALL}")
        return self._keep_all(JudgedStep(own if has_own else None, processes, of_all))

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
        measurement = self._keep_all(judged)
        check_processes(window.usage, self.device)
        return measurement

    def _keep_all(self, judged: JudgedStep) -> Measurement:
        """Add measurements."""
        self.keep_beside_torch(judged.processes, self._beside_torch)
        parts = (judged.own, *judged.processes, judged.of_all)
        kept = [self.keep(part) for part in parts if part is not None]
        return kept[-1 if judged.own is None else 0]

    def keep_beside_torch(
        self, processes: Sequence[JudgedMeasurement], bounds: Mapping[int, int | None] | None
    ) -> None:
        """Add the processes' bytes beside torch (`beside_torch`). ``bounds`` is ``None`` if NVML was not read."""
        if bounds is None:
            return
        for judged in processes:
            seen = [bound for bound in map(bounds.get, judged.pids) if bound is not None]
            self.beside_torch[judged.measurement.name] = max(seen, default=None)

    def keep_script(self, figures: ByDevice, window: Window) -> Measurement | None:
        """Add the measurements of a script without steps, if other processes used a GPU.

        Args:
            figures: The script's own figures from its start to its end.
            window: The other processes in this time.

        Returns:
            The measurement of the own process, or of all processes together. ``None`` if no other process used a GPU.

        Raises:
            MeasuringError: The memory of another process is not known.
        """
        if not figures_of_processes(window.usage, self.device, figures).processes:
            return None
        by_gpu = {gpu: {"peak_allocated": memory.own_peak} for gpu, memory in figures.items()}
        notes = (*notes_on_missing(figures.values()), "no step was seen, so the whole script is measured")
        own = self.judge_job(Workload("script"), JobFigures(by_gpu, (), notes), None)
        return self.keep_with_processes(own, figures, window, _SCRIPT_RUNS_ONCE)

    def judge_processes(self, processes: Sequence[ProcessFigures], name: str) -> list[JudgedMeasurement]:
        """Judge the figures of each process in a job. ``name`` is the job's name."""
        return [self._judge_process(process, process.name, name) for process in processes]

    def _judge_process(self, process: ProcessFigures, process_name: str, job_name: str) -> JudgedMeasurement:
        judged = self.judge_job(Workload(PROCESS), process, f"{job_name}: {process_name}")
        return replace(judged, pids=(process.pid,))

    def with_names_by_baseline(self, job: JobFigures, name: str) -> JobFigures:
        """Return a job whose processes with the same program have the names of the baselines that all of them fit.

        Chance may decide which worker of a pool gets a task. ``name`` is the job's name.
        """
        processes = {process.name: process for process in job.processes}

        def is_same(process: str, other: str) -> bool:
            return self._judge_process(processes[process], other, name).verdict.outcome is Outcome.OK

        names, doubtful = places({name: process.program for name, process in processes.items()}, is_same)
        for process, other in doubtful.items():
            note = f"its peak fits the baseline of {other}, so these processes may have changed places"
            processes[process] = replace(processes[process], notes=(*processes[process].notes, note))
        ordered = sorted(names, key=lambda process: list(processes).index(names[process]))
        return replace(job, processes=tuple(replace(processes[process], name=names[process]) for process in ordered))

    def _tensors_made(self) -> NewTensors | None:
        """Begin to collect new tensors, in which holders are searched later.

        Under ``--gpumem-explain=never``, collect nothing and return ``None``.
        """
        return None if self.context.sites is None else NewTensors()

    def _judged_region(self, figures: ByDevice, name: str | None, new_tensors: NewTensors | None) -> JudgedMeasurement:
        """Return a region's measurement with its verdict.

        If `retained` fails the test, add notes that name the holders of the tensors.
        """
        judged = self.judge_figures(Workload("region"), figures, name)
        policy = self.explainer.policy
        if self.context.sites is None or not policy.should_find_holders(judged):
            return judged
        device = self.context.device_named(policy.device_to_explain(judged))
        return self.explainer.noted(judged, self._retained_blocks(new_tensors, device))

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
        consensus, sites, is_elsewhere = self.device.consensus, self.context.sites, step.is_elsewhere
        processes: Sequence[JudgedMeasurement] = ()
        if step.processes:
            name = name or self._free_name(step.workload)
            processes = self._judge_processes_of(prepared, step, name, explain)
        judged = self.judging.judge(self._measurement_of(step, name))
        explanation = None
        if sites is not None:
            sites.packages.clear()
            if not is_elsewhere:
                step, explanation = self.explainer.explain_step(prepared, step, judged, explain)
        if self.context.time_budget is not None and consensus.all(step.may_be_timed):
            step = prepared.time(step)
            judged = self.judging.judge(self._measurement_of(step, name))
        while consensus.all(step.may_be_timed_again) and consensus.any(self._should_time_again(judged)):
            step = prepared.time_again(step)
            judged = self.judging.judge(self._measurement_of(step, name))
        if sites is not None:
            by_operator = step.figures.counted.by_operator
            if by_operator != judged.measurement.by_operator and not is_elsewhere:
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
        of_all = self._measurement_of(step.processes[ALL], f"{name}: {ALL}")
        return JudgedStep(judged, processes, self.judging.judge(of_all))

    def _judge_processes_of(
        self, prepared: PreparedStep, step: MeasuredStep, name: str, explain: bool | None
    ) -> Sequence[JudgedMeasurement]:
        """Judge each other process in a step, and explain their peaks and growth if necessary."""
        names = [process for process in step.processes if process != ALL]
        judged = [
            replace(
                self.judging.judge(self._measurement_of(step.processes[each], f"{name}: {each}")),
                pids=step.processes[each].pids,
            )
            for each in names
        ]
        growing = {each for each in names if any(step.processes[each].figures.growth.values())}
        run_again = self._if_alone(partial(self._recorded_step, prepared.run_again, growing))
        return self.explainer.explain_processes(judged, names, run_again, explain=explain)

    def growth_elsewhere(self) -> GrowthElsewhere:
        """Return the other processes for `assert_no_growth`. Several ranks do not look for the kept tensors."""
        sites = self.context.sites if self.judging.ranks.rank is None else None
        return GrowthElsewhere(self.context.end_step, None if sites is None else self._recorded_step, sites)

    def _recorded_step(self, step: Callable[[], object], growing: Collection[str]) -> Sequence[ProcessFigures]:
        """Run a step again while its processes record their allocations.

        If memory grows, but only some steps keep bytes, the step runs until each growing process keeps bytes.
        """
        recorded: Sequence[ProcessFigures] = ()
        for _ in range(WINDOW):
            recorded = self._recorded(step)
            keeping = {
                process.name: any(blocks.retained for blocks in process.recorded.values())
                for process in recorded
                if process.recorded
            }
            if all(keeping.get(process, True) for process in growing):
                break
        return recorded

    def _should_time_again(self, judged: JudgedMeasurement) -> bool:
        time_budget = self.context.time_budget
        decides_only = time_budget is not None and not time_budget.may_sample_again
        return self.judging.should_time_again(judged, decides_only=decides_only)

    def keep(self, judged: JudgedMeasurement) -> Measurement:
        """Add a measurement to this test, call the hook ``pytest_gpumem_measurement``, and return the measurement."""
        measurement = judged.measurement
        if measurement.peak_allocated <= 0:
            device = f"{self.device.torch_device}{' or another GPU' if self.device.others else ''}"
            held_nothing = f"{measurement.name} held no tensor on {device}"
            # If another process may have the tensors, advice on this process would mislead.
            processes = "; ".join(self.unmeasured_processes)
            self.lost = f"{processes}; {held_nothing}" if processes else f"{held_nothing}: {HELD_NOTHING}"
        self.judged.append(judged)
        self.item.config.hook.pytest_gpumem_measurement(item=self.item, measurement=measurement)
        return measurement

    def judge_figures(self, workload: Workload, figures: ByDevice, name: str | None = None) -> JudgedMeasurement:
        """Judge the figures of code that runs only once: a call, a region or a ``load``."""
        metrics = {device: memory.memory_metrics() for device, memory in figures.items()}
        measurement = self._new_measurement(
            workload,
            largest_of(metrics.values()),
            name,
            workspaces=max(memory.workspaces for memory in figures.values()),
            unused_before=max(memory.unused_before for memory in figures.values()),
            by_device=self._by_device(metrics),
            notes=notes_on_missing(figures.values()),
        )
        return self.judging.judge(measurement)

    def judge_job(
        self, workload: Workload, figures: JobFigures | ProcessFigures, name: str | None
    ) -> JudgedMeasurement:
        """Judge the figures of a job or of one of its processes."""
        imbalance = {} if figures.imbalance is None else {"imbalance": figures.imbalance}
        measurement = self._new_measurement(
            workload,
            {**largest_of(figures.by_gpu.values()), **imbalance},
            name,
            figures.notes,
            gained_before=figures.gained_before,
            process=figures.details,
            by_device=figures.by_gpu if len(figures.by_gpu) > 1 else {},
            simultaneous=figures.simultaneous,
        )
        return self.judging.judge(measurement)

    def _by_device(self, metrics: Mapping[str, Mapping[str, int]]) -> Mapping[str, Mapping[str, int]]:
        """Return the metrics for each device on which the step used memory; an empty mapping if the process sees only one
        device.
        """
        if not self.device.others:
            return {}
        return {device: values for device, values in metrics.items() if values["peak_allocated"] > 0}

    def _measurement_of(self, step: MeasuredStep, name: str | None) -> Measurement:
        notes = [NOT_TIMED] if step.is_own and self._leaves_times_out else []
        if step.is_elsewhere:
            step, name = step.of_all_processes(), f"{name}: {ALL}"
        figures, devices, metrics = step.figures, step.figures.devices, step.metrics()
        by_device: Mapping[str, Mapping[str, int]] = {}
        if self.device.others if step.is_own else len(devices) > 1:
            by_device = {device: on_device.metrics() for device, on_device in devices.items()}
            by_device = (
                self._by_device(by_device)
                if step.is_own
                else {
                    device: {name: values[name] for name in values if name in metrics}
                    for device, values in by_device.items()
                }
            )
        return self._new_measurement(
            step.workload,
            metrics,
            name,
            settled=figures.is_settled,
            notes=(*step.notes, *notes),
            recomputed=step.recomputed,
            times=figures.times,
            work=step.work,
            step_peaks=figures.step_peaks,
            by_operator=figures.counted.by_operator,
            lowest_counts=figures.counted.lowest,
            workspaces=max(on_device.memory.workspaces for on_device in devices.values()),
            unused_before=max(on_device.memory.unused_before for on_device in devices.values()),
            gained_before=step.gained_before,
            process=step.process,
            by_device=by_device,
            simultaneous=step.simultaneous,
            step_peaks_by_device={device: devices[device].step_peaks for device in by_device},
        )

    @property
    def _leaves_times_out(self) -> bool:
        """True if the device can time steps, but this test's steps are not timed because nothing needs their times."""
        settings = self.judging.settings
        return self.context.time_budget is None and settings.time is None and self.device.tells_time

    def _new_measurement(
        self, workload: Workload, metrics: Mapping[str, float], name: str | None, notes: Sequence[str] = (), **more: Any
    ) -> Measurement:
        """Return a new measurement.

        If ``name`` is ``None``, the step's name is used: ``train_step`` for the first measurement, ``train_step-2`` for the
        second.

        Raises:
            ValueError: The test already has a measurement with this name, or the store uses such a name for a rank or for
                one of several GPUs.
        """
        rank, taken = self.judging.ranks.rank, self._taken_names()
        if name in taken:
            raise ValueError(
                f"this test already has a measurement called {name!r}, and every measurement needs its own baseline; give it "
                "another name"
            )
        if name is not None and rank_in(name) is not None:
            raise ValueError(
                f"the store uses the name {name!r} for the measurement {without_rank(name)!r} of a rank; give it another name"
            )
        name = name or self._free_name(workload)
        self._check_parts({*taken, name})
        environment = self._environment
        environment = replace(environment, details={**environment.details, **self.device.libraries()})
        name = name if rank is None else name_on(rank, name)
        if self._reads is not None:
            reads = self._reads()
            workload = _under_routing(workload, self.judging.settings.routing, reads)
            notes = (*notes, *reads.notes())
        return Measurement(name, workload, environment, metrics, notes=tuple(notes), **more)

    def _taken_names(self) -> set[str]:
        """Return the names of the test's measurements so far, without ranks."""
        names = {judged.measurement.name for judged in self.judged}
        return names if self.judging.ranks.rank is None else {without_rank(name) for name in names}

    def _free_name(self, workload: Workload) -> str:
        """Return the name for a measurement if the test gave none."""
        taken = self._taken_names()
        # If only other processes used a GPU, a region has no measurement, and theirs begin with its name.
        return _numbered(workload.step, taken | {name.partition(": ")[0] for name in taken})

    def _check_parts(self, names: Collection[str]) -> None:
        """Raise ``ValueError`` if the store already uses one of the ``names`` for another measurement on a single GPU.

        For example, the store has the figures of ``"step"`` on the second GPU under the name ``"step on cuda:1"``.
        """
        parts = {f"{name} on {device.torch_device}" for name in names for device in self.device.everywhere}
        for name in parts.intersection(names) if self.device.others else ():
            raise ValueError(
                f"the store uses the name {name!r} for a measurement's figures on a single GPU; give it another name"
            )

    def explain_call(self) -> None:
        """Run the call of a test without the fixture again with a recording, and explain its peak, if `ExplainPolicy` asks
        for an explanation.
        """
        if not self.measures_itself and self.judged[0].measurement.workload.step == _CALL:
            retained = partial(self._retained_blocks, self._made_by_call)
            self.judged[0] = self.explainer.explain_once(self.judged[0], self._call_subject, retained=retained)
        at = [index for index, judged in enumerate(self.judged) if judged.measurement.workload.step == PROCESS]
        if not self.measures_itself and at:
            judged = [self.judged[index] for index in at]
            # A call's name has no colon, but a process's name may have one.
            names = [result.measurement.name.partition(": ")[2] for result in judged]
            run_again = self._if_alone(self._recorded_processes)
            explained = self.explainer.explain_processes(judged, names, run_again)
            for index, result in zip(at, explained, strict=True):
                self.judged[index] = result

    def _recorded_processes(self) -> Sequence[ProcessFigures]:
        """Run the test's call again while its processes record their allocations."""
        self._call_subject(self.device).prepare()
        return self._recorded(partial(call_again, self.item))

    def recorded_loading(self, load: Callable[[], object], window: Window) -> RunAgain:
        """Return a function that loads an object again while its processes record their allocations.

        Args:
            load: The function.
            window: The processes when the object was loaded first.
        """

        def run_again() -> Sequence[ProcessFigures]:
            with self.ending_new_processes(window):
                return self._recorded(load)

        return self._if_alone(run_again)

    def ending_new_processes(self, window: Window) -> AbstractContextManager[None]:
        """Return a context for code that loads an object again. It ends processes that started for the second object.

        Args:
            window: The processes when the object was loaded first. Without any, no process is ended.
        """
        usages = window.usage.usages
        return nullcontext() if self.processes is None or not usages else self.processes.ending_new_processes()

    def _if_alone(self, run_again: Callable[[], Sequence[ProcessFigures]]) -> RunAgain:
        """Return ``run_again``, or the reason why a rank does not run code again for its processes."""
        return run_again if self.judging.ranks.rank is None else _OTHER_RANKS

    def _recorded(self, run: Callable[[], object]) -> Sequence[ProcessFigures]:
        """Run code while its processes record their allocations. The code's result is alive until they have answered."""
        assert self.processes is not None, "only called if there are processes"
        with self.processes.window(record=True) as window:
            result = run()
        del result
        nothing = Figures(0, 0, None, Peak(0), None, 0)
        own = {str(device.torch_device): nothing for device in self.device.everywhere}
        return figures_of_processes(window.usage, self.device, own).processes

    def _retained_blocks(self, new_tensors: NewTensors | None, device: Device) -> RetainedBlocks | None:
        """Return the tensors that a call or a region retained on a device.

        This must happen before other code of the test runs.
        """
        if new_tensors is None:
            return None
        own = self._ownership.everywhere[self.device.everywhere.index(device)].storages(self.item)
        is_call = new_tensors is self._made_by_call
        new_addresses = {address for address, _ in device.known() - self._known_at_call} if is_call else set()
        new_blocks = {address: nbytes for address, nbytes in device.blocks().items() if address in new_addresses}
        with suppress(Exception):
            # Ignore errors in the search for holders, because the test can be explained without them.
            return blocks_retained_by_run(
                new_tensors, device.torch_device, {storage.data_ptr() for storage in own}, new_blocks
            )
        return None

    def explain_call_out_of_memory(self, error: BaseException) -> None:
        """After an out-of-memory error in the test's call, run the call again with a recording, and report the largest
        rows.
        """
        if not self.measures_itself and self._at_call is not None:
            self.explainer.explain_out_of_memory(error, self._call_subject)

    def _call_subject(self, device: Device) -> Subject:
        """Return the test's call as a `Subject` that can be recorded on ``device``, one of `Device.everywhere`."""
        at = self.device.everywhere.index(device)
        ownership = self._ownership.everywhere[at]

        def prepare() -> None:
            # Remove the gradients and attributes that the first call left behind, so the second call begins like the first.
            self._ownership.clear_left_gradients(self.item)
            if self._random is not None:
                self._random.restore()
            attributes = self._instance_dict()
            for name in [name for name in attributes if name not in self._attributes]:
                dict.pop(attributes, name)

        assert self._at_call is not None, "the call has begun"
        own_at_call, live_at_call = (readings[at] for readings in self._at_call)

        def earlier_blocks() -> EarlierBlocks:
            own_gained = ownership.own(self.item).total - own_at_call
            gained = device.live() - live_at_call - own_gained
            blocks = self.device.known() - self._known_at_call
            return EarlierBlocks(max(0, gained), frozenset(address for address, _ in blocks))

        def register(owners: TensorOwners) -> None:
            values = self._ownership.values(self.item)
            owners.within(values)
            owners.inputs(values)

        return Subject(
            lambda _: call_again(self.item),
            own=lambda: list(ownership.storages(self.item)),
            own_bytes=lambda: ownership.own(self.item).total,
            register=register,
            prepare=prepare,
            earlier_blocks=earlier_blocks,
            is_once=True,
        )

    def _instance_dict(self) -> dict[str, object]:
        return instance_dict(getattr(self.item, "instance", None)) or {}

    def failed(self, *errors: BaseException) -> None:
        """Store the errors that ended the test, so `release` can free the tensors in their tracebacks."""
        self._errors += errors

    def release(self) -> None:
        """Release the test's objects, including the frames in its errors' tracebacks, and close the device."""
        for error in self._errors:
            clear_frames(error)
        self._errors.clear()
        self._at_call = None
        self._made_by_call = None
        self.device.close()


def _under_routing(workload: Workload, routing: Routing | None, reads: UnknownReads) -> Workload:
    """Return the workload, with ``routing=`` added to its config if the figures may depend on the setting ``routing``.

    For example, ``fp32`` becomes ``fp32,routing=balanced`` if the step read which experts its tokens go to.
    """
    config = workload.config or ""
    if routing is None or routing not in reads.routed or "routing=" in config:
        return workload
    return replace(workload, config=",".join(filter(None, (config, f"routing={routing}"))))


def _numbered(name: str, taken: set[str]) -> str:
    """Return the first of ``name``, ``name-2``, ``name-3``, ... that is not in ``taken``."""
    numbered = (name if number == 1 else f"{name}-{number}" for number in itertools.count(1))
    return next(candidate for candidate in numbered if candidate not in taken)
