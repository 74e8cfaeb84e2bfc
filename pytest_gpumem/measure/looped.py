"""A loop that owns its steps: the memory of so many of them in a row, then counts, an explanation and times of others."""

from __future__ import annotations

from contextlib import suppress
from dataclasses import dataclass, replace
from itertools import pairwise
from typing import TYPE_CHECKING

from pytest_gpumem.explain.owners import parameters_of_optimizer
from pytest_gpumem.measure.counting import NOTHING_COUNTED, count_step
from pytest_gpumem.measure.growth import SETTLING_STEPS, WINDOW, growth_by_device, keeps_now_and_then
from pytest_gpumem.measure.loop import LoopEnded
from pytest_gpumem.measure.prepared import MeasuredStep, PreparedStep
from pytest_gpumem.measure.reading import Reading, live_of_program, run_one_step
from pytest_gpumem.measure.runner import FURTHER_STEPS
from pytest_gpumem.measure.settling import figures_of_steps, have_same_peaks
from pytest_gpumem.measurement import MeasuringError
from pytest_gpumem.torch_support.garbage_collector import collect_everything, cyclic_collector_off, everything_in_sight
from pytest_gpumem.torch_support.reachability import alive
from pytest_gpumem.torch_support.static_access import named_modules, named_tensors
from pytest_gpumem.units import agreeing

if TYPE_CHECKING:
    from collections.abc import Callable, Collection, Iterator, Sequence

    import torch

    from pytest_gpumem.devices.contract import Device, Window
    from pytest_gpumem.explain.owners import TensorOwners
    from pytest_gpumem.measure.reading import ByDevice
    from pytest_gpumem.measure.settling import StepFigures

STEPS = 20
"""Steps that a loop's memory is read from: the first, in which it builds what it needs, and enough to tell growth."""
FEWEST_STEPS = 4
"""The first, one that may make the optimizer's state, and two that can be alike."""


@dataclass(frozen=True, slots=True, kw_only=True)
class PreparedLoop(PreparedStep):
    """A loop that waits at the end of its first step. Its only phase runs it until the next boundary."""

    steps: int
    """The number of steps that its memory is read from, with the first."""
    first: ByDevice
    """Figures of the first step, in which it also makes what it needs."""
    run_counted: Callable[[], object]
    """Runs it until the next boundary, for counting, by which alone it may run out of memory."""
    optimizers: Sequence[torch.optim.Optimizer]
    """The optimizers that have stepped so far."""
    blocks_not_own: frozenset[int]
    """Addresses of tensors that were there before, and are not the test's."""

    def measure(self) -> MeasuredStep:
        """Run the loop's next steps, and measure their memory and counts.

        Raises:
            MeasuringError: It ended before there were `FEWEST_STEPS`.
        """
        device = self.context.device
        notes: tuple[str, ...] = ()
        counted, is_over = NOTHING_COUNTED, False
        longer: Sequence[ByDevice] = ()
        # And freeze what the loop has made for all its steps, so that collecting after each of them is fast.
        collect_everything()
        device.settle()
        with cyclic_collector_off():
            seen = [self.first, *self._steps(self.steps - 1)]
            made = len(seen)
            if made < FEWEST_STEPS:
                raise MeasuringError(
                    f"the loop ended after {made} {agreeing(made, 'step', 'steps')}; its memory is read from {FEWEST_STEPS} at "
                    "least"
                )
            if device.consensus.any(made < self.steps):
                ended = (
                    f"the loop ended after {made} of" if made < self.steps else "the loop of another rank ended before"
                )
                notes, is_over = (f"{ended} {self.steps} steps: nothing was counted or timed",), True
            else:
                latest = seen[-FURTHER_STEPS - 1 :]
                alike = device.consensus.all(all(have_same_peaks(*pair) for pair in pairwise(latest)))
                with device.peak_ignored():
                    counted = count_step(self._run_counted, device, alike=alike)
                if device.consensus.any(keeps_now_and_then(_growth_window(seen))):
                    longer = list(self._steps(WINDOW))
        figures = replace(loop_figures(seen, longer), counted=counted)
        parameters = {id(parameter): parameter.numel() for parameter in self._parameters()}
        workload = replace(self.workload, parameters=sum(parameters.values()) or None)
        return MeasuredStep(figures, workload, self.work, (*notes, *figures.notes()), is_over=is_over)

    def time(self, step: MeasuredStep) -> MeasuredStep:
        """Return ``step``, which was measured, with its times, if the loop has steps for these."""
        try:
            return PreparedStep.time(self, step)
        except LoopEnded as ended:
            return replace(step, notes=(*step.notes, f"not timed: {ended}"), is_over=True)

    def time_again(self, step: MeasuredStep) -> MeasuredStep:
        """Return ``step``, which was measured and timed, with one more sample of its time, if the loop has steps for it."""
        try:
            # Without zero-argument super(): the class that slots make is another one.
            return PreparedStep.time_again(self, step)
        except LoopEnded as ended:
            return replace(step, notes=(*step.notes, f"timed once: {ended}"), is_over=True)

    def _run_counted(self) -> None:
        self.run_counted()

    def _steps(self, number: int) -> Iterator[ByDevice]:
        """Yield the figures of so many further steps, or of those that there are before the loop ends."""
        try:
            for _ in range(number):
                yield run_one_step(self.phases, self.context.device, self.not_own, older_garbage=False)
        except LoopEnded:
            return

    def _register(self, owners: TensorOwners) -> None:
        import torch

        with everything_in_sight():
            modules = alive(torch.nn.Module)
        parts = {id(part) for module in modules for _, part in named_modules(module) if part is not module}
        trained = {id(parameter) for parameter in self._parameters()}
        # Paths of other classes' modules begin with the class: of those that are not trained, if there are both.
        for module in sorted(modules, key=lambda module: not _has_any(module, trained)):
            if id(module) not in parts:
                owners.model(module)
        for optimizer in self.optimizers:
            owners.optimizer(optimizer)

    def _storages(self, device: Device | None = None) -> Iterator[torch.UntypedStorage]:
        """Yield the storages of all tensors that the loop may hold: those in sight but those that were there before."""
        import torch

        with everything_in_sight():
            held = (alive(torch.Tensor), list(self.optimizers))
        for storage in self.context.storages(held, device):
            if storage.data_ptr() not in self.blocks_not_own:
                yield storage

    def _parameters(self) -> Iterator[torch.Tensor]:
        for optimizer in self.optimizers:
            yield from parameters_of_optimizer(optimizer)


