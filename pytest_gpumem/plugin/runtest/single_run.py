"""Measure a single run and the processes that it uses: a test's call, a region, or a script without steps."""

from __future__ import annotations

from contextlib import contextmanager
from dataclasses import replace
from typing import TYPE_CHECKING

from pytest_gpumem.base.errors import MeasuringError
from pytest_gpumem.facts.measurement import Workload
from pytest_gpumem.facts.values.rank import without_rank
from pytest_gpumem.judging.gate.verdict import Outcome
from pytest_gpumem.measuring.jobs.counterparts import places
from pytest_gpumem.measuring.jobs.figures import ALL, PROCESS, PROCESSES, JobFigures
from pytest_gpumem.measuring.measure.reading import notes_on_missing, read_once
from pytest_gpumem.plugin.runtest.repeated_call import CALL
from pytest_gpumem.plugin.runtest.run import JudgedStep

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator, Sequence

    from pytest_gpumem.facts.measurement import Measurement
    from pytest_gpumem.measuring.explain.first_use import NewTensors
    from pytest_gpumem.measuring.jobs.figures import ProcessFigures
    from pytest_gpumem.measuring.jobs.windows import Window
    from pytest_gpumem.measuring.measure.reading import ByDevice
    from pytest_gpumem.plugin.runtest.explaining import RunAgain
    from pytest_gpumem.plugin.runtest.judging import JudgedMeasurement
    from pytest_gpumem.plugin.runtest.run import TestRun

_REGION_RUNS_ONCE = "a region runs only once. To explain it, pass its code to gpumem.measure as a function"
_SCRIPT_RUNS_ONCE = "a script without steps runs only once"


@contextmanager
def measured_call(run: TestRun) -> Iterator[Callable[[], Measurement]]:
    """Measure the test's call, which runs in the ``with`` block.

    The block begins right after `TestRun.begin_call`, and the figures use the readings from this method.

    Yields:
        A function to call after the block. It judges the measurement, adds it to the test, and returns it.
    """
    memory, begin = run.memory, run.memory.at_call
    before = begin.own, begin.live
    with (
        run.processes.window() as window,
        read_once(run.device, memory.other_bytes, memory.own_bytes, before) as figures,
    ):
        yield lambda: keep_with_processes(run, judge_figures(run, Workload(CALL), figures()), figures(), window)
        if begin.new_tensors is not None:
            begin.new_tensors.record()


@contextmanager
def measured_region(run: TestRun, name: str | None) -> Iterator[Callable[[], Measurement]]:
    """Measure the code in the ``with`` block, which runs once.

    Yields:
        A function to call after the block. It judges the measurement, adds it to the test, and returns it.
    """
    memory = run.memory
    run.device.settle()
    new_tensors = memory.new_tensors()

    def keep() -> Measurement:
        judged = _judge_region(run, figures(), name, new_tensors)
        return keep_with_processes(run, judged, figures(), window, _REGION_RUNS_ONCE)

    with run.processes.window() as window, read_once(run.device, memory.other_bytes, memory.own_bytes) as figures:
        yield keep
        if new_tensors is not None:
            new_tensors.record()


def _judge_region(
    run: TestRun, figures: ByDevice, name: str | None, new_tensors: NewTensors | None
) -> JudgedMeasurement:
    """Return a region's measurement with its verdict.

    If `retained` fails the test, notes name the tensors' holders.
    """
    judged = judge_figures(run, Workload("region"), figures, name)
    policy = run.explainer.policy
    if run.context.sites is None or not policy.should_find_holders(judged):
        return judged
    device = run.context.device_named(policy.device_to_explain(judged))
    return run.explainer.noted(judged, run.memory.retained(new_tensors, device))


