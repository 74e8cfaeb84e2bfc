"""A training loop as a measured step.

The memory figures come from the first 20 steps. Later steps are counted, explained and timed.
"""

from __future__ import annotations

from contextlib import suppress
from dataclasses import dataclass, replace
from itertools import pairwise
from typing import TYPE_CHECKING

from pytest_gpumem.base.errors import MeasuringError
from pytest_gpumem.base.units import word_form
from pytest_gpumem.measuring.explain.owners import parameters_of_optimizer
from pytest_gpumem.measuring.measure.counting import NO_COUNTS, count_step
from pytest_gpumem.measuring.measure.growth import SETTLING_STEPS, WINDOW, growth_by_device, keeps_bytes_rarely
from pytest_gpumem.measuring.measure.loop import LoopEnded
from pytest_gpumem.measuring.measure.other_processes import StepProcesses, growth_in, own_figures, process_figures
from pytest_gpumem.measuring.measure.prepared import FURTHER_STEPS, MeasuredStep, PreparedStep, with_processes
from pytest_gpumem.measuring.measure.reading import Reading, live_of_program, run_one_step
from pytest_gpumem.measuring.measure.settling import figures_of_steps, have_same_peaks
from pytest_gpumem.torch_support.garbage_collector import collect_everything, cyclic_collector_off, everything_in_sight
from pytest_gpumem.torch_support.reachability import alive
from pytest_gpumem.torch_support.static_access import named_modules, named_tensors

if TYPE_CHECKING:
    from collections.abc import Callable, Collection, Iterator, Sequence

    import torch

    from pytest_gpumem.measuring.devices.contract import Device, Window
    from pytest_gpumem.measuring.explain.owners import TensorOwners
    from pytest_gpumem.measuring.measure.reading import ByDevice
    from pytest_gpumem.measuring.measure.settling import StepFigures

STEPS = 20
"""The number of steps used for memory figures: the first step, which builds state, and enough more steps to detect growth."""
FEWEST_STEPS = 4
"""The minimum number of steps: the first step, a step that may create the optimizer's state, and two equal steps."""


@dataclass(frozen=True, slots=True, kw_only=True)
class PreparedLoop(PreparedStep):
    """A training loop after its first step. Its only phase runs the loop until the end of the next step."""

    steps: int
    """The number of steps used for memory figures, including the first step."""
    first_figures: ByDevice
    """Figures from the first step, in which the loop also builds its state."""
    run_counted: Callable[[], object]
    """Runs the loop's next step while operators are counted. Counting may run out of memory although the loop alone does
    not."""
    optimizers: Sequence[torch.optim.Optimizer]
    """All optimizers that have made a step so far."""
    other_blocks: frozenset[int]
    """Addresses of other code's tensors, which existed before the loop."""

    def measure(self) -> MeasuredStep:
        """Run the loop's next steps, and measure their memory and counts.

        Raises:
            MeasuringError: The loop ended before it ran `FEWEST_STEPS` steps.
        """
        device, processes = self.context.device, StepProcesses(self.context.end_step)
        notes: tuple[str, ...] = ()
        counted, is_over = NO_COUNTS, False
        longer: Sequence[ByDevice] = ()
        # settle() freezes all existing objects, so each later garbage collection looks only at new objects and is fast.
        collect_everything()
        device.settle()
        with cyclic_collector_off():
            seen = [processes.beside(self.first_figures), *self._steps(self.steps - 1, processes)]
            number = len(seen)
            if number < FEWEST_STEPS:
                raise MeasuringError(
                    f"the loop ended after {number} {word_form(number, 'step', 'steps')}, but a measurement needs "
                    f"{FEWEST_STEPS} or more"
                )
            if device.consensus.any(number < self.steps):
                ended = (
                    f"the loop ended after {number} of"
                    if number < self.steps
                    else "the loop of another rank ended before"
                )
                notes, is_over = (f"{ended} {self.steps} steps: nothing was counted or timed",), True
            else:
                latest = seen[-FURTHER_STEPS - 1 :]
                alike = device.consensus.all(all(have_same_peaks(*pair) for pair in pairwise(map(own_figures, latest))))
                with device.peak_ignored():
                    counted = count_step(self._run_counted, device, repeats=alike)
                if device.consensus.any(keeps_bytes_rarely(_growth_window(seen))):
                    longer = list(self._steps(WINDOW, processes))
        own = loop_figures(list(map(own_figures, seen)), list(map(own_figures, longer)))
        figures = replace(own, counted=counted)
        parameters = {id(parameter): parameter.numel() for parameter in self._parameters()}
        workload = replace(self.workload, parameters=sum(parameters.values()) or None)
        measured = MeasuredStep(figures, workload, self.work, (*notes, *figures.notes()), is_over=is_over)
        growth = growth_by_device([*_growth_window(seen), *longer])
        return with_processes(
            measured, processes, seen, lambda name, runs: process_figures(runs, growth_in(growth, name))
        )

    def time(self, step: MeasuredStep) -> MeasuredStep:
        """Return the measured ``step`` with its times, if the loop still has enough steps."""
        try:
            return PreparedStep.time(self, step)
        except LoopEnded as ended:
            return replace(step, notes=(*step.notes, f"not timed: {ended}"), is_over=True)

    def time_again(self, step: MeasuredStep) -> MeasuredStep:
        """Return the timed ``step`` with another time sample, if the loop still has enough steps."""
        try:
            # super() without arguments does not work here, because `dataclass(slots=True)` returns a different class.
            return PreparedStep.time_again(self, step)
        except LoopEnded as ended:
            return replace(step, notes=(*step.notes, f"timed once: {ended}"), is_over=True)

    def _run_counted(self) -> None:
        self.run_counted()

    def _steps(self, number: int, processes: StepProcesses) -> Iterator[ByDevice]:
        """Yield figures for ``number`` further steps, or for fewer steps if the loop ends."""
        try:
            for _ in range(number):
                yield processes.beside(
                    run_one_step(self.phases, self.context.device, self.other_bytes, older_garbage=False)
                )
        except LoopEnded:
            return

    def _register(self, owners: TensorOwners) -> None:
        import torch

        with everything_in_sight():
            modules = alive(torch.nn.Module)
        parts = {id(part) for module in modules for _, part in named_modules(module) if part is not module}
        trained = {id(parameter) for parameter in self._parameters()}
        # Module paths in explanations begin with a class name, except in the first registered model. So register the trained
        # models first.
        for module in sorted(modules, key=lambda module: not _has_any(module, trained)):
            if id(module) not in parts:
                owners.model(module)
        for optimizer in self.optimizers:
            owners.optimizer(optimizer)

    def _storages(self, device: Device | None = None) -> Iterator[torch.UntypedStorage]:
        """Yield the storages of the live tensors that were made since the loop began, because each may belong to the loop."""
        import torch

        with everything_in_sight():
            held = (alive(torch.Tensor), list(self.optimizers))
        for storage in self.context.storages(held, device):
            if storage.data_ptr() not in self.other_blocks:
                yield storage

    def _parameters(self) -> Iterator[torch.Tensor]:
        for optimizer in self.optimizers:
            yield from parameters_of_optimizer(optimizer)


