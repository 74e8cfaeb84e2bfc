"""The time gate on a GPU: its clocks against the host's, who else computes, and a slowdown from end to end."""

from __future__ import annotations

import subprocess
import sys
import time
from typing import TYPE_CHECKING

import pytest
import torch

from tests.support.processes import log_of, overlaps

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator
    from pathlib import Path

    from pytest_gpumem.measuring.devices.contract import Device
    from tests.gpu.project import GpuProject

LONGEST_WAIT = 30.0
"""Seconds in which another process has loaded torch and computed, and NVML has noticed."""


@pytest.fixture
def products(device: Device) -> Callable[[int], Callable[[], object]]:
    """``products(30)`` is a run of so many matrix products, of about 137 GFLOP each. The GPU is awake."""
    matrix = torch.rand(4096, 4096, device=device.torch_device)
    product = torch.empty_like(matrix)

    def of(times: int) -> Callable[[], object]:
        return lambda: [torch.mm(matrix, matrix, out=product) for _ in range(times)]

    device.time(of(20))
    return of


@pytest.mark.hardware("no time passes on an emulated one")
def test_a_time_by_events_is_within_the_hosts_and_not_much_shorter(
    device: Device, products: Callable[[int], Callable[[], object]]
) -> None:
    torch.cuda.synchronize()
    began = time.perf_counter()
    by_events = device.time(products(100))
    by_host = time.perf_counter() - began
    assert 0.5 * by_host < by_events <= by_host * 1.001


@pytest.mark.hardware("no time passes on an emulated one")
def test_laps_add_up_to_the_whole_and_each_is_that_of_its_own_work(
    device: Device, products: Callable[[int], Callable[[], object]]
) -> None:
    began = time.perf_counter()
    one, three = device.laps([products(20), products(60)])
    by_host = time.perf_counter() - began
    assert 0.5 * by_host < one + three <= by_host * 1.001
    assert 2 < three / one < 4
    assert one + three == pytest.approx(device.time(products(80)), rel=0.2)


@pytest.mark.hardware("no time passes on an emulated one")
def test_the_host_does_not_wait_between_laps(device: Device, products: Callable[[int], Callable[[], object]]) -> None:
    launched: list[float] = []

    def launch() -> None:
        products(50)()
        launched.append(time.perf_counter())

    began = time.perf_counter()
    first, second = device.laps([launch, launch])
    assert launched[0] - began < first
    assert launched[1] - began < first + second


STRANGER = """
import sys, time
from pathlib import Path

import torch

matrix = torch.rand(4096, 4096, device="cuda")
product = torch.empty_like(matrix)
deadline = time.monotonic() + 120
while Path(sys.argv[1]).exists() and time.monotonic() < deadline:
    for _ in range(20):
        torch.mm(matrix, matrix, out=product)
    torch.cuda.synchronize()
"""
ORPHANED = "import subprocess, sys; subprocess.Popen(sys.argv[1:], start_new_session=True)"
"""Starts a process and leaves it: what a test has started itself is no stranger."""


@pytest.fixture
def flag(tmp_path: Path) -> Iterator[Path]:
    """A stranger computes while this file is there."""
    path = tmp_path / "compute"
    yield path
    path.unlink(missing_ok=True)


def other_processes(device: Device) -> int | None:
    return device.conditions().other_processes


def wait_until(is_so: Callable[[], bool]) -> bool:
    deadline = time.monotonic() + LONGEST_WAIT
    while not is_so():
        if time.monotonic() > deadline:
            return False
        time.sleep(0.2)
    return True


@pytest.mark.hardware("no process is seen on an emulated one")
def test_nvml_sees_no_stranger_and_then_one_that_computes_and_then_none(
    device: Device, products: Callable[[int], Callable[[], object]], flag: Path
) -> None:
    device.time(products(20))
    if other_processes(device) is None:
        pytest.skip("NVML does not tell who uses this GPU")
    assert other_processes(device) == 0
    flag.touch()
    command = [sys.executable, "-c", STRANGER, str(flag)]
    subprocess.run([sys.executable, "-c", ORPHANED, *command], check=True)
    assert wait_until(lambda: other_processes(device) == 1)
    flag.unlink()
    assert wait_until(lambda: other_processes(device) == 0)


