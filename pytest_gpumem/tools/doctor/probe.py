"""A program that imports torch, opens devices and prints the facts: ``python -m pytest_gpumem.tools.doctor.probe cuda cpu``.

``gpumem doctor`` runs the program in a separate process, so a crash in torch ends only this process. An emulated GPU needs a
process of its own in any case, because the GPU must exist before torch is imported. The facts are a `ProbeResult` in JSON on
the last line of the output.
"""

from __future__ import annotations

import json
import sys
import time
from typing import TYPE_CHECKING

from pytest_gpumem.base.errors import DeviceUnavailable, EmulationError
from pytest_gpumem.emulating.emulated_process.before_torch import described_gpus
from pytest_gpumem.emulating.emulated_process.start import emulate
from pytest_gpumem.emulating.emulation.gpus import emulated_gpu
from pytest_gpumem.emulating.emulation.load import current_emulation
from pytest_gpumem.facts.values.option_words import EMULATED, NO_CUDNN
from pytest_gpumem.facts.values.plain import to_plain
from pytest_gpumem.measuring.devices.load_source import load_source
from pytest_gpumem.measuring.devices.registry import factories
from pytest_gpumem.tools.doctor.facts import DeviceFacts, ProbeResult, TorchFacts

if TYPE_CHECKING:
    from collections.abc import Sequence

    from pytest_gpumem.facts.values.interference import Conditions
    from pytest_gpumem.measuring.devices.contract import Device
    from pytest_gpumem.measuring.devices.registry import DeviceFactory

_SECONDS = 0.5
"""Seconds between the two times at which the load is read. A tick takes 10 ms, which is 2 % of this time."""


def probe(words: Sequence[str]) -> ProbeResult:
    """Import torch and open devices in this process.

    Args:
        words: Values of ``--gpumem-device``: built-in devices, or a single emulated GPU.
    """
    if words[0].startswith(EMULATED):
        try:
            emulate(emulated_gpu(words[0], described_gpus()))
        except EmulationError as error:
            return ProbeResult(devices=(DeviceFacts(words[0], trouble=str(error)),))
    torch = import_torch()
    if torch.trouble is not None:
        return ProbeResult(torch, tuple(DeviceFacts(word, trouble="torch cannot be imported") for word in words))
    return ProbeResult(torch, tuple(open_device(word, factories(word, ())[word]) for word in words))


def import_torch() -> TorchFacts:
    """Import torch, and return its release. If the import fails, return the exception as the ``trouble``."""
    try:
        import torch
    except Exception as error:  # noqa: BLE001 - whatever a broken installation raises
        error_lines = str(error).strip().splitlines() or [""]
        return TorchFacts(trouble=f"{type(error).__name__}: {error_lines[0]}")
    return TorchFacts(str(torch.__version__), torch.version.cuda)


def open_device(word: str, make: DeviceFactory) -> DeviceFacts:
    """Open a device, read its environment, speed and load, and close it. If opening fails, return the reason."""
    try:
        device = make()
        # The lock protects timed steps, and another process may own it for minutes. Nothing is timed here, so do not wait.
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
            word,
            environment,
            tells_time=device.tells_time,
            pace=device.pace(),
            conditions=_conditions(device),
            load_source=source.NAME if word == "cpu" and (source := load_source()) is not None else None,
        )


def _conditions(device: Device) -> tuple[Conditions, Conditions]:
    first_reading = device.conditions()
    end = time.perf_counter() + _SECONDS
    while time.perf_counter() < end:
        pass  # Keep this thread busy. A sleeping thread cannot measure how long it would wait for a core.
    return first_reading, device.conditions()


if __name__ == "__main__":
    sys.stdout.write(f"\n{json.dumps(to_plain(probe(sys.argv[1:])))}\n")
