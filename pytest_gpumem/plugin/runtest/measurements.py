"""Make a test's measurements from figures, and give each a distinct name."""

from __future__ import annotations

import itertools
from dataclasses import dataclass, field, replace
from typing import TYPE_CHECKING, Any

from pytest_gpumem.facts.measurement import Measurement, Workload
from pytest_gpumem.facts.values.rank import name_on, rank_in, without_rank
from pytest_gpumem.measuring.jobs.figures import ALL
from pytest_gpumem.measuring.measure.reading import largest_of, notes_on_missing
from pytest_gpumem.plugin.runtest.time_policy import NOT_TIMED

if TYPE_CHECKING:
    from collections.abc import Callable, Collection, Mapping, Sequence

    from pytest_gpumem.facts.measurement import Environment
    from pytest_gpumem.facts.values.option_words import Routing
    from pytest_gpumem.facts.values.rank import Rank
    from pytest_gpumem.facts.values.unknown_reads import UnknownReads
    from pytest_gpumem.measuring.jobs.figures import JobFigures, ProcessFigures
    from pytest_gpumem.measuring.measure.context import MeasuringContext
    from pytest_gpumem.measuring.measure.prepared import MeasuredStep
    from pytest_gpumem.measuring.measure.reading import ByDevice
    from pytest_gpumem.plugin.config.settings import Settings
    from pytest_gpumem.plugin.runtest.judging import JudgedMeasurement


@dataclass(eq=False, repr=False)
class Measurements:
    """A running test's measurements.

    Example:
        A test calls ``gpumem.train_step`` twice without a name. `of_step` calls the first measurement ``train_step`` and the
        second ``train_step-2``.
    """

    settings: Settings
    context: MeasuringContext
    environment: Environment
    rank: Rank | None
    """This process's rank; ``None`` without ranks."""
    reads: Callable[[], UnknownReads] | None = None
    """Returns the uncomputed values read so far by the test and its fixtures; ``None`` if all values are computed."""
    judged: list[JudgedMeasurement] = field(default_factory=list)
    """The test's measurements so far, each with its verdict."""

    def of_figures(self, workload: Workload, figures: ByDevice, name: str | None = None) -> Measurement:
        """Return the measurement for a single run: a call, a region or a ``load``."""
        metrics = {device: memory.memory_metrics() for device, memory in figures.items()}
        return self._new(
            workload,
            largest_of(metrics.values()),
            name,
            workspaces=max(memory.workspaces for memory in figures.values()),
            unused_before=max(memory.unused_before for memory in figures.values()),
            by_device=_used(metrics) if self.context.device.others else {},
            notes=notes_on_missing(figures.values()),
        )

    def of_job(self, workload: Workload, figures: JobFigures | ProcessFigures, name: str | None) -> Measurement:
        """Return the measurement for a job or for one of its processes."""
        imbalance = {} if figures.imbalance is None else {"imbalance": figures.imbalance}
        return self._new(
            workload,
            {**largest_of(figures.by_gpu.values()), **imbalance},
            name,
            figures.notes,
            gained_before=figures.gained_before,
            process=figures.details,
            by_device=figures.by_gpu if len(figures.by_gpu) > 1 else {},
            simultaneous=figures.simultaneous,
        )

    def of_step(self, step: MeasuredStep, name: str | None) -> Measurement:
        """Return the measurement for a step.

        If only other processes used memory, it has the figures for all processes, and the step's times.
        """
        notes = [NOT_TIMED] if step.is_own and self._leaves_times_out else []
        if step.is_elsewhere:
            step, name = step.of_all_processes(), f"{name}: {ALL}"
        figures, devices, metrics = step.figures, step.figures.devices, step.metrics()
        by_device: Mapping[str, Mapping[str, int]] = {}
        if self.context.device.others if step.is_own else len(devices) > 1:
            by_device = {device: on_device.metrics() for device, on_device in devices.items()}
        if step.is_own:
            by_device = _used(by_device)
        else:
            by_device = {
                device: {metric: value for metric, value in values.items() if metric in metrics}
                for device, values in by_device.items()
            }
        return self._new(
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
        return self.context.time_budget is None and self.settings.time is None and self.context.device.tells_time

    def _new(
        self, workload: Workload, metrics: Mapping[str, float], name: str | None, notes: Sequence[str] = (), **more: Any
    ) -> Measurement:
        """Return a new measurement.

        If ``name`` is ``None``, the step's name is used: ``train_step`` for the first measurement, ``train_step-2`` for the
        second.

        Raises:
            ValueError: The test already has a measurement with this name, or the store uses such a name for a rank or for
                one of several GPUs.
        """
        taken = self._taken_names()
        if name in taken:
            raise ValueError(
                f"this test already has a measurement called {name!r}, and every measurement needs its own baseline; give it "
                "another name"
            )
        if name is not None and rank_in(name) is not None:
            raise ValueError(
                f"the store uses the name {name!r} for the measurement {without_rank(name)!r} of a rank; give it another name"
            )
        name = name or self.free_name(workload)
        self._check_parts({*taken, name})
        environment = self.environment
        environment = replace(environment, details={**environment.details, **self.context.device.libraries()})
        name = name if self.rank is None else name_on(self.rank, name)
        if self.reads is not None:
            reads = self.reads()
            workload = _under_routing(workload, self.settings.routing, reads)
            notes = (*notes, *reads.notes())
        return Measurement(name, workload, environment, metrics, notes=tuple(notes), **more)

    def free_name(self, workload: Workload) -> str:
        """Return the name for a measurement if the test gave none."""
        taken = self._taken_names()
        # If only other processes used a GPU, a region has no measurement, and theirs begin with its name.
        return _numbered(workload.step, taken | {name.partition(": ")[0] for name in taken})

    def _taken_names(self) -> set[str]:
        """Return the names of the test's measurements so far, without ranks."""
        names = {judged.measurement.name for judged in self.judged}
        return names if self.rank is None else {without_rank(name) for name in names}

    def _check_parts(self, names: Collection[str]) -> None:
        """Raise ``ValueError`` if the store already uses one of the ``names`` for another measurement on a single GPU.

        For example, the store has the figures of ``"step"`` on the second GPU under the name ``"step on cuda:1"``.
        """
        device = self.context.device
        parts = {f"{name} on {gpu.torch_device}" for name in names for gpu in device.everywhere}
        for name in parts.intersection(names) if device.others else ():
            raise ValueError(
                f"the store uses the name {name!r} for a measurement's figures on a single GPU; give it another name"
            )


def _used(metrics: Mapping[str, Mapping[str, int]]) -> dict[str, Mapping[str, int]]:
    """Return the metrics for each device on which the step used memory."""
    return {device: values for device, values in metrics.items() if values["peak_allocated"] > 0}


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
