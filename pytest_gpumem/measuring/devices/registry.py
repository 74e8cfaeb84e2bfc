"""Devices by the values of ``--gpumem-device``."""

from __future__ import annotations

import os
from collections.abc import Callable, Iterable, Mapping
from contextlib import suppress
from typing import TYPE_CHECKING

from pytest_gpumem.base.errors import DeviceUnavailable
from pytest_gpumem.facts.values.option_words import EMULATED
from pytest_gpumem.measuring.devices.contract import Device
from pytest_gpumem.measuring.devices.load_source import siblings_with
from pytest_gpumem.measuring.ranks.launch import launch_of

if TYPE_CHECKING:
    from pytest_gpumem.facts.values.option_words import Routing

DeviceFactory = Callable[[], Device]
"""Creates a device, or raises `DeviceUnavailable`."""

AUTO = "auto"


def make_cuda() -> Device:
    """Return this process's GPU, real or emulated. Raises `DeviceUnavailable`."""
    from pytest_gpumem.emulating.emulation.load import current_emulation

    _take_gpu_of_rank()
    emulation = current_emulation()
    if emulation is not None:
        # CUDA in this process is the emulated GPU.
        from pytest_gpumem.measuring.devices.emulated import EmulatedDevice

        return EmulatedDevice(emulation)
    from pytest_gpumem.measuring.devices.cuda import CudaDevice, OtherGpu
    from pytest_gpumem.measuring.devices.cuda_runtime import TorchCuda, gpus_beside
    from pytest_gpumem.measuring.devices.device_lock import DeviceLock
    from pytest_gpumem.measuring.devices.memory_ledger import MemoryLedger

    runtime = TorchCuda()
    name = "gpu-" + runtime.properties().uuid
    other_gpus = [OtherGpu(TorchCuda(index)) for index in gpus_beside(runtime.torch_device())]
    return CudaDevice(runtime, DeviceLock(name), MemoryLedger(name), other_gpus)


def _take_gpu_of_rank() -> None:
    """Make this rank's GPU the current CUDA device if the process sees several GPUs. Raises `DeviceUnavailable`."""
    launch = launch_of(os.environ)
    if launch is None:
        return
    import torch

    gpus = torch.cuda.device_count()
    # A rank whose launcher has hidden all other GPUs sees a single GPU, and uses this GPU.
    if gpus > 1 and launch.local_rank >= gpus:
        raise DeviceUnavailable(
            f"{launch.rank} has LOCAL_RANK {launch.local_rank}, but this machine has only {gpus} GPUs: launch at most "
            f"{gpus} ranks on it"
        )
    if gpus > 1:
        torch.cuda.set_device(launch.local_rank)


def make_cpu() -> Device:
    """Return the CPU. In a job with several ranks, only the first rank on this machine takes the lock, for all ranks."""
    from pytest_gpumem.measuring.devices.cpu import CpuDevice
    from pytest_gpumem.measuring.devices.device_lock import DeviceLock

    launch = launch_of(os.environ)
    lock = DeviceLock("cpu", spoken="the CPU")
    if launch is None:
        return CpuDevice(lock)
    # A job's ranks measure at the same time, so only one of them keeps other sessions' tests away.
    return CpuDevice(lock if launch.local_rank == 0 else None, other_ranks=lambda: siblings_with("MASTER_PORT"))


def may_share_memory(word: str) -> bool:
    """Return whether ``--gpumem-pack`` can run several tests at once on the device called ``word``."""
    return word != "cpu"


BUILT_IN: dict[str, DeviceFactory] = {"cuda": make_cuda, "cpu": make_cpu}


def factories(word: str, added: Iterable[Mapping[str, DeviceFactory]]) -> dict[str, DeviceFactory]:
    """Return the available devices by name.

    Args:
        word: The value of ``--gpumem-device``, which may name an emulated GPU.
        added: Factories by device name, a mapping for each plugin that adds devices.

    Returns:
        The built-in devices, the emulated GPU if ``word`` is an emulated GPU's name, and the added devices.
    """
    devices = {**BUILT_IN, **({word: make_cuda} if word.startswith(EMULATED) else {})}
    for plugin_devices in added:
        devices.update(plugin_devices)
    return devices


class Devices:
    """All devices by name. Each device is created at most once, when it is first requested.

    If a device is unavailable, later requests raise the same error. ``routing`` is the setting with this name, which emulated
    GPUs need for a mixture of experts.
    """

    def __init__(self, factories: Mapping[str, DeviceFactory], routing: Routing | None = None) -> None:
        self._factories = dict(factories)
        self._routing = routing
        self._devices: dict[str, Device | str] = {}

    def get(self, name: str) -> Device:
        """Return the device called ``name``. The name ``auto`` stands for CUDA if available, otherwise for the CPU.

        Raises:
            DeviceUnavailable: The device does not exist, or cannot be used on this machine.
        """
        if name == AUTO:
            try:
                return self.get("cuda")
            except DeviceUnavailable:
                return self.get("cpu")
        if name not in self._devices:
            try:
                self._devices[name] = self._factories[name]() if name in self._factories else "there is no such device"
            except DeviceUnavailable as unavailable:
                self._devices[name] = str(unavailable)
        device = self._devices[name]
        if isinstance(device, str):
            raise DeviceUnavailable(device)
        device.routing = self._routing
        return device

    def slugs(self) -> frozenset[str]:
        """Return the slugs of all available devices."""
        return self.slugs_of(self._factories)

    def slugs_of(self, names: Iterable[str]) -> frozenset[str]:
        """Return the slugs of the available devices in ``names``."""
        present = set()
        for name in names:
            with suppress(DeviceUnavailable):
                present.add(self.get(name).environment().slug)
        return frozenset(present)


def variables_of_processes(devices: Devices, words: Iterable[str]) -> Mapping[str, str]:
    """Return the environment variables with which other processes measure their memory on a session's device.

    They count on the CPU only if all measured tests do, and on GPUs otherwise.

    Args:
        devices: The session's devices.
        words: The values of ``--gpumem-device`` and ``device=`` for all measured tests.
    """
    with suppress(DeviceUnavailable):
        if all(word == "cpu" or (word == AUTO and not _may_have_gpu()) for word in words):
            return devices.get("cpu").variables_of_processes()
    return {}


def _may_have_gpu() -> bool:
    """Return whether this machine may have a GPU, without a CUDA context, because a process with a context cannot fork."""
    import torch

    from pytest_gpumem.emulating.emulation.load import current_emulation

    return current_emulation() is not None or torch.cuda.device_count() > 0


def slugs_of(factories: Mapping[str, DeviceFactory], names: Iterable[str]) -> frozenset[str]:
    """Return the slugs of the available devices in ``names``."""
    return Devices(factories).slugs_of(names)
