"""The counter of CUDA allocations sees each allocation and each free when it happens."""

from __future__ import annotations

from pytest_gpumem.emulating.emulated_process.counter_library import counter_library

LIBRARY = counter_library()
BEGIN = f"""
from pytest_gpumem.emulating.emulated_process.cuda_reports import CudaReports

def of_torch(device=0):
    statistics = torch.cuda.memory_stats_as_nested_dict(device)
    nbytes = statistics["allocated_bytes"]["all"]
    return nbytes["current"], nbytes["peak"], statistics["allocation"]["all"]["allocated"]

older = torch.empty(3000, device="cuda")
reports = CudaReports({str(LIBRARY)!r})
"""


def test_the_counter_has_the_bytes_and_allocations_of_torchs_statistics(on_gpu):
    printed = on_gpu(f"""{BEGIN}
before = of_torch()
kept = torch.empty(1000, device="cuda")
print(reports.read(0) == (12288 + 4096, 12288 + 4096, 1), of_torch()[2] - before[2])
model = torch.nn.Linear(512, 512, device="cuda")
for _ in range(3):
    model(torch.empty(64, 512, device="cuda")).sum().backward()
print(reports.read(0)[:2] == of_torch()[:2], reports.read(0).allocations == of_torch()[2] - before[2])
reports.restart_peak(0)
torch.cuda.reset_peak_memory_stats()
print(reports.read(0)[:2] == of_torch()[:2])
del kept, older, model
print(reports.read(0)[:2] == of_torch()[:2])
""")
    assert printed.split("\n")[:4] == ["True 1", "True True", "True", "True"]


def test_devices_and_threads_count_apart_from_each_other(on_gpu):
    printed = on_gpu(
        f"""{BEGIN}
import threading
kept = []
threads = [threading.Thread(target=lambda: kept.append(torch.empty(1 << 20, device="cuda:1"))) for _ in range(4)]
[thread.start() for thread in threads]
[thread.join() for thread in threads]
print(reports.read(0), reports.read(1).live >> 20, reports.read(1).allocations)
""",
        "h100x2",
    )
    assert printed.splitlines() == ["CudaBytes(live=0, peak=0, allocations=0) 16 4"]


def test_torchs_profiler_still_gets_the_reports(on_gpu):
    printed = on_gpu(f"""{BEGIN}
from torch.profiler import ProfilerActivity, profile
with profile(activities=[ProfilerActivity.CPU], profile_memory=True) as recorded:
    torch.empty(1000, device="cuda")
print(max(event.device_memory_usage for event in recorded.events()))
""")
    assert printed.splitlines()[-1] == "4096"


def test_an_allocator_of_the_driver_reports_nothing(on_gpu):
    printed = on_gpu(
        f"""{BEGIN}
kept = torch.empty(1000, device="cuda")
print(reports.read(0), of_torch()[0] > 0)
""",
        PYTORCH_CUDA_ALLOC_CONF="backend:cudaMallocAsync",
    )
    assert printed.splitlines() == ["CudaBytes(live=0, peak=0, allocations=0) True"]
