"""A running test's own memory, when its call began and now."""

from __future__ import annotations

from contextlib import suppress
from dataclasses import dataclass
from typing import TYPE_CHECKING

from pytest_gpumem.measuring.explain.first_use import NewTensors, blocks_retained_by_run
from pytest_gpumem.measuring.measure.random_numbers import RandomNumbers
from pytest_gpumem.measuring.measure.reading import live_everywhere
from pytest_gpumem.torch_support.garbage_collector import everything_in_sight
from pytest_gpumem.torch_support.reachability import alive, blocks_of, reachable_tensors
from pytest_gpumem.torch_support.static_access import instance_dict

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence

    import pytest

    from pytest_gpumem.measuring.devices.contract import BlockIds, Device
    from pytest_gpumem.measuring.explain.first_use import RetainedBlocks
    from pytest_gpumem.measuring.measure.context import MeasuringContext
    from pytest_gpumem.plugin.runtest.ownership import Ownership


@dataclass(frozen=True, slots=True)
class CallBegin:
    """The memory and the state when a test's call began."""

    own: Sequence[int]
    """The test's own bytes on each device in `Device.everywhere`."""
    live: Sequence[int]
    """All live bytes on each device."""
    known: BlockIds
    """The blocks known to the device."""
    random: RandomNumbers
    """The random number generators' state."""
    attributes: frozenset[str]
    """The test instance's attributes."""
    new_tensors: NewTensors | None
    """Collects the tensors created by the call; ``None`` if nobody searches for their holders."""


@dataclass(eq=False, repr=False)
class OwnMemory:
    """A running test's own memory.

    Example:
        10 MB are allocated when the call begins: 6 MB by the test's fixture ``model``, and 4 MB by another test's fixture.
        So `own_bytes` is 6 MB, and `other_bytes` is 4 MB.
    """

    item: pytest.Item
    context: MeasuringContext
    ownership: Ownership
    call_begin: CallBegin | None = None
    """The memory when the test's call began; ``None`` before the call and after the test."""

    def begin_call(self, *, finds_holders: bool) -> None:
        """Read the memory before the test's call. All later allocations belong to the test.

        Args:
            finds_holders: Whether to search for the tensors' holders if the call retains tensors.
        """
        device = self.context.device
        device.quiesce()
        random = RandomNumbers.current(device)
        own = self.own_bytes()
        existing = self.ownership.storages(self.item)
        with device.one_moment():
            device.register_existing(existing)
            live, known = live_everywhere(device), device.known()
        new_tensors = self.new_tensors() if finds_holders else None
        self.call_begin = CallBegin(own, live, known, random, frozenset(self.instance_dict()), new_tensors)

    @property
    def at_call(self) -> CallBegin:
        """The memory and the state when the test's call began."""
        if self.call_begin is None:
            raise RuntimeError("the test's call has not begun")
        return self.call_begin

    @property
    def other_bytes(self) -> tuple[int, ...]:
        """Other code's live bytes when the call began, on each device."""
        begin = self.at_call
        return tuple(live - own for own, live in zip(begin.own, begin.live, strict=True))

    def own_bytes(self) -> list[int]:
        """Return the test's own bytes at this moment, on each device in `Device.everywhere`."""
        return [
            ownership.own(self.item).total if ownership.device.is_used else 0 for ownership in self.ownership.everywhere
        ]

    def reached(self, values: Sequence[object]) -> list[int]:
        """Return the bytes of tensors that can be reached from ``values`` or from the test's fixtures and class, on each
        device.
        """
        tensors = list(reachable_tensors([*self.ownership.values(self.item), *values]))
        return [
            sum(blocks_of(tensors, device.torch_device).values()) if device.is_used else 0
            for device in self.context.device.everywhere
        ]

    def other_blocks(self) -> frozenset[int]:
        """Return the addresses of live tensors that do not belong to the test or its fixtures.

        Tensors without a Python object are not included.
        """
        import torch

        device = self.context.device
        if self.context.time_budget is not None:
            # The first call to `pace` may create tensors that stay alive, so call it before searching for tensors.
            with device.unrecorded():
                device.pace()
        with everything_in_sight():
            tensors = alive(torch.Tensor)
        live = {address for gpu in device.everywhere for address in blocks_of(tensors, gpu.torch_device)}
        own = {
            storage.data_ptr() for ownership in self.ownership.everywhere for storage in ownership.storages(self.item)
        }
        return frozenset(live - own - self.new_addresses(device))

    def new_addresses(self, device: Device) -> set[int]:
        """Return the addresses allocated on a device since the test's call began."""
        return {address for address, _ in device.known() - self.at_call.known}

    def new_tensors(self) -> NewTensors | None:
        """Begin to collect new tensors, in which holders are searched later.

        Under ``--gpumem-explain=never``, collect nothing and return ``None``.
        """
        return None if self.context.sites is None else NewTensors()

    def retained_by_call(self, device: Device) -> RetainedBlocks | None:
        """Return the tensors retained by the test's call on a device."""
        new_addresses = self.new_addresses(device)
        new_blocks = {address: nbytes for address, nbytes in device.blocks().items() if address in new_addresses}
        return self.retained(self.at_call.new_tensors, device, new_blocks)

    def retained(
        self, new_tensors: NewTensors | None, device: Device, new_blocks: Mapping[int, int] | None = None
    ) -> RetainedBlocks | None:
        """Return the tensors retained by code on a device. Call this before the test runs other code.

        Args:
            new_tensors: The tensors created by the code; ``None`` if they were not collected.
            device: The device, one of `Device.everywhere`.
            new_blocks: The sizes of further blocks from the code, by address.
        """
        if new_tensors is None:
            return None
        own = self.ownership.everywhere[self.context.device.everywhere.index(device)].storages(self.item)
        with suppress(Exception):
            # Ignore errors in the search for holders, because the test can be explained without them.
            return blocks_retained_by_run(
                new_tensors, device.torch_device, {storage.data_ptr() for storage in own}, new_blocks or {}
            )
        return None

    def instance_dict(self) -> dict[str, object]:
        """Return the attributes of the test's instance; empty for a test function without a class."""
        return instance_dict(getattr(self.item, "instance", None)) or {}
