"""Figures of other processes in the runs of a step, for example of a server that the step asks.

Each run of a step is a part of a window of other processes. A process's figures on a GPU have the same form as those of the
test's own process, so the same functions find its settled peak and its growth.

Example:
    A step asks ``serve.py``, which keeps 3 MB for each request, and starts ``job.py``, which ends. `StepProcesses.beside` adds
    these figures to those of ``cuda:0`` in each run of the step::

        run                                1    2    3
        peak on cuda:0 in serve.py        53   56   59 MB
        peak on cuda:0 in job.py           8    8    8 MB
        peak on cuda:0 in all processes   61   64   67 MB
"""

from __future__ import annotations

from itertools import pairwise
from typing import TYPE_CHECKING, NamedTuple

from pytest_gpumem.measuring.devices.contract import Peak
from pytest_gpumem.measuring.jobs.figures import ALL, Live
from pytest_gpumem.measuring.measure.reading import Figures
from pytest_gpumem.measuring.measure.settling import StepFigures, figures_of_steps, have_same_peaks

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping, Sequence

    from pytest_gpumem.facts.values.process import ProcessDetails
    from pytest_gpumem.measuring.jobs.figures import JobFigures, Names, ProcessFigures
    from pytest_gpumem.measuring.measure.reading import ByDevice

    EndStep = Callable[[ByDevice, Names | None], JobFigures | None]
    """Ends a step, and returns the figures of all processes in it; ``None`` if there are no other processes.

    The arguments are the own process's figures, and the names of processes in the step before."""

_IN = " in "


class Remarks(NamedTuple):
    """Facts about a process, or about all processes together, besides the figures in each run of a step."""

    notes: tuple[str, ...] = ()
    gained_before: int = 0
    """`Measurement.gained_before`"""
    imbalance: float | None = None
    simultaneous: Mapping[str, int] = {}
    """`Measurement.simultaneous`"""
    details: ProcessDetails | None = None
    """`Measurement.process`"""
    pids: tuple[int, ...] = ()


class StepProcesses:
    """The other processes in the runs of a step.

    Args:
        end_step: Ends a run; ``None`` to leave other processes alone.
    """

    def __init__(self, end_step: EndStep | None) -> None:
        self._end_step = end_step
        self._jobs: list[JobFigures] = []

    def beside(self, own: ByDevice) -> ByDevice:
        """End a run of the step, and add the figures of other processes to those of the test's own process.

        Raises:
            MeasuringError: The memory of a process is not known.
        """
        if self._end_step is None:
            return own
        job = self._end_step(own, self._jobs[-1].names if self._jobs else None)
        if job is None or not job.processes:
            return own
        self._jobs.append(job)
        return beside_processes(own, job)

    def remarks(self, process: str, measured: StepFigures) -> Remarks:
        """Return the remarks on a process.

        Remarks on all processes are about the runs whose peaks count. Later runs, which only show growth, may hold more.

        Args:
            process: The name of a process, or `ALL`.
            measured: The figures of this process.
        """
        if process == ALL:
            jobs = self._jobs[: len(measured.runs)]
            highest = max(jobs[measured.left_out :], key=_highest_peak)
            return Remarks(highest.notes, jobs[0].gained_before, highest.imbalance, _simultaneous(jobs))
        figures = [each for job in self._jobs for each in job.processes if each.name == process]
        notes = dict.fromkeys(note for each in figures for note in each.notes)
        return Remarks(
            tuple(notes),
            figures[0].gained_before,
            details=figures[-1].details,
            pids=tuple(each.pid for each in figures),
        )


def _highest_peak(job: JobFigures) -> int:
    return max(metrics["peak_allocated"] for metrics in job.by_gpu.values())


