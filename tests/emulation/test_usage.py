"""What processes leave of what they took."""

from __future__ import annotations

import pytest

from pytest_gpumem.emulation.usage import DeviceUsage, ProcessUsage, RanOut, among_all, read_usages, write_usage

FULL = ProcessUsage(
    began=5,
    ended=9,
    devices=(DeviceUsage(0, 10, 20, 1), DeviceUsage(3, 30, 40, 0)),
    times_out_of_memory=2,
    ran_out=RanOut(3, 100, 30, 40, "/mine/train.py:7 step"),
    expandable=True,
    unknown="a value is read",
    lacking="workspaces are taken as 0",
)
KILLED = ProcessUsage(began=1, ended=None)


def test_all_processes_of_a_folder_are_read_in_the_order_in_which_they_began(tmp_path):
    write_usage(tmp_path, "1-5", FULL)
    write_usage(tmp_path, "2-1", KILLED)
    (tmp_path / "errors").write_text("not a process", encoding="utf-8")
    (tmp_path / ".1-5.json.x.draft").write_text("{", encoding="utf-8")
    assert read_usages(tmp_path) == (KILLED, FULL)


@pytest.mark.parametrize(
    ("device", "visible", "number"),
    [(1, None, 1), (1, "", 1), (1, "4,6", 6), (0, " 3", 3), (2, "4,6", 2), (0, "GPU-1234", 0)],
)
def test_a_device_has_its_number_among_all_whatever_a_process_may_see(device, visible, number):
    assert among_all(device, visible) == number
