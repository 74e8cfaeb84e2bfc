"""Where steps are measured: an open device, its windows, whether time is taken, and how they are explained."""

from __future__ import annotations

from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING

from pytest_gpumem.explain.creation_sites import creation_sites
from pytest_gpumem.explain.over_time import over_time_of
from pytest_gpumem.explain.recording import explain, explain_out_of_memory, not_explained_note
from pytest_gpumem.steps.random_numbers import random_numbers_given_back
from pytest_gpumem.torch_support.garbage_collector import cyclic_collector_off
from pytest_gpumem.torch_support.reachability import blocks_of, reachable_tensors, storages_of
from pytest_gpumem.torch_support.tracebacks import RAISED_BY_A_STEP

if TYPE_CHECKING:
    from collections.abc import Iterator

    import torch

    from pytest_gpumem.devices.contract import Device
    from pytest_gpumem.devices.windows import Windows
    from pytest_gpumem.explain.artifacts import Artifacts
    from pytest_gpumem.explain.recording import Expected, Recorded, Subject
    from pytest_gpumem.explain.sites import Site, Sites
    from pytest_gpumem.timing.time_budget import TimeBudget
    from pytest_gpumem.values.composition import Explanation


@dataclass(frozen=True, slots=True)
class Start:
    """What was live before a step's model was built, and how much of that is the step's own. In bytes."""

    own: int
    live: int


@dataclass(frozen=True, slots=True)
class Explaining:
    """How steps are explained. ``artifacts`` keep each recording that an explanation was taken from.

    ``over_time`` tells whether explanations show the whole step.
    """

    sites: Sites
    artifacts: Artifacts
    over_time: bool = False

    def kept(self, explanation: Explanation, recorded: Recorded) -> Explanation:
        """Keep the recording, and return its explanation with what is to be told of it."""
        if self.over_time:
            explanation = replace(explanation, over_time=over_time_of(recorded).thinned())
        trouble = self.artifacts.keep(recorded)
        if trouble is None:
            return explanation
        return replace(explanation, peak=replace(explanation.peak, notes=(*explanation.peak.notes, trouble)))


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

    def storages(self, held: object) -> Iterator[torch.UntypedStorage]:
        """The storages on the device that can be reached from ``held``."""
        return storages_of(reachable_tensors([held]), self.device.torch_device)

    def born(self, found: dict[int, Site]) -> AbstractContextManager[None]:
        """Within, the lines that make tensors are entered in ``found``, by address; not where nothing is explained."""
        return nullcontext() if self.explaining is None else creation_sites(self.explaining.sites, found)

    def explain(self, subject: Subject, expected: Expected) -> Explanation | str:
        """Run ``subject`` once more, recorded, and tell what its peak is made of, which was measured as ``expected``.

        A clause says why there is no explanation: what goes wrong this time is no failure of what was measured.
        """
        assert self.explaining is not None, "only asked for where something is explained"
        try:
            with cyclic_collector_off(), random_numbers_given_back(self.device):
                explanation, recorded = explain(self.device, self.explaining.sites, subject, expected)
            return self.explaining.kept(explanation, recorded)
        except RAISED_BY_A_STEP as error:
            return not_explained_note(error)

    def explain_out_of_memory(self, subject: Subject) -> Explanation | None:
        """Run what ran out of memory once more, recorded, and tell where it went if it runs out again."""
        assert self.explaining is not None, "only asked for where something is explained"
        with cyclic_collector_off(), random_numbers_given_back(self.device):
            told = explain_out_of_memory(self.device, self.explaining.sites, subject)
        return None if told is None else self.explaining.kept(*told)