LOGGED = """
import os
from contextlib import contextmanager
from pathlib import Path

from pytest_gpumem.measuring.devices.{module} import {device}

here = Path(__file__).parent
plain = {device}.exclusive


def note(event):
    # One short line is appended in one piece. Written within the stretch that it tells of, lines are in true order.
    with open(here / "log", "a") as log:
        log.write(f"{{event}} {{os.getpid()}}\\n")


@contextmanager
def alone(self):
    with plain(self) as refused:
        assert refused is None
        note("alone")
        yield refused
        note("waits")


{device}.exclusive = alone
"""
SIX = """
@pytest.mark.parametrize("number", range(6))
def test_it(gpumem, number):
    x = torch.rand(512, 512, device=gpumem.device)
    gpumem.measure(lambda: x @ x)
"""


@pytest.mark.hardware("no time passes on an emulated one")
def test_two_workers_on_one_gpu_never_time_at_once(gpu_project: GpuProject, monkeypatch: pytest.MonkeyPatch) -> None:
    pytest.importorskip("xdist", reason="needs pytest-xdist: these are two of its workers")
    # With several GPUs each worker would have one of its own.
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", str(torch.cuda.current_device()))
    gpu_project.write(SIX)
    (gpu_project.path / "conftest.py").write_text(LOGGED.format(module="cuda", device="CudaDevice"), encoding="utf-8")
    gpu_project.run("-n2").assert_outcomes(passed=6)
    log = log_of(gpu_project.path)
    assert len({line.split()[1] for line in log}) == 2
    assert sum(line.startswith("alone") for line in log) >= 6
    assert overlaps(log) == []


PRODUCTS = """
def test_it(gpumem):
    matrix = torch.rand(1024, 1024, device=gpumem.device)
    product = torch.empty_like(matrix)

    def step():
        for _ in range({times}):
            torch.mm(matrix, matrix, out=product)

    gpumem.measure(step)
"""


@pytest.mark.hardware("no time passes on an emulated one")
def test_thrice_the_work_is_slower_than_the_baseline_and_launches_thrice_as_many(
    gpu_project: GpuProject,
) -> None:
    pytest.importorskip("tomli_w", reason="needs tomli-w: it writes the store")
    gpu_project.write(PRODUCTS.format(times=20))
    for _ in range(3):
        assert gpu_project.run("--gpumem-update=all").ret == 0
    same = gpu_project.verdicts("--gpumem-baseline")
    assert same["step_time"]["baseline"] is not None
    assert same["step_time"]["outcome"] != "regressed"
    gpu_project.write(PRODUCTS.format(times=60))
    more = gpu_project.verdicts("--gpumem-baseline")
    assert more["step_time"]["outcome"] == "regressed"
    assert 2 < more["step_time"]["value"] / more["step_time"]["baseline"] < 4
    assert more["launches"]["outcome"] == "regressed"
    assert more["launches"]["value"] == 3 * more["launches"]["baseline"] >= 60


READS = """
def test_it(gpumem):
    x = torch.ones(1000, device=gpumem.device)

    def step():
        total = (x * 2).sum(){read}

    gpumem.measure(step)
"""


def test_a_value_that_is_read_in_a_step_is_a_sync_and_fails_without_a_clock(gpu_project: GpuProject) -> None:
    pytest.importorskip("tomli_w", reason="needs tomli-w: it writes the store")
    gpu_project.write(READS.format(read=""))
    assert gpu_project.run("--gpumem-update=new", "--no-gpumem-time").ret == 0
    gpu_project.write(READS.format(read=".item()"))
    found = gpu_project.verdicts("--gpumem-baseline", "--no-gpumem-time")
    assert "step_time" not in found
    syncs = found["syncs"]
    assert (syncs["baseline"], syncs["value"], syncs["outcome"]) == (0, 1, "regressed")
    assert found["launches"]["outcome"] == "ok"
