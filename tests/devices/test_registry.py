"""From the word of --gpumem-device to a device, which is made once."""

from __future__ import annotations

import pytest

from pytest_gpumem.base.errors import DeviceUnavailable
from pytest_gpumem.measuring.devices.cpu import CpuDevice
from pytest_gpumem.measuring.devices.registry import BUILT_IN, Devices, make_cuda, variables_of_processes


class Factory:
    """Makes devices, or says why not, and counts how often it was asked."""

    def __init__(self, unavailable: str | None = None):
        self.unavailable = unavailable
        self.asked = 0

    def __call__(self):
        self.asked += 1
        if self.unavailable is not None:
            raise DeviceUnavailable(self.unavailable)
        return CpuDevice()


def test_a_device_is_made_when_it_is_first_asked_for_and_once():
    factory = Factory()
    devices = Devices({"cpu": factory})
    assert factory.asked == 0
    assert devices.get("cpu") is devices.get("cpu")
    assert factory.asked == 1


def test_a_device_that_cannot_be_used_is_tried_once_and_its_reason_told_every_time():
    factory = Factory("no CUDA device: none here")
    devices = Devices({"cuda": factory})
    for _ in range(3):
        with pytest.raises(DeviceUnavailable, match=r"^no CUDA device: none here$"):
            devices.get("cuda")
    assert factory.asked == 1


def test_auto_is_cuda_where_there_is_one():
    devices = Devices({"cuda": Factory(), "cpu": Factory()})
    assert devices.get("auto") is devices.get("cuda")
    assert devices.get("auto") is not devices.get("cpu")


def test_auto_is_the_cpu_where_there_is_no_cuda():
    devices = Devices({"cuda": Factory("no CUDA device"), "cpu": Factory()})
    assert devices.get("auto") is devices.get("cpu")


def test_auto_says_why_there_is_not_even_a_cpu():
    devices = Devices({"cuda": Factory("no CUDA device"), "cpu": Factory("no profiler")})
    with pytest.raises(DeviceUnavailable, match=r"^no profiler$"):
        devices.get("auto")


def test_another_error_of_a_factory_is_not_taken_for_a_device_that_is_not_there():
    def broken():
        raise ZeroDivisionError

    with pytest.raises(ZeroDivisionError):
        Devices({"cuda": broken, "cpu": Factory()}).get("auto")


def test_a_name_that_no_device_has_is_a_device_that_cannot_be_used():
    with pytest.raises(DeviceUnavailable, match=r"^there is no such device$"):
        Devices({"cpu": Factory()}).get("cud")


def test_cuda_and_cpu_are_built_in():
    assert list(BUILT_IN) == ["cuda", "cpu"]
    device = Devices(BUILT_IN).get("cpu")
    assert device.name == "cpu"


def test_a_torch_without_cuda_says_so(monkeypatch):
    monkeypatch.setattr("torch.version.cuda", None)
    monkeypatch.setattr("torch.version.hip", None)
    with pytest.raises(DeviceUnavailable, match=r"^no CUDA device: torch .* is built without CUDA$"):
        make_cuda()


def test_a_machine_without_a_gpu_says_so(monkeypatch):
    import warnings

    def available():
        warnings.warn("CUDA initialization: Found no NVIDIA driver on your system.", stacklevel=1)
        return False

    monkeypatch.setattr("torch.version.cuda", "13.0")
    monkeypatch.setattr("torch.cuda.is_available", available)
    with pytest.raises(DeviceUnavailable, match=r"^no CUDA device: torch .* \(CUDA 13\.0\) sees no GPU$"):
        make_cuda()


@pytest.mark.parametrize(
    ("words", "gpus", "count_on_cpu"),
    [
        ({"cpu"}, 1, True),
        ({"auto"}, 0, True),
        ({"auto", "cpu"}, 0, True),
        ({"auto"}, 1, False),
        ({"cpu", "cuda"}, 0, False),
        ({"emulated:h100"}, 0, False),
    ],
)
def test_other_processes_count_on_the_cpu_if_all_tests_are_measured_there(monkeypatch, words, gpus, count_on_cpu):
    monkeypatch.setattr("torch.cuda.device_count", lambda: gpus)
    monkeypatch.setattr("pytest_gpumem.emulating.emulation.load.current_emulation", lambda: None)
    variables = variables_of_processes(Devices({"cpu": CpuDevice}), words)
    assert variables == (CpuDevice().variables_of_processes() if count_on_cpu else {})
