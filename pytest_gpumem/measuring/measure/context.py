"""The context in which steps are measured and explained: the device, the time budget, and the files for recordings."""

from __future__ import annotations

from contextlib import contextmanager, nullcontext
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING

from pytest_gpumem.facts.values.composition import NOT_EXPLAINED
from pytest_gpumem.measuring.explain.call_sites import creation_sites
from pytest_gpumem.measuring.explain.over_time import over_time_of
from pytest_gpumem.measuring.explain.recording import explain, explain_out_of_memory
from pytest_gpumem.measuring.measure.random_numbers import restored_random_numbers
from pytest_gpumem.torch_support.garbage_collector import cyclic_collector_off
from pytest_gpumem.torch_support.reachability import blocks_of, reachable_tensors, storages_of
from pytest_gpumem.torch_support.tracebacks import RAISED_BY_A_STEP

if TYPE_CHECKING:
    from collections.abc import Iterator

    import torch

    from pytest_gpumem.facts.values.composition import Explanation
    from pytest_gpumem.measuring.devices.contract import Device
    from pytest_gpumem.measuring.explain.artifacts import Artifacts
    from pytest_gpumem.measuring.explain.recording import ExpectedFigures, Recording, Subject
    from pytest_gpumem.measuring.explain.sites import Site, Sites
    from pytest_gpumem.measuring.measure.other_processes import EndStep
    from pytest_gpumem.measuring.timing.sampling import TimeBudget


@dataclass(frozen=True, slots=True)
class MeasuringContext:
    """The context in which steps are measured and explained.

    ``time_budget`` is ``None`` if no step is timed. ``sites`` finds source lines, and is ``None`` if no step is explained.
    ``artifacts`` writes recordings to files. With ``over_time``, an explanation shows memory over the whole step. With
    ``peak_only``, a step runs only until its peak repeats, and neither growth nor counts are measured.
    """

    device: Device
    time_budget: TimeBudget | None
    sites: Sites | None = None
    artifacts: Artifacts | None = None
    over_time: bool = False
    peak_only: bool = False
    end_step: EndStep | None = None
    """Ends a run of a step for other processes; ``None`` to leave them alone."""

    def bytes_of_other_code(self, held: object) -> tuple[int, ...]:
        """Collect garbage and empty caches before a step is prepared, and return the live bytes of other code.

        Args:
            held: The step's existing objects, for example the model and the batch. Their tensors do not belong to other code.

        Returns:
            The bytes on each device (`Device.everywhere`).
        """
        self.device.consensus.release()
        self.device.quiesce()
        tensors = list(reachable_tensors([held]))
        self.device.register_existing(storages_of(tensors, self.device.torch_device))
        if self.device.consensus.several:
            self.device.hold_known()
        return tuple(
            each_device.live() - sum(blocks_of(tensors, each_device.torch_device).values())
            for each_device in self.device.everywhere
        )

    def storages(self, held: object, device: Device | None = None) -> Iterator[torch.UntypedStorage]:
        """Return the storages on ``device`` that are reachable from ``held``. By default, use the context's own device."""
        return storages_of(reachable_tensors([held]), (device or self.device).torch_device)

    @contextmanager
    def creation_sites(self, *, creates: bool = True) -> Iterator[dict[int, Site]]:
        """Yield a dict with the line that created each tensor within the context, by the tensor's address.

        Without ``sites``, the dict stays empty.

        Args:
            creates: False if the code in the context creates no tensor, so there is nothing to record.
        """
        by_address: dict[int, Site] = {}
        with creation_sites(self.sites, by_address) if creates and self.sites is not None else nullcontext():
            yield by_address

    def device_named(self, name: str | None) -> Device:
        """Return the device named ``name`` from `Device.everywhere`, or the context's device if no device has this name."""
        return next((device for device in self.device.everywhere if str(device.torch_device) == name), self.device)

    def explain(self, subject: Subject, expected: ExpectedFigures, device: Device) -> Explanation | str:
        """Run the step or call again, record its allocations, and explain its peak.

        Args:
            subject: A measured step or call.
            expected: The measured figures.
            device: The device with the peak, from `Device.everywhere`.

        Returns:
            The explanation, or a clause with the reason why there is none. An exception in the recorded run does not fail the
            test.
        """
        assert self.sites is not None, "only called if steps are explained"
        try:
            # If another device is recorded, the context's device must not add the recorded run's peak to its open windows.
            unseen = nullcontext() if device is self.device else self.device.unrecorded()
            with cyclic_collector_off(), restored_random_numbers(self.device), unseen:
                explanation, recorded = explain(device, self.sites, subject, expected)
            return self._with_artifacts(explanation, recorded, device)
        except RAISED_BY_A_STEP as error:
            return f"{NOT_EXPLAINED}: " + f"{type(error).__name__}: {error}".partition("\n")[0]

    def explain_out_of_memory(self, subject: Subject, device: Device) -> Explanation | None:
        """Run a step or call again after it ran out of memory, record its allocations, and explain the memory at the failure.

        Args:
            subject: The step or call that ran out of memory.
            device: The device that ran out of memory, from `Device.everywhere`.

        Returns:
            The explanation, or ``None`` if the recorded run does not run out of memory.
        """
        assert self.sites is not None, "only called if steps are explained"
        with cyclic_collector_off(), restored_random_numbers(self.device):
            explained = explain_out_of_memory(device, self.sites, subject)
        return None if explained is None else self._with_artifacts(*explained, device)

    def _with_artifacts(self, explanation: Explanation, recorded: Recording, device: Device) -> Explanation:
        """Write the recording to files if required, and return the explanation, with a note if writing failed.

        The explanation also gets the memory over time if ``over_time`` is true, and the GPU's name if the process uses several
        GPUs.
        """
        if self.device.others:
            explanation = replace(explanation, gpu=str(device.torch_device))
        if self.over_time:
            explanation = replace(explanation, over_time=over_time_of(recorded).thinned())
        trouble = None if self.artifacts is None else self.artifacts.keep(recorded)
        if trouble is None:
            return explanation
        return replace(explanation, peak=replace(explanation.peak, notes=(*explanation.peak.notes, trouble)))
