"""Records the statistics of this GPU's allocator, for the tests that play them back without one."""

from __future__ import annotations

from typing import TYPE_CHECKING

from pytest_gpumem.devices.cuda_runtime import TorchCuda
from tests.gpu.project import REPOSITORY
from tests.gpu.recording import WORKLOAD, Recording, Seen, record, seen_by_device

if TYPE_CHECKING:
    from pytest_gpumem.devices.contract import Device

DATA = REPOSITORY / "tests" / "data"


def test_a_recording_of_this_gpu_can_be_played_back(device: Device) -> None:
    environment = device.environment()
    recording = record(TorchCuda(), WORKLOAD, environment.device, environment.details)
    seen = seen_by_device(Recording.from_json(recording.to_json()))
    assert [one.held for one in seen] == [action.held for action in WORKLOAD]
    by_hand = [Seen(action.name, action.held, action.peak) for action in WORKLOAD if action.peak is not None]
    assert [one for one in seen if one.name != "matmul"] == by_hand
    DATA.mkdir(exist_ok=True)
    (DATA / f"cuda-statistics-{environment.slug}.json").write_text(recording.to_json(), encoding="utf-8")
