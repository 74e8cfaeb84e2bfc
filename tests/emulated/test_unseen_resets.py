"""Resets of torch's peaks for a measurement, which the program must not notice."""

from __future__ import annotations

import pytest

PROGRAM = """
from pytest_gpumem.torch_support.unseen_reset import UnseenResets
resets = UnseenResets()
earlier = torch.cuda.max_memory_allocated, torch.cuda.memory_stats, torch.cuda.reset_peak_memory_stats


def take(megabytes):
    torch.empty(megabytes << 20, dtype=torch.uint8, device="cuda")


def reset_unseen():
    if {ours}:
        resets.reset(0)


def peaks(statistics):
    return {{name: value for name, value in statistics.items() if name.endswith(".peak")}}


def show():
    print(torch.cuda.max_memory_allocated() >> 20, torch.cuda.max_memory_reserved() >> 20, earlier[0]() >> 20)
    print(sorted(peaks(torch.cuda.memory_stats()).items()), peaks(earlier[1]()) == peaks(torch.cuda.memory_stats()))
    if hasattr(torch.accelerator, "max_memory_allocated"):
        print(torch.accelerator.max_memory_allocated() >> 20, torch.accelerator.max_memory_reserved() >> 20)
        print(peaks(torch.accelerator.memory_stats()) == peaks(torch.cuda.memory_stats()))


torch.cuda.init()
kept = torch.empty(3 << 20, dtype=torch.uint8, device="cuda")
take(40)
show()
reset_unseen()
show()
take(10)
show()
reset_unseen()
reset_unseen()
take(50)
show()
"""
RESETS = {
    "torch.cuda": "torch.cuda.reset_peak_memory_stats()",
    "from before": "earlier[2]()",
    "torch.accelerator": "getattr(torch.accelerator, 'reset_peak_memory_stats', earlier[2])()",
    "torch._C": "torch._C._cuda_resetPeakMemoryStats(0)",
}


@pytest.mark.parametrize("reset", RESETS.values(), ids=RESETS)
def test_a_program_reads_and_resets_its_peaks_as_without_our_resets(on_gpu, reset):
    source = f"{PROGRAM}{reset}\nshow()\ntake(5)\nreset_unseen()\nshow()\n"
    seen, alone = (on_gpu(source.format(ours=ours)).splitlines() for ours in (True, False))
    assert seen == alone
    firsts = [line.split()[0] for line in alone if len(line.split()) == 3]
    assert firsts == ["43", "43", "43", "53", "3", "8"]


def test_peaks_of_the_measurement_count_from_any_reset(on_gpu):
    printed = on_gpu("""
from pytest_gpumem.torch_support.unseen_reset import UnseenResets
resets = UnseenResets()


def take(megabytes):
    torch.empty(megabytes << 20, dtype=torch.uint8, device="cuda")
    print(resets.statistics(0)["allocated_bytes"]["all"]["peak"] >> 20)


take(40)
resets.reset(0)
take(10)
take(20)
torch.cuda.reset_peak_memory_stats()
take(5)
resets.reset(0)
take(2)
""")
    assert printed.split() == ["40", "10", "20", "5", "2"]


def test_peaks_that_are_kept_survive_the_programs_resets_until_they_restart(on_gpu):
    printed = on_gpu("""
from pytest_gpumem.emulating.emulated_process.cuda_statistics import CudaStatistics
from pytest_gpumem.emulating.emulated_process.kept_peaks import KeptPeaks
torch.cuda.init()
kept = KeptPeaks(CudaStatistics())
kept.begin()


def take(megabytes):
    torch.empty((megabytes << 20) - 100, dtype=torch.uint8, device="cuda")
    kept.take()
    print(kept.allocated[0], kept.requested[0], torch.cuda.max_memory_allocated() >> 20)


take(40)
torch.cuda.reset_peak_memory_stats()
take(10)
kept.restart()
take(5)
torch.cuda.reset_peak_memory_stats()
take(4)
kept.restart()
torch.cuda.reset_peak_memory_stats()
print(kept.allocated[0], kept.requested[0])
""")
    million = 1 << 20
    assert [line.split() for line in printed.splitlines()] == [
        [str(40 * million), str(40 * million - 100), "40"],
        [str(40 * million), str(40 * million - 100), "10"],
        [str(5 * million), str(5 * million - 100), "10"],
        [str(5 * million), str(5 * million - 100), "4"],
        ["0", "0"],
    ]


def test_a_freed_block_that_waits_for_another_stream_is_not_live(on_gpu):
    """The allocator counts it as requested until the next allocation, and it would look like a leak."""
    printed = on_gpu("""
from pytest_gpumem.emulating.emulated_process.cuda_statistics import CudaStatistics
from pytest_gpumem.emulating.emulated_process.kept_peaks import KeptPeaks
kept = torch.ones(10, device="cuda")
freed = torch.ones(1 << 20, device="cuda")
freed.record_stream(torch.cuda.Stream())
del freed
print(torch.cuda.memory_stats()["requested_bytes.all.current"], KeptPeaks(CudaStatistics()).live(0))
""")
    assert printed.split() == [str((4 << 20) + 40), "40"]