def _simultaneous(jobs: Sequence[JobFigures]) -> dict[str, int]:
    """Return the most bytes that several processes held at the same time in any run, by GPU.

    In a run with a single process on a GPU, its peak counts. A GPU is left out if a run's bytes are not known.
    """
    held = [
        {**{gpu: metrics["peak_allocated"] for gpu, metrics in job.by_gpu.items()}, **job.simultaneous} for job in jobs
    ]
    gpus = sorted({gpu for job in jobs for gpu in job.simultaneous}.difference(*(job.unknown for job in jobs)))
    return {gpu: max(job.get(gpu, 0) for job in held) for gpu in gpus}


def beside_processes(own: ByDevice, job: JobFigures) -> ByDevice:
    """Return the figures of the test's own process, of each other process, and of all of them, in a run of a step.

    Args:
        own: The own process's figures.
        job: The figures of all processes in the same run.
    """
    figures = dict(own)
    for process in job.processes:
        for gpu in process.by_gpu:
            figures[_place(gpu, process.name)] = _figures_of(process, gpu)
    for gpu, metrics in job.by_gpu.items():
        live = [process.live[gpu] for process in job.processes if gpu in process.live]
        if gpu in own:
            on_gpu = own[gpu]
            before, after = on_gpu.live_before - on_gpu.other_bytes, on_gpu.live_after - on_gpu.other_bytes
            live.append(Live(before, after, on_gpu.turnover))
        figures[_place(gpu, ALL)] = _figures(
            Peak(metrics["peak_allocated"]),
            Live(
                sum(part.before for part in live),
                sum(part.after for part in live),
                sum(part.allocations for part in live),
            ),
        )
    return figures


def own_figures(run: ByDevice) -> ByDevice:
    """Return the figures of the test's own process."""
    return {place: figures for place, figures in run.items() if _IN not in place}


def figures_in(run: ByDevice, process: str) -> ByDevice:
    """Return a process's figures in a run of a step, by GPU. They are empty if the process was not there."""
    return {place.partition(_IN)[0]: figures for place, figures in run.items() if place.partition(_IN)[2] == process}


def growth_in(growth: Mapping[str, int], process: str = "") -> dict[str, int]:
    """Return the growth per step in a process, by GPU. By default, this is the test's own process."""
    return {place.partition(_IN)[0]: nbytes for place, nbytes in growth.items() if place.partition(_IN)[2] == process}


def names_in(runs: Sequence[ByDevice]) -> list[str]:
    """Return the names of the processes in a step's runs. `ALL` is the last."""
    names = dict.fromkeys(place.partition(_IN)[2] for run in runs for place in run if _IN in place)
    return [*(name for name in names if name != ALL), *(name for name in names if name == ALL)]


def process_figures(runs: Sequence[ByDevice], growth: Mapping[str, int]) -> StepFigures:
    """Return a process's figures over the runs of a step in which it was there.

    Args:
        runs: The process's figures on each GPU, for each run.
        growth: The bytes that the process keeps in each further run, by GPU.
    """
    if len(runs) == 1:
        return StepFigures(tuple(runs), 0, is_settled=True, growth=growth)
    settled_at = next((number for number, pair in enumerate(pairwise(runs)) if have_same_peaks(*pair)), None)
    figures = figures_of_steps(runs, settled_at)
    return StepFigures(figures.runs, figures.left_out, figures.is_settled, growth)


def _place(gpu: str, process: str) -> str:
    return f"{gpu}{_IN}{process}"


def _figures_of(process: ProcessFigures, gpu: str) -> Figures:
    metrics, live = process.by_gpu[gpu], process.live[gpu]
    if live.is_new:  # its start is no growth of this process, but of all processes together
        live = live._replace(before=live.after)
    return _figures(Peak(metrics["peak_allocated"], metrics.get("peak_reserved")), live)


def _figures(peak: Peak, live: Live) -> Figures:
    return Figures(
        other_bytes=0,
        live_before=live.before,
        reserved_before=None if peak.reserved is None else 0,
        peak=peak,
        live_run=None,
        live_after=live.after,
        turnover=live.allocations,
    )
