"""Run a test's call a second time with a recording, to explain the first run."""

from __future__ import annotations

import unittest
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import pytest

from pytest_gpumem.measuring.explain.recording import EarlierBlocks, Subject
from pytest_gpumem.measuring.jobs.figures import PROCESS

if TYPE_CHECKING:
    from collections.abc import Sequence

    from pytest_gpumem.measuring.devices.contract import Device
    from pytest_gpumem.measuring.explain.owners import TensorOwners
    from pytest_gpumem.measuring.jobs.figures import ProcessFigures
    from pytest_gpumem.plugin.runtest.own_memory import OwnMemory
    from pytest_gpumem.plugin.runtest.run import TestRun

CALL = "call"
"""The step if a test's call is measured as a whole."""


def explain_call(run: TestRun) -> None:
    """Explain the peaks of a measured call and its processes, if `ExplainPolicy` asks for it."""
    call, judged = RepeatedCall(run.memory), run.measurements.judged
    if judged[0].measurement.workload.step == CALL:
        judged[0] = run.explainer.explain_once(judged[0], call.subject, retained=run.memory.retained_by_call)
    at = [index for index, result in enumerate(judged) if result.measurement.workload.step == PROCESS]
    if not at:
        return

    def recorded_processes() -> Sequence[ProcessFigures]:
        call.prepare()
        return run.processes.recorded(call.run)

    # A call's name has no colon, but a process's name may have one.
    names = [judged[index].measurement.name.partition(": ")[2] for index in at]
    run_again = run.processes.if_alone(recorded_processes)
    explained = run.explainer.explain_processes([judged[index] for index in at], names, run_again)
    for index, result in zip(at, explained, strict=True):
        judged[index] = result


@dataclass(frozen=True, slots=True)
class RepeatedCall:
    """A second run of a test's call. It begins like the first, but the first run's objects may still be alive."""

    memory: OwnMemory

    def prepare(self) -> None:
        """Remove the gradients and attributes that the first call left behind, and restore the random numbers."""
        memory, begin = self.memory, self.memory.at_call
        memory.ownership.clear_left_gradients(memory.item)
        begin.random.restore()
        attributes = memory.instance_dict()
        for name in [name for name in attributes if name not in begin.attributes]:
            dict.pop(attributes, name)

    def run(self) -> None:
        """Run the test's call with the same arguments. pytest does not report this run."""
        item = self.memory.item
        kind = item.cls if isinstance(item, pytest.Function) else None
        if isinstance(item, pytest.Function) and kind is not None and issubclass(kind, unittest.TestCase):
            # The method `debug` runs a unittest test without collecting its result. An instance with an event loop
            # (`IsolatedAsyncioTestCase`) can run only once. So a second instance runs, with the attributes that fixtures have
            # set on the first instance.
            instance: Any = item.instance
            second_instance = type(instance)(item.originalname)
            own_attributes = vars(second_instance)
            own_attributes.update({name: value for name, value in vars(instance).items() if name not in own_attributes})
            second_instance.debug()
        else:
            item.runtest()

    def subject(self, device: Device) -> Subject:
        """Return the second run as a `Subject` for a recording on ``device``, one of `Device.everywhere`."""
        memory, begin, everywhere = self.memory, self.memory.at_call, self.memory.context.device.everywhere
        at = everywhere.index(device)
        ownership = memory.ownership.everywhere[at]

        def earlier_blocks() -> EarlierBlocks:
            own_gained = ownership.own(memory.item).total - begin.own[at]
            gained = device.live() - begin.live[at] - own_gained
            return EarlierBlocks(max(0, gained), frozenset(memory.new_addresses(memory.context.device)))

        def register(owners: TensorOwners) -> None:
            values = memory.ownership.values(memory.item)
            owners.within(values)
            owners.inputs(values)

        return Subject(
            lambda _: self.run(),
            own=lambda: list(ownership.storages(memory.item)),
            own_bytes=lambda: ownership.own(memory.item).total,
            register=register,
            prepare=self.prepare,
            earlier_blocks=earlier_blocks,
            is_once=True,
        )