def loop_figures(seen: Sequence[ByDevice], longer: Sequence[ByDevice] = ()) -> StepFigures:
    """Return a loop's figures from the figures for each step.

    The first step never counts as one of two equal steps, because the loop builds its state in this step.

    Args:
        seen: Figures for the steps whose peaks count, in order, including the first step.
        longer: Figures for further steps, which are used only for growth.
    """
    settled_at = next((n for n, pair in enumerate(pairwise(seen)) if n and have_same_peaks(*pair)), None)
    window = [*_growth_window(seen), *longer]
    return replace(figures_of_steps(seen, settled_at), growth=growth_by_device(window))


def _growth_window(seen: Sequence[ByDevice]) -> Sequence[ByDevice]:
    """Return the steps over which growth is measured: the last `WINDOW` steps, without the first steps of the loop.

    The loop's first step builds state, and the next steps may fill a cache. After the first step, `SETTLING_STEPS` steps are
    left out, or a third of the steps in a short loop.
    """
    further = seen[1:]
    return further[min(SETTLING_STEPS, len(further) // 3) :][-WINDOW:]


class FirstStep:
    """Read memory in a loop's first step, from the creation of this object to the loop's first boundary.

    Args:
        device: The loop's device.
        other_bytes: Other code's live bytes on each device (`Device.everywhere`).
    """

    def __init__(self, device: Device, other_bytes: Sequence[int]) -> None:
        device.settle()
        self._device = device
        self._reading = Reading(device, other_bytes)
        self._window: Window | None = device.open_window()

    def figures(self) -> ByDevice:
        """Return the step's figures. Call this once, when the step has ended."""
        assert self._window is not None, "the first step ends once"
        window, self._window = self._window, None
        self._device.close_window(window)
        self._reading.read_end()
        return self._reading.figures(window.everywhere, live_of_program(self._device), {})

    def forget(self) -> None:
        """Close the window if the step has not ended."""
        window, self._window = self._window, None
        if window is not None:
            with suppress(MeasuringError):
                self._device.close_window(window)


def _has_any(module: torch.nn.Module, parameters: Collection[int]) -> bool:
    return any(id(parameter) in parameters for _, _, parameter in named_tensors(module, "parameters"))
