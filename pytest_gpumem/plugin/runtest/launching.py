"""Implement `Gpumem.launch`: run a command, and measure each of its processes' GPU memory."""

from __future__ import annotations

import os
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING

from pytest_gpumem.base.errors import CannotRun, JobError
from pytest_gpumem.base.shown_command import shown_command
from pytest_gpumem.facts.measurement import Workload
from pytest_gpumem.measuring.jobs.beside_torch import ProcessBytes, beside_torch
from pytest_gpumem.measuring.jobs.figures import WITHOUT_STATISTICS, invalid_figures, job_figures, killed_in
from pytest_gpumem.measuring.jobs.run import failure, run_job
from pytest_gpumem.plugin.runtest.child_processes import name_of_devices, without_rank_in
from pytest_gpumem.plugin.runtest.launch_arguments import (
    check_ranks,
    check_timeout,
    checked_command,
    checked_environment,
    checked_folder,
)
from pytest_gpumem.plugin.runtest.single_run import judge_job, judge_processes, with_names_by_baseline

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence

    from pytest_gpumem.facts.measurement import Measurement
    from pytest_gpumem.measuring.jobs.figures import JobFigures
    from pytest_gpumem.measuring.jobs.run import FinishedJob
    from pytest_gpumem.plugin.runtest.judging import JudgedMeasurement
    from pytest_gpumem.plugin.runtest.run import TestRun

_STEP = "launch"


@dataclass(frozen=True, slots=True)
class Launched:
    """The result of `Gpumem.launch`."""

    measurement: Measurement
    """The job's measurement. `peak_allocated` and `peak_reserved` are sums over processes that ran on a GPU at the same
    time, for the largest sum on any GPU. `imbalance` compares the ranks."""
    processes: Mapping[str, Measurement]
    """A measurement for each process with GPU memory, by the process's name: ``train.py rank 0``."""
    exit_status: int
    """The command's exit status: 0, because any other status fails the test."""
    stdout: str
    """The text on the command's standard output."""
    stderr: str
    """The text on the command's standard error."""


def launch(
    run: TestRun,
    command: Sequence[str | os.PathLike[str]],
    *,
    ranks: int | None,
    timeout: float | None,
    env: Mapping[str, str] | None,
    cwd: str | os.PathLike[str] | None,
    name: str | None,
    explain: bool | None,
) -> tuple[FinishedJob, JudgedMeasurement, dict[str, JudgedMeasurement]]:
    """Run a command and judge its figures.

    Returns:
        The finished job, its judged measurement, and the judged measurement of each process by name.

    Raises:
        TypeError: An argument has the wrong type.
        ValueError: A text in an argument is invalid.
        CannotRun: The device cannot measure other processes.
        JobError: The command cannot be started, fails, takes too long, has other ranks than ``ranks``, has a process without
            a report, or has no process with GPU memory.
    """
    words, folder, further_variables = checked_command(command), checked_folder(cwd), checked_environment(env)
    check_timeout(timeout)
    check_ranks(ranks)
    lacking = run.device.lacks("processes")
    if lacking is not None:
        raise CannotRun(f"gpumem.launch: {lacking}")
    run.device.quiesce()
    process_bytes = ProcessBytes(run.device.everywhere)
    environment = {**os.environ, **run.device.variables_of_processes(), **further_variables}

    def run_once(*, record: bool) -> tuple[FinishedJob, JobFigures]:
        job = run_job(words, environment, folder, timeout, process_bytes.look, record=record)
        if job.status:
            raise JobError(failure(words, job))
        if job.uncounted:
            raise CannotRun(f"gpumem.launch: `{job.uncounted[0][0]}` loads torch, and {job.uncounted[0][1]}")
        # A job may set these variables for itself, and to the test's own rank by chance.
        launchers = {name: value for name, value in os.environ.items() if name not in ("RANK", "LOCAL_RANK")}
        job = replace(job, usages=tuple(without_rank_in(launchers, job.usages)))
        devices = name_of_devices(run.device)
        figures = job_figures(job.usages, devices, simultaneous=job.simultaneous, own_pid=os.getpid())
        check_job(words, job, figures, ranks)
        return job, figures

    job, figures = run_once(record=False)
    run.lost = run.lost or invalid_figures(job.usages)
    judged_job = judge_job(run, Workload(_STEP), figures, name)
    figures = with_names_by_baseline(run, figures, judged_job.measurement.name)
    of_processes = run.explainer.explain_processes(
        judge_processes(run, figures.processes, judged_job.measurement.name),
        [process.name for process in figures.processes],
        lambda: run_once(record=True)[1].processes,
        explain=explain,
    )
    by_name = {process.name: judged for process, judged in zip(figures.processes, of_processes, strict=True)}
    if process_bytes.is_read:
        run.processes.note_beside_torch(of_processes, beside_torch(job.usages, process_bytes.by_pid))
    return job, judged_job, by_name


def check_job(command: Sequence[str], job: FinishedJob, figures: JobFigures, ranks: int | None) -> None:
    """Raise `JobError` if the figures would be too low, or if the job has other ranks than declared."""
    shown = shown_command(command)
    if job.unseen:
        process, cause = job.unseen[0]
        likely = (
            "does not inherit the environment, runs with python -I, -E or -S, runs in a Python without pytest-gpumem, or "
            "uses a GPU without torch"
        )
        does = "loads torch or CUDA and does not report its memory"
        which = f"`{shown}` {does}" if process == shown else f"`{shown}` started a process that {does}: {process}"
        raise JobError(f"{which}. " + (cause[0].upper() + cause[1:] if cause else f"It {likely}"))
    if job.invalid:
        raise JobError(f"`{shown}`: {job.invalid[0]}")
    if job.alive:
        raise JobError(
            f"`{shown}` has ended, but its process still runs, so the memory is not known: {job.alive[0]}. Let the command "
            "wait for its processes"
        )
    if killed := killed_in(job.usages):
        raise JobError(f"`{shown}`: {killed[0]}")
    if any(usage.without_statistics for usage in job.usages):
        raise JobError(f"a process of `{shown}` {WITHOUT_STATISTICS}")
    if not figures.processes:
        raise JobError(f"no process of `{shown}` allocated memory of the device by torch")
    if ranks is not None:
        _check_ranks(ranks, job, shown)


def _check_ranks(ranks: int, job: FinishedJob, shown: str) -> None:
    used = [usage.process.rank for usage in job.usages if usage.devices]
    numbers = {rank for rank in used if rank is not None}
    missing = [str(rank) for rank in range(ranks) if rank not in numbers]
    if missing:
        without_rank = ", only a process without a rank" if None in used and not numbers else ""
        raise JobError(
            f"`{shown}` has ranks={ranks}, but no process with rank {' or '.join(missing)} used the device{without_rank}. "
            "The rank is in the variable RANK or LOCAL_RANK, or in the variable from mpirun or srun"
        )
    if len(numbers) > ranks:
        raise JobError(f"`{shown}` has ranks={ranks}, but {len(numbers)} ranks used the device")
