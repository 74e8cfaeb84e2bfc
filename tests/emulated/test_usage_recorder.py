"""The recorder in a measured process on an emulated GPU."""

from __future__ import annotations

RECORD = """
from pathlib import Path
from pytest_gpumem.emulating.emulated_process import usage_recorder
from pytest_gpumem.emulating.emulated_process.usage import read_usages
folder = Path("usage")
folder.mkdir()
endings = []
torch.cuda.init()
"""


def test_an_ended_process_keeps_its_last_report_when_it_is_asked(on_gpu):
    printed = on_gpu(f"""{RECORD}
recorder = usage_recorder._Recorder(folder, 60.0, ("python",))
recorder.begin()
torch.ones(1 << 20, device="cuda")
recorder.end()
print(recorder.begin_window(1), [usage.ended is None for usage in read_usages(folder)])
recorder._go_on()
print(recorder.begin_window(1).devices[0].allocated >> 20, [usage.ended is None for usage in read_usages(folder)])
""")
    assert printed.splitlines() == ["None [False]", "4 [True]"]


def test_a_window_has_new_peaks_and_the_live_bytes_at_its_begin(on_gpu):
    printed = on_gpu(f"""{RECORD}
recorder = usage_recorder._Recorder(folder, 60.0, ("python",))
recorder.begin()
kept = torch.ones(250, device="cuda")
torch.ones(1 << 20, device="cuda")
for window in (1, 2, 3):
    usage = recorder.begin_window(window)
    (gpu,) = usage.devices
    print(usage.window, gpu.requested, gpu.live_before, gpu.live, gpu.allocations)
    if window == 1:
        more = torch.ones(500, device="cuda")
""")
    assert printed.splitlines() == [
        f"None {(4 << 20) + 1000} 0 1000 2",
        "1 3000 1000 3000 1",
        "2 3000 3000 3000 0",
    ]


def test_a_report_that_cannot_be_written_does_not_fail_the_program(on_gpu):
    printed = on_gpu(f"""{RECORD}
def fails(*_):
    raise OSError("no space left")
usage_recorder.write_usage = fails
usage_recorder.record_usage(folder, endings.append, seconds=60.0)
print(torch.ones(3, device="cuda").sum().item())
endings[0]()
""")
    assert printed.split() == ["3.0"]


def test_an_allocator_without_counts_shows_that_it_allocated_by_its_peak(on_gpu):
    printed = on_gpu(
        f"""{RECORD}
recorder = usage_recorder._Recorder(folder, 60.0, ("python",))
recorder.begin()
kept = torch.ones(1 << 20, device="cuda")
for window in (1, 2, 3):
    (gpu,) = recorder.begin_window(window).devices
    print(torch.cuda.get_allocator_backend(), gpu.allocations)
    if window == 1:
        torch.ones(500, device="cuda")
""",
        before="import os\n",
        PYTORCH_CUDA_ALLOC_CONF="backend:cudaMallocAsync",
    )
    assert printed.splitlines() == ["cudaMallocAsync 1", "cudaMallocAsync 1", "cudaMallocAsync 0"]
