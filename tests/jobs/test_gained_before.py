"""Bytes that processes gained before a window: of each process, of each GPU, and of all processes together."""

from __future__ import annotations

from pytest_gpumem.emulating.emulated_process.usage import DeviceUsage, ProcessIdentity, ProcessUsage
from pytest_gpumem.measuring.jobs.figures import job_figures


def device(gpu: int = 0, first: int = 0, before: int = 0, live: int = 0) -> DeviceUsage:
    return DeviceUsage(gpu, 500, 512, 0, requested=500, live=live, live_before=before, live_first=first, allocations=1)


def usage(pid: int, *devices: DeviceUsage, window: int | None = 3, ended: int | None = None) -> ProcessUsage:
    identity = ProcessIdentity(pid, started=pid, command=("python", "server.py"))
    return ProcessUsage(pid, ended, devices, process=identity, window=window)


def test_a_process_gained_what_it_held_beyond_its_first_look_on_the_gpu_with_most():
    (process,) = job_figures([usage(1, device(0, 100, 140), device(1, 20, 90), device(2, 50, 10))]).processes
    assert process.gained == {"cuda:0": 40, "cuda:1": 70, "cuda:2": -40}
    assert process.gained_before == 70


def test_a_process_that_freed_bytes_gained_a_negative_number():
    (process,) = job_figures([usage(1, device(0, 100, 20), device(1, 100, 130))]).processes
    assert process.gained_before == -80
    job = job_figures([usage(1, device(0, 100, 20)), usage(2, device(0, 100, 130))])
    assert job.gained_before == -50


def test_all_processes_gained_their_sum_on_a_gpu():
    job = job_figures([usage(1, device(0, 100, 140), device(1, 0, 50)), usage(2, device(0, 100, 130))])
    assert job.gained_before == 70
    assert job_figures([]).gained_before == 0


def test_a_process_that_began_in_the_window_and_goes_on_retains_its_bytes():
    """As after the first request to a server that loads its weights then: in the next window it has them before."""
    (process,) = job_figures([usage(1, device(live=120), window=None)]).processes
    assert process.by_gpu["cuda:0"] == {"peak_allocated": 500, "retained": 120}
    assert process.gained_before == 0
    (process,) = job_figures([usage(1, device(before=120, live=125))]).processes
    assert (process.by_gpu["cuda:0"]["retained"], process.gained_before) == (5, 120)
    (process,) = job_figures([usage(1, device(before=120), ended=9)]).processes
    assert "retained" not in process.by_gpu["cuda:0"]
