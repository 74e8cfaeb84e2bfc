"""Where steps are measured: an open device, its windows, and whether time is taken."""

from __future__ import annotations

from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING

from pytest_gpumem.explain.creation_sites import creation_sites
from pytest_gpumem.explain.over_time import over_time_of
from pytest_gpumem.explain.places import Places
from pytest_gpumem.explain.recording import Subject, explain, explain_out_of_memory, know_nothing, phase
from pytest_gpumem.steps.counting import located
from pytest_gpumem.steps.random_numbers import random_numbers_given_back
from pytest_gpumem.steps.runner import SECONDS_BETWEEN_SAMPLES, measure_step, sample_again
from pytest_gpumem.torch_support.garbage_collector import cyclic_collector_off
from pytest_gpumem.torch_support.reachability import blocks_of, reachable_tensors, storages_of

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator, Mapping, Sequence

    import torch

    from pytest_gpumem.devices.contract import Device
    from pytest_gpumem.devices.windows import Windows
    from pytest_gpumem.explain.recording import Expected, Recorded
    from pytest_gpumem.explain.sites import Site, Sites
    from pytest_gpumem.explain.tracker import Tracker
    from pytest_gpumem.steps.counting import Counted
    from pytest_gpumem.steps.runner import Phase, StepFigures
    from pytest_gpumem.timing.time_budget import TimeBudget
    from pytest_gpumem.values.composition import Explanation
    from pytest_gpumem.values.times import Sample


@dataclass(frozen=True, slots=True)
class Start:
    """What was live before a step's model was built, and how much of that is the step's own. In bytes."""

    own: int
    live: int


@dataclass(frozen=True, slots=True)
class Explaining:
    """How steps are explained. ``keep`` is told each recording that an explanation was taken from, and
    returns a clause when it could not be kept.

    ``ran_out`` is told where memory went in a step that ran out of it; ``None`` where nobody may clear the frames of its
    error, as with a debugger that is about to show them. ``over_time`` tells whether explanations show the whole step.
    """

    sites: Sites
    keep: Callable[[Recorded], str | None]
    ran_out: Callable[[Explanation], None] | None
    over_time: bool = False


@dataclass(frozen=True, slots=True)
class MeasuringContext:
    """``time_budget`` is ``None`` where no step is timed, ``explaining`` where nothing is ever explained."""

    device: Device
    windows: Windows
    time_budget: TimeBudget | None
    explaining: Explaining | None = None

    def begin(self, held: object) -> Start:
        """Come to rest, before anything of a step is made. ``held`` is what there is of it already."""
        self.device.quiesce()
        self.device.register_existing(self.storages(held))
        blocks = blocks_of(reachable_tensors([held]), self.device.torch_device)
        return Start(sum(blocks.values()), self.device.live())

    def measure(
        self,
        phases: Sequence[Phase],
        start: Start,
        held: Callable[[], object],
        state: Callable[[], object] | None = None,
        *,
        compiled: bool = False,
    ) -> StepFigures:
        """Measure a step. ``held()`` leads to everything that it holds between steps; the rest as in `measure_step`."""
        return measure_step(
            phases,
            self.device,
            self.windows,
            own=lambda: self.storages(held()),
            own_before=start.own,
            live_before=start.live,
            time_budget=self.time_budget,
            state=state,
            compiled=compiled,
        )

    def sample_again(self, phases: Sequence[Phase], held: Callable[[], object]) -> Sample:
        """Time a step that has been measured once more; ``held`` as in `measure`."""
        assert self.time_budget is not None, "only a step that was timed is timed again"
        seconds = self.time_budget.second_look
        sample = sample_again(phases, self.device, self.windows, lambda: self.storages(held()), seconds)
        self.time_budget.look(SECONDS_BETWEEN_SAMPLES + sample.spent)
        return sample

    def born(self, found: dict[int, Site]) -> AbstractContextManager[None]:
        """Within, the lines that make tensors are entered in ``found``, by address; not where nothing is explained."""
        return nullcontext() if self.explaining is None else creation_sites(self.explaining.sites, found)

    def locate(self, phases: Sequence[Phase], counted: Counted) -> Counted:
        """Run the step once more, to tell at which lines what it was ``counted`` with is called."""
        assert self.explaining is not None, "only asked for where something is explained"
        self.windows.border()
        places = Places(self.explaining.sites, self.device.torch_device)
        with cyclic_collector_off(), random_numbers_given_back(self.device):
            counted = located(lambda: [phase.run() for phase in phases], self.device, counted, places)
        self.device.pop_peak()
        return counted

    def explain(self, subject: Subject, expected: Expected) -> Explanation:
        """Run the step once more, recorded, and tell what its peak is made of, which was measured as ``expected``."""
        assert self.explaining is not None, "only asked for where something is explained"
        with cyclic_collector_off(), random_numbers_given_back(self.device):
            explanation, recorded = explain(self.device, self.explaining.sites, subject, expected)
        return self._kept(explanation, recorded)

    def explain_out_of_memory(self, subject: Subject) -> None:
        """Run the step that ran out of memory once more, recorded, and tell where it went if it runs out again."""
        assert self.explaining is not None, "only asked for where something is explained"
        with cyclic_collector_off(), random_numbers_given_back(self.device):
            told = explain_out_of_memory(self.device, self.explaining.sites, subject)
        if told is not None and self.explaining.ran_out is not None:
            self.explaining.ran_out(self._kept(*told))

    def _kept(self, explanation: Explanation, recorded: Recorded) -> Explanation:
        assert self.explaining is not None, "only asked for where something is explained"
        if self.explaining.over_time:
            explanation = replace(explanation, over_time=over_time_of(recorded).thinned())
        trouble = self.explaining.keep(recorded)
        if trouble is None:
            return explanation
        return replace(explanation, peak=replace(explanation.peak, notes=(*explanation.peak.notes, trouble)))

    def subject(
        self,
        phases: Sequence[Phase],
        start: Start,
        held: Callable[[], object],
        *,
        know: Callable[[Tracker], None] = know_nothing,
        births_of: Mapping[int, Site] | None = None,
        compiled: bool = False,
    ) -> Subject:
        """What is to be recorded of a step; ``held`` as in `measure`, the rest as in `Subject`."""

        def run(tracker: Tracker) -> None:
            for one in phases:
                with phase(tracker, one.name):
                    one.run()

        return Subject(
            run,
            own=lambda: list(self.storages(held())),
            own_bytes=lambda: start.own + self.device.live() - start.live,
            know=know,
            creation_sites=births_of or {},
            compiled=compiled,
        )

    def storages(self, held: object) -> Iterator[torch.UntypedStorage]:
        """The storages on the device that can be reached from ``held``."""
        return storages_of(reachable_tensors([held]), self.device.torch_device)