def loop_figures(seen: Sequence[ByDevice], longer: Sequence[ByDevice] = ()) -> StepFigures:
    """Return the figures of a loop, from those of its steps in order.

    The first one never repeats, as a loop makes in it what it needs.

    Args:
        seen: The steps that its peaks are of, with the first.
        longer: Further steps that its growth is of, too.
    """
    settled_at = next((n for n, pair in enumerate(pairwise(seen)) if n and have_same_peaks(*pair)), None)
    window = [*_growth_window(seen), *longer]
    return replace(figures_of_steps(seen, settled_at), growth=growth_by_device(window))


def _growth_window(seen: Sequence[ByDevice]) -> Sequence[ByDevice]:
    """Return the steps that growth is of: what fills a cache may do so in the first, of which a short loop has fewer."""
    further = seen[1:]
    return further[min(SETTLING_STEPS, len(further) // 3) :][-WINDOW:]


class FirstStep:
    """Reads the first step of a loop on a device, from its making to the loop's first boundary.

    ``not_own`` bytes are live that are not the loop's, on each of `Device.everywhere`.
    """

    def __init__(self, device: Device, not_own: Sequence[int]) -> None:
        device.settle()
        self._device = device
        self._reading = Reading(device, not_own)
        self._window: Window | None = device.open_window()

    def ended(self) -> ByDevice:
        """Return the figures of the step, which has ended."""
        assert self._window is not None, "the first step ends once"
        window, self._window = self._window, None
        self._device.close_window(window)
        self._reading.ended()
        return self._reading.figures(window.everywhere, live_of_program(self._device), {})

    def forget(self) -> None:
        """Read no further, if the step has not ended."""
        window, self._window = self._window, None
        if window is not None:
            with suppress(MeasuringError):
                self._device.close_window(window)


def _has_any(module: torch.nn.Module, parameters: Collection[int]) -> bool:
    return any(id(parameter) in parameters for _, _, parameter in named_tensors(module, "parameters"))
