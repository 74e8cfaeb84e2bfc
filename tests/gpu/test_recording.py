"""Records what this GPU's allocator tells, for the tests that play it back without one."""

from __future__ import annotations

from typing import TYPE_CHECKING

import pytest

from pytest_gpumem.devices.cuda import CudaDevice
from pytest_gpumem.devices.cuda_runtime import TorchCuda
from pytest_gpumem.emulation.load import current_emulation
from tests.gpu.project import REPOSITORY
from tests.gpu.recording import WORKLOAD, Recording, Seen, record, seen_by_device
from tests.gpu.step_recording import KeepingCuda, StepRecording, recording_of, run_step

if TYPE_CHECKING:
    from pathlib import Path

    from pytest_gpumem.devices.contract import Device


@pytest.fixture
def data(tmp_path: Path) -> Path:
    """Where recordings are kept. Those of an emulated GPU are there, and the same each time but for the lines they name."""
    if current_emulation() is not None:
        return tmp_path
    folder = REPOSITORY / "tests" / "data"
    folder.mkdir(exist_ok=True)
    return folder


def test_a_recording_of_this_gpu_can_be_played_back(device: Device, data: Path) -> None:
    environment = device.environment()
    recording = record(TorchCuda(), WORKLOAD, environment.device, environment.details)
    seen = seen_by_device(Recording.from_json(recording.to_json()))
    assert [one.held for one in seen] == [action.held for action in WORKLOAD]
    by_hand = [Seen(action.name, action.held, action.peak) for action in WORKLOAD if action.peak is not None]
    assert [one for one in seen if one.name != "matmul"] == by_hand
    (data / f"cuda-statistics-{environment.slug}.json").write_text(recording.to_json(), encoding="utf-8")


def test_a_recording_of_a_step_on_this_gpu_can_be_composed_again(data: Path) -> None:
    runtime = KeepingCuda()
    device = CudaDevice(runtime)
    device.open()
    try:
        environment = device.environment()
        ran = run_step(device)
    finally:
        device.close()
    (stretch,) = runtime.stretches
    recording = recording_of(ran, stretch, environment.device, environment.details)
    composed = StepRecording.from_json(recording.to_json()).composed()
    assert composed == ran.explanation.peak
    assert composed.total == ran.peak
    (data / f"cuda-composition-{environment.slug}.json").write_text(recording.to_json(), encoding="utf-8")
