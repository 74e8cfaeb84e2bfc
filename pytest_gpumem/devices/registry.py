"""Devices by the words of ``--gpumem-device``."""

from __future__ import annotations

import os
from collections.abc import Callable, Iterable, Mapping
from contextlib import suppress
from typing import TYPE_CHECKING

from pytest_gpumem.devices.contract import Device, DeviceUnavailable
from pytest_gpumem.devices.proc import siblings_with
from pytest_gpumem.ranks.launch import launch_of
from pytest_gpumem.values.option_words import EMULATED

if TYPE_CHECKING:
    from pytest_gpumem.values.option_words import Routing

DeviceFactory = Callable[[], Device]
"""Makes a device, or raises `DeviceUnavailable`."""

AUTO = "auto"


def make_cuda() -> Device:
    """Return the GPU of this process, emulated or not. Raises `DeviceUnavailable`."""
    from pytest_gpumem.emulation.load import current_emulation

    _take_gpu_of_rank()
    emulation = current_emulation()
    if emulation is not None:
        # CUDA of this process is the emulated GPU.
        from pytest_gpumem.devices.emulated import EmulatedDevice

        return EmulatedDevice(emulation)
    from pytest_gpumem.devices.cuda import CudaDevice, OtherGpu
    from pytest_gpumem.devices.cuda_runtime import TorchCuda, gpus_beside
    from pytest_gpumem.devices.device_lock import DeviceLock
    from pytest_gpumem.devices.memory_ledger import MemoryLedger

    runtime = TorchCuda()
    name = "gpu-" + runtime.properties().uuid
    others = [OtherGpu(TorchCuda(index)) for index in gpus_beside(runtime.torch_device())]
    return CudaDevice(runtime, DeviceLock(name), MemoryLedger(name), others)


def _take_gpu_of_rank() -> None:
    """Let CUDA's current device be that of this rank, where there are several. Raises `DeviceUnavailable`."""
    launch = launch_of(os.environ)
    if launch is None:
        return
    import torch

    there = torch.cuda.device_count()
    # A launcher may show each rank its own GPU only.
    if there > 1 and launch.local_rank >= there:
        raise DeviceUnavailable(
            f"{launch.rank} is the {launch.local_rank + 1}th of this machine (LOCAL_RANK {launch.local_rank}), which has "
            f"{there} GPUs: launch {there} ranks on it"
        )
    if there > 1:
        torch.cuda.set_device(launch.local_rank)


def make_cpu() -> Device:
    """Return the CPU. Of the ranks of one job the first holds its lock for all."""
    from pytest_gpumem.devices.cpu import CpuDevice
    from pytest_gpumem.devices.device_lock import DeviceLock

    launch = launch_of(os.environ)
    lock = DeviceLock("cpu", spoken="the CPU")
    if launch is None:
        return CpuDevice(lock)
    # Ranks of one job share the CPU, and keep other jobs' tests off together.
    return CpuDevice(lock if launch.local_rank == 0 else None, other_ranks=lambda: siblings_with("MASTER_PORT"))


def may_share_memory(word: str) -> bool:
    """Return whether processes may share the memory of the device called ``word``, so that tests can be packed on it."""
    return word != "cpu"


BUILT_IN: dict[str, DeviceFactory] = {"cuda": make_cuda, "cpu": make_cpu}


def factories(word: str, added: Iterable[Mapping[str, DeviceFactory]]) -> dict[str, DeviceFactory]:
    """Return the devices that can be asked for: those built in, the emulated GPU that ``word`` may name, and ``added`` ones."""
    known = {**BUILT_IN, **({word: make_cuda} if word.startswith(EMULATED) else {})}
    for one in added:
        known.update(one)
    return known


class Devices:
    """The devices by name, each made once. One that cannot be used here is remembered with its reason.

    ``routing`` is the assumption of the settings on choices that a device does not compute.
    """

    def __init__(self, factories: Mapping[str, DeviceFactory], routing: Routing | None = None) -> None:
        self._factories = dict(factories)
        self._routing = routing
        self._made: dict[str, Device | str] = {}

    def get(self, name: str) -> Device:
        """Return the device called ``name``; ``auto`` is CUDA where there is one and the CPU otherwise.

        Raises `DeviceUnavailable`.
        """
        if name == AUTO:
            try:
                return self.get("cuda")
            except DeviceUnavailable:
                return self.get("cpu")
        if name not in self._made:
            try:
                self._made[name] = self._factories[name]() if name in self._factories else "there is no such device"
            except DeviceUnavailable as unavailable:
                self._made[name] = str(unavailable)
        made = self._made[name]
        if isinstance(made, str):
            raise DeviceUnavailable(made)
        made.routing = self._routing
        return made

    def slugs(self) -> frozenset[str]:
        """Return the slugs of the devices that this machine has."""
        return self.slugs_of(self._factories)

    def slugs_of(self, names: Iterable[str]) -> frozenset[str]:
        """Return the slugs of those of the devices called ``names`` that this machine has."""
        present = set()
        for name in names:
            with suppress(DeviceUnavailable):
                present.add(self.get(name).environment().slug)
        return frozenset(present)


def slugs_of(factories: Mapping[str, DeviceFactory], names: Iterable[str]) -> frozenset[str]:
    """Return the slugs of those of the devices called ``names`` that this machine has."""
    return Devices(factories).slugs_of(names)
