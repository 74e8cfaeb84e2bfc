"""Implement `Gpumem.load`. It measures the peak during loading, the model's bytes, and other bytes that stay allocated."""

from __future__ import annotations

from dataclasses import dataclass, replace
from functools import partial
from typing import TYPE_CHECKING, Generic, TypeVar

from pytest_gpumem.facts.measurement import Workload
from pytest_gpumem.measuring.explain.recording import EarlierBlocks, Subject
from pytest_gpumem.measuring.measure.random_numbers import RandomNumbers
from pytest_gpumem.measuring.measure.reading import live_everywhere, read_once
from pytest_gpumem.torch_support.reachability import blocks_of, reachable_tensors
from pytest_gpumem.torch_support.static_access import class_name, is_a, parameters_of

if TYPE_CHECKING:
    from collections.abc import Callable

    from pytest_gpumem.facts.measurement import Measurement
    from pytest_gpumem.measuring.devices.contract import Device
    from pytest_gpumem.measuring.explain.owners import TensorOwners
    from pytest_gpumem.measuring.explain.tracker import Tracker
    from pytest_gpumem.plugin.runtest.run import TestRun

T = TypeVar("T")


@dataclass(frozen=True, slots=True)
class Loading(Generic[T]):
    """The result of `Gpumem.load`."""

    value: T
    """The factory's result."""
    measurement: Measurement
    """The measurement of this load."""


def load(
    run: TestRun, factory: Callable[[], T], name: str | None, *, explain: bool | None
) -> tuple[T, Callable[[], Measurement]]:
    """Run ``factory`` once and measure it.

    Args:
        run: The test's run.
        factory: The function for loading and returning an object.
        name: The measurement's name; by default ``load``.
        explain: Whether to explain the peak; ``None`` if the verdict and the settings decide.

    Returns:
        The loaded object, and a function that adds the measurement to the test.

    Raises:
        TypeError: ``factory`` is not callable.
        Exception: Any error that ``factory`` raises.
    """
    import torch

    if not callable(factory):
        raise TypeError(
            f"gpumem.load() needs a function that loads an object, but got {class_name(type(factory))}: "
            "write gpumem.load(lambda: ...), so the object is loaded during the measurement"
        )
    device, random = run.device, RandomNumbers.current(run.device)
    other_bytes = run.context.bytes_of_other_code(factory)
    repeated = _RepeatedLoading(run, factory, random)
    values: list[T] = []
    try:
        device.consensus.rest()
        with (
            run.processes_window() as window,
            read_once(device, other_bytes, lambda: run.reached([factory, *values])) as figures,
        ):
            values.append(factory())
    except Exception as error:
        run.explainer.explain_out_of_memory(error, repeated.subject)
        raise
    (value,) = values
    loaded = repeated.loaded(value)
    by_device = {gpu: replace(memory, loaded=loaded[gpu]) for gpu, memory in figures().items()}
    workload = Workload("load", parameters=parameters_of(value) if is_a(value, torch.nn.Module) else None)
    judged = run.judge_figures(workload, by_device, name)
    if judged.measurement.peak_allocated > 0:  # otherwise, only another process may have memory
        with run.ending_new_processes(window):
            judged = run.explainer.explain_once(judged, repeated.subject, explain=explain)
    run_again = run.recorded_loading(repeated.load, window)
    return value, partial(run.keep_with_processes, judged, by_device, window, run_again, explain=explain)


class _RepeatedLoading:
    """A second run of the factory, which is recorded to explain the peak. The object from the first run is still alive.

    Example:
        A model with 16,640 parameters in ``float32`` holds 66,560 bytes. The object from the first run keeps its 66,560
        bytes during the second run. These bytes were allocated before the recording began, so the recorded peak does not
        include them.
    """

    def __init__(self, run: TestRun, factory: Callable[[], object], random: RandomNumbers) -> None:
        self._run = run
        self._factory = factory
        self._random = random
        self._live_before = dict(zip(self._names(), live_everywhere(run.device), strict=True))
        self._known_before = run.device.known()
        self._loaded: dict[str, int] = {}
        self._addresses: frozenset[int] = frozenset()

    def _names(self) -> list[str]:
        return [str(device.torch_device) for device in self._run.device.everywhere]

    def loaded(self, value: object) -> dict[str, int]:
        """Return the bytes of a loaded object, by device."""
        tensors = list(reachable_tensors([value]))
        devices = self._run.device.everywhere
        blocks = [blocks_of(tensors, device.torch_device) if device.is_used else {} for device in devices]
        self._addresses = frozenset(address for on_device in blocks for address in on_device)
        self._loaded = {name: sum(sizes.values()) for name, sizes in zip(self._names(), blocks, strict=True)}
        return self._loaded

    def load(self) -> object:
        """Run the factory again without a recording in this process."""
        self._random.restore()
        return self._factory()

    def subject(self, device: Device) -> Subject:
        """Return the second run as a `Subject` for a recording on ``device``, one of `Device.everywhere`."""
        name, context, factory = str(device.torch_device), self._run.context, self._factory

        def run(tracker: Tracker) -> object:
            value = factory()
            tracker.owners.within(value)
            return value

        def earlier_blocks() -> EarlierBlocks:
            gained = device.live() - self._live_before[name] - self._loaded.get(name, 0)
            blocks = {address for address, _ in self._run.device.known() - self._known_before}
            return EarlierBlocks(max(0, gained), frozenset(blocks - self._addresses))

        def register(owners: TensorOwners) -> None:
            owners.within(factory)
            owners.inputs(factory)

        return Subject(
            run,
            own=lambda: list(context.storages(factory, device)),
            own_bytes=lambda: sum(blocks_of(reachable_tensors([factory]), device.torch_device).values()),
            register=register,
            prepare=self._random.restore,
            earlier_blocks=earlier_blocks,
            is_once=True,
        )