def keep_script(run: TestRun, figures: ByDevice, window: Window) -> Measurement | None:
    """Add the measurements for a script without steps, if other processes used a GPU.

    Args:
        run: The script's run.
        figures: The script's own figures from its start to its end.
        window: The other processes in this time.

    Returns:
        The own process's measurement, or the one for all processes. ``None`` if no other process used a GPU.

    Raises:
        MeasuringError: Another process's memory is not known.
    """
    if not run.processes.figures(window, figures).processes:
        return None
    by_gpu = {gpu: {"peak_allocated": memory.own_peak} for gpu, memory in figures.items()}
    notes = (*notes_on_missing(figures.values()), "no step was seen, so the whole script is measured")
    own = judge_job(run, Workload("script"), JobFigures(by_gpu, (), notes), None)
    return keep_with_processes(run, own, figures, window, _SCRIPT_RUNS_ONCE)


def keep_with_processes(
    run: TestRun,
    own: JudgedMeasurement,
    figures: ByDevice,
    window: Window,
    run_again: RunAgain | None = None,
    *,
    explain: bool | None = None,
) -> Measurement:
    """Add the measurements for the test's own process, and for other processes.

    If only other processes used a GPU, the own process has no measurement.

    Args:
        run: The test's run.
        own: The own process's measurement with its verdict.
        figures: The own process's figures.
        window: The other processes.
        run_again: As for `Explainer.explain_processes`. ``None`` if the processes are explained later.
        explain: Whether to explain the processes; ``None`` if the verdicts and the settings decide.

    Returns:
        The own process's measurement, or the one for all processes.

    Raises:
        MeasuringError: Another process's memory is not known. If the own process used memory, its measurement is added
            before.
    """
    has_own = own.measurement.peak_allocated > 0
    try:
        job = run.processes.figures(window, figures)
    except MeasuringError:
        if has_own:
            run.keep_all(JudgedStep(own))
        raise
    if not job.processes:
        return run.keep_all(JudgedStep(own))
    name = without_rank(own.measurement.name)
    job = with_names_by_baseline(run, job, name)
    processes = judge_processes(run, job.processes, name)
    if run_again is not None:
        names = [process.name for process in job.processes]
        processes = run.explainer.explain_processes(processes, names, run_again, explain=explain)
    of_all = judge_job(run, Workload(PROCESSES), job, f"{name}: {ALL}")
    return run.keep_all(JudgedStep(own if has_own else None, processes, of_all))


def judge_figures(run: TestRun, workload: Workload, figures: ByDevice, name: str | None = None) -> JudgedMeasurement:
    """Judge the own process's figures."""
    return run.judging.judge(run.measurements.of_figures(workload, figures, name))


def judge_job(
    run: TestRun, workload: Workload, figures: JobFigures | ProcessFigures, name: str | None
) -> JudgedMeasurement:
    """Judge the figures for a job or for one of its processes."""
    return run.judging.judge(run.measurements.of_job(workload, figures, name))


def judge_processes(run: TestRun, processes: Sequence[ProcessFigures], name: str) -> list[JudgedMeasurement]:
    """Judge each process in a job. ``name`` is the job's name."""
    return [_judge_process(run, process, process.name, name) for process in processes]


def _judge_process(run: TestRun, process: ProcessFigures, process_name: str, job_name: str) -> JudgedMeasurement:
    judged = judge_job(run, Workload(PROCESS), process, f"{job_name}: {process_name}")
    return replace(judged, pids=(process.pid,))


def with_names_by_baseline(run: TestRun, job: JobFigures, name: str) -> JobFigures:
    """Return a job whose processes with the same program have the names of the baselines that all of them fit.

    Chance may decide which worker of a pool gets a task. ``name`` is the job's name.
    """
    processes = {process.name: process for process in job.processes}

    def is_same(process: str, other: str) -> bool:
        return _judge_process(run, processes[process], other, name).verdict.outcome is Outcome.OK

    names, doubtful = places({name: process.program for name, process in processes.items()}, is_same)
    for process, other in doubtful.items():
        note = f"its peak fits the baseline of {other}, so these processes may have changed places"
        processes[process] = replace(processes[process], notes=(*processes[process].notes, note))
    ordered = sorted(names, key=lambda process: list(processes).index(names[process]))
    return replace(job, processes=tuple(replace(processes[process], name=names[process]) for process in ordered))
