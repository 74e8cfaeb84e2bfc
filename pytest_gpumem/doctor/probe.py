"""A process of its own that imports torch and opens devices: ``python -m pytest_gpumem.doctor.probe cuda cpu``.

It prints what it saw as a line of JSON. A torch that ends its process, and an emulated GPU, which has to be there before torch,
concern nobody else.
"""

from __future__ import annotations

import json
import sys
import time
from typing import TYPE_CHECKING

from pytest_gpumem.devices.contract import DeviceUnavailable
from pytest_gpumem.devices.registry import factories
from pytest_gpumem.doctor.facts import DeviceFacts, Looked, TorchFacts
from pytest_gpumem.emulated_process.before_torch import gpu_told
from pytest_gpumem.emulated_process.start import emulate
from pytest_gpumem.emulation.errors import EmulationError
from pytest_gpumem.emulation.gpus import emulated_gpu
from pytest_gpumem.emulation.load import current_emulation
from pytest_gpumem.values.option_words import EMULATED, NO_CUDNN
from pytest_gpumem.values.plain import to_plain

if TYPE_CHECKING:
    from collections.abc import Sequence

    from pytest_gpumem.devices.contract import Device
    from pytest_gpumem.devices.registry import DeviceFactory
    from pytest_gpumem.values.interference import Conditions

_SECONDS = 0.5
"""The time between two readings of interference: ticks of /proc/stat are 10 ms."""


def looked(words: Sequence[str]) -> Looked:
    """Return what there is of these devices: those built in, or one that is emulated."""
    if words[0].startswith(EMULATED):
        try:
            emulate(emulated_gpu(words[0], gpu_told()))
        except EmulationError as error:
            return Looked(devices=(DeviceFacts(words[0], trouble=str(error)),))
    torch = imported()
    if torch.trouble is not None:
        return Looked(torch, tuple(DeviceFacts(word, trouble="torch cannot be imported") for word in words))
    return Looked(torch, tuple(opened(word, factories(word, ())[word]) for word in words))


def imported() -> TorchFacts:
    """Import torch, and return what it is, or which exception came."""
    try:
        import torch
    except Exception as error:  # noqa: BLE001 - whatever a broken installation raises
        first = str(error).strip().splitlines() or [""]
        return TorchFacts(trouble=f"{type(error).__name__}: {first[0]}")
    return TorchFacts(str(torch.__version__), torch.version.cuda)


def opened(word: str, make: DeviceFactory) -> DeviceFacts:
    """Make a device, open it to see whether it counts, read what disturbs it, and close it."""
    try:
        device = make()
        # Others may have it to themselves for minutes, and nothing is timed here.
        device.lock = None
        device.open()
    except DeviceUnavailable as unavailable:
        return DeviceFacts(word, trouble=str(unavailable))
    except Exception as error:  # noqa: BLE001 - a device of a plugin, or a driver that fails
        return DeviceFacts(word, trouble=f"{type(error).__name__}: {str(error).strip().partition(chr(10))[0]}")
    try:
        return _read(word, device)
    finally:
        device.close()


def _read(word: str, device: Device) -> DeviceFacts:
    environment = device.environment()
    emulation = current_emulation()
    if emulation is not None:
        release = emulation.cudnn.release()
        details = {**environment.details, "emulated_cudnn": release}
        lacking = emulation.cudnn.why_zero() if release == NO_CUDNN else None
        environment = type(environment)(environment.slug, environment.device, details)
        return DeviceFacts(word, environment, tells_time=device.tells_time, lacking=lacking)
    with device.unrecorded():
        return DeviceFacts(
            word, environment, tells_time=device.tells_time, pace=device.pace(), conditions=_conditions(device)
        )


def _conditions(device: Device) -> tuple[Conditions, Conditions]:
    before = device.conditions()
    end = time.perf_counter() + _SECONDS
    while time.perf_counter() < end:
        pass  # at work, since a thread that sleeps does not wait for a core
    return before, device.conditions()


if __name__ == "__main__":
    sys.stdout.write(f"\n{json.dumps(to_plain(looked(sys.argv[1:])))}\n")
