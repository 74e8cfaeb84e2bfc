"""Bytes beside torch in a job's processes: a lower bound, or not seen."""

from __future__ import annotations

from types import SimpleNamespace

import pytest

from pytest_gpumem.emulating.emulated_process.usage import DeviceUsage, ProcessIdentity, ProcessUsage
from pytest_gpumem.measuring.jobs.beside_torch import ProcessBytes, beside_torch


def usage(pid: int, *reserved: int) -> ProcessUsage:
    devices = tuple(DeviceUsage(gpu, 1, nbytes, 0) for gpu, nbytes in enumerate(reserved))
    return ProcessUsage(1, None, devices, process=ProcessIdentity(pid))


def gpu(*readings):
    left = iter(readings)
    return SimpleNamespace(bytes_by_pid=lambda: next(left))


def test_the_highest_bytes_of_the_jobs_processes_are_kept_as_sums_over_gpus():
    seen = ProcessBytes([gpu({7: 10, 8: 1, 99: 50}, {7: 30}, {}), gpu({7: 5}, {7: None}, {7: 9, 8: 3})])
    for _ in range(3):
        seen.look({7, 8})
    assert seen.is_read
    assert seen.by_pid == {7: 30, 8: 3}


def test_without_nvml_nothing_is_read():
    seen = ProcessBytes([gpu(None), gpu(None)])
    seen.look({7})
    assert not seen.is_read
    assert seen.by_pid == {}


@pytest.mark.parametrize(
    ("usages", "bytes_by_pid", "bounds"),
    [
        ([usage(7, 100, 50)], {7: 170}, {7: 20}),
        ([usage(7, 100, 50)], {7: 150}, {7: None}),
        ([usage(7, 100), usage(8, 10)], {8: 30}, {7: None, 8: 20}),
        ([usage(7, 100), usage(7, 10)], {7: 170}, {7: None}),
    ],
    ids=["above the peak", "not above the peak", "not listed", "one pid after exec"],
)
def test_a_process_has_at_least_the_bytes_above_its_reserved_peak(usages, bytes_by_pid, bounds):
    assert beside_torch(usages, bytes_by_pid) == bounds
