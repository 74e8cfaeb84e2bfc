"""Steps of small models on the CPU: measured plainly, and recorded."""

from __future__ import annotations

from typing import TYPE_CHECKING

from pytest_gpumem.measuring.explain.recording import ExpectedFigures, Recording, Subject, explain, phase, record
from pytest_gpumem.torch_support.reachability import blocks_of, reachable_tensors, storages_of

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping

    from pytest_gpumem.facts.values.composition import Explanation
    from pytest_gpumem.measuring.devices.cpu import CpuDevice
    from pytest_gpumem.measuring.explain.owners import TensorOwners
    from pytest_gpumem.measuring.explain.sites import Site, Sites
    from pytest_gpumem.measuring.explain.tracker import Level, Tracker

Phases = dict[str, "Callable[[], object]"]


class Recorder:
    """Measures and records steps on an open device. ``held`` is what leads to everything that a step holds."""

    def __init__(self, device: CpuDevice, sites: Sites) -> None:
        self.device = device
        self.sites = sites

    def subject(
        self,
        phases: Phases,
        held: object = (),
        register: Callable[[TensorOwners], None] | None = None,
        creation_sites: Mapping[int, Site] | None = None,
        *,
        is_compiled: bool = False,
    ) -> Subject:
        def run(tracker: Tracker) -> None:
            for name, one in phases.items():
                with phase(tracker, name):
                    one()

        here = self.device.torch_device
        return Subject(
            run,
            own=lambda: list(storages_of(reachable_tensors([held]), here)),
            own_bytes=lambda: sum(blocks_of(reachable_tensors([held]), here).values()),
            register=register or (lambda owners: owners.within(held)),
            creation_sites=creation_sites or {},
            is_compiled=is_compiled,
        )

    def measured(self, phases: Phases, held: object = ()) -> ExpectedFigures:
        """What the step needs, run as it is."""
        self.device.quiesce()
        self.device.register_existing(storages_of(reachable_tensors([held]), self.device.torch_device))
        own = sum(blocks_of(reachable_tensors([held]), self.device.torch_device).values())
        self.device.pop_peak()
        live, turnover = self.device.live(), self.device.turnover()
        for one in phases.values():
            one()
        peak = own + self.device.pop_peak().allocated - live
        return ExpectedFigures(peak, self.device.turnover() - turnover)

    def record(self, phases: Phases, held: object = (), level: Level = "calls") -> Recording:
        return record(self.device, self.sites, self.subject(phases, held), level)

    def explain(self, phases: Phases, held: object = (), warm_ups: int = 2) -> tuple[Explanation, Recording]:
        """The explanation of a step that has run before, by the peak that was measured."""
        for _ in range(warm_ups):
            for one in phases.values():
                one()
        expected = self.measured(phases, held)
        return explain(self.device, self.sites, self.subject(phases, held), expected)
