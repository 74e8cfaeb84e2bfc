"""The context in which steps are measured and explained: the device, and what is kept of what runs there."""

from __future__ import annotations

from contextlib import contextmanager, nullcontext
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING

from pytest_gpumem.explain.call_sites import creation_sites
from pytest_gpumem.explain.over_time import over_time_of
from pytest_gpumem.explain.recording import explain, explain_out_of_memory
from pytest_gpumem.measure.random_numbers import random_numbers_given_back
from pytest_gpumem.torch_support.garbage_collector import cyclic_collector_off
from pytest_gpumem.torch_support.reachability import blocks_of, reachable_tensors, storages_of
from pytest_gpumem.torch_support.tracebacks import RAISED_BY_A_STEP
from pytest_gpumem.values.composition import NOT_EXPLAINED

if TYPE_CHECKING:
    from collections.abc import Iterator

    import torch

    from pytest_gpumem.devices.contract import Device
    from pytest_gpumem.explain.artifacts import Artifacts
    from pytest_gpumem.explain.recording import Expected, Recorded, Subject
    from pytest_gpumem.explain.sites import Site, Sites
    from pytest_gpumem.timing.sampling import TimeBudget
    from pytest_gpumem.values.composition import Explanation


@dataclass(frozen=True, slots=True)
class MeasuringContext:
    """The context in which steps are measured and explained.

    ``time_budget`` is ``None`` where no step is timed, ``sites`` where none is explained. ``artifacts`` keep the recordings
    that explanations are taken from. With ``over_time`` an explanation shows the whole step. With ``peak_only`` a step
    is measured until its peak repeats, and neither its growth nor its counts.
    """

    device: Device
    time_budget: TimeBudget | None
    sites: Sites | None = None
    artifacts: Artifacts | None = None
    over_time: bool = False
    peak_only: bool = False

    def begin(self, held: object) -> tuple[int, ...]:
        """Bring memory to rest before anything of a step is made, and return the bytes that are live and not the step's own.

        Args:
            held: What there is of the step already.

        Returns:
            The bytes on each of `Device.everywhere`.
        """
        self.device.consensus.release()
        self.device.quiesce()
        self.device.register_existing(self.storages(held))
        if self.device.consensus.several:
            self.device.hold_known()
        tensors = list(reachable_tensors([held]))
        return tuple(one.live() - sum(blocks_of(tensors, one.torch_device).values()) for one in self.device.everywhere)

    def storages(self, held: object, device: Device | None = None) -> Iterator[torch.UntypedStorage]:
        """Return the storages on a device, by default that of the context, that can be reached from ``held``."""
        return storages_of(reachable_tensors([held]), (device or self.device).torch_device)

    @contextmanager
    def creation_sites(self) -> Iterator[dict[int, Site]]:
        """Yield the lines that make tensors within the context, by address; none where nothing is explained."""
        found: dict[int, Site] = {}
        with nullcontext() if self.sites is None else creation_sites(self.sites, found):
            yield found

    def named(self, name: str | None) -> Device:
        """Return the one of `Device.everywhere` that is called ``name``; the first where none is."""
        return next((one for one in self.device.everywhere if str(one.torch_device) == name), self.device)

    def explain(self, subject: Subject, expected: Expected, device: Device) -> Explanation | str:
        """Run ``subject`` once more, recorded, and return what its peak is made of.

        Args:
            subject: A step or call that was measured.
            expected: What was measured of it.
            device: The one of `Device.everywhere` whose peak it is.

        Returns:
            The explanation, or a clause that says why there is none: what goes wrong this time is no failure of the step.
        """
        assert self.sites is not None, "only called where something is explained"
        try:
            # No window of the others sees the recorded run, either.
            unseen = nullcontext() if device is self.device else self.device.unrecorded()
            with cyclic_collector_off(), random_numbers_given_back(self.device), unseen:
                explanation, recorded = explain(device, self.sites, subject, expected)
            return self._kept(explanation, recorded, device)
        except RAISED_BY_A_STEP as error:
            return f"{NOT_EXPLAINED}: " + f"{type(error).__name__}: {error}".partition("\n")[0]

    def explain_out_of_memory(self, subject: Subject, device: Device) -> Explanation | None:
        """Run what ran out of memory once more, recorded; return where memory went if it runs out again.

        ``device`` is the one of `Device.everywhere` that ran out of it.
        """
        assert self.sites is not None, "only called where something is explained"
        with cyclic_collector_off(), random_numbers_given_back(self.device):
            found = explain_out_of_memory(device, self.sites, subject)
        return None if found is None else self._kept(*found, device)

    def _kept(self, explanation: Explanation, recorded: Recorded, device: Device) -> Explanation:
        """Keep the recording, and return its explanation, with a note on failure.

        With the whole step if ``over_time``, and with the name of its GPU where the process sees several.
        """
        if self.device.others:
            explanation = replace(explanation, gpu=str(device.torch_device))
        if self.over_time:
            explanation = replace(explanation, over_time=over_time_of(recorded).thinned())
        trouble = None if self.artifacts is None else self.artifacts.keep(recorded)
        if trouble is None:
            return explanation
        return replace(explanation, peak=replace(explanation.peak, notes=(*explanation.peak.notes, trouble)))
