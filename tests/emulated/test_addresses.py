"""Addresses of an emulated GPU: those that a driver gave, after the same allocations and releases."""

from __future__ import annotations

import json
from pathlib import Path

BENCHMARKS = Path(__file__).parents[2] / "benchmarks"
RECORDED = BENCHMARKS / "results" / "nvidia-h100-80gb-hbm3" / "addresses.json"
REPLAY = f"""
import json, sys
sys.path.insert(0, {str(BENCHMARKS)!r})
from addresses import MIB, Memory, traces
memory = Memory()
# What the driver had left of the spans that it had reserved for itself: of the first 22 MiB, then 414 and 6.
memory.allocate(8)  # beside torch's 2
second = memory.allocate(500)
memory.allocate(8)
memory.allocate(4)
third = memory.allocate(26)
memory.release(second)
memory.allocate(86)
found = {{name: [at // MIB for at in memory.run(trace)] for name, trace in traces().items()}}
print(json.dumps([second // MIB, third // MIB, found]))
"""


def test_addresses_are_those_that_a_driver_gave(on_gpu):
    recorded = json.loads(RECORDED.read_text(encoding="utf-8"))["addresses"]
    # A process that torch alone is loaded into: other packages bring a CUDA runtime of their own.
    second, third, emulated = json.loads(on_gpu(REPLAY, before="\n"))
    first = second + 512

    def expected(mib: int) -> int:
        if mib < 0:  # in spans of these allocations, the first of which ended at -480
            return third + 480 + mib
        return third + mib if mib < 32 else second + 86 + mib - 32 if mib < 446 else first + 10 + mib - 522

    assert sum(map(len, recorded.values())) == 2028
    assert emulated == {name: list(map(expected, addresses)) for name, addresses in recorded.items()}


def test_address_space_ascends_where_the_host_gives_it_so(on_gpu):
    source = "kept = [torch.empty(64 << 20, dtype=torch.uint8, device='cuda') for _ in range(3)]\n"
    shown = "print([(one.data_ptr() - kept[0].data_ptr()) >> 20 for one in kept])"
    assert on_gpu(source + shown) == "[0, -64, -128]\n"
    assert on_gpu(source + shown, GPUMEM_EMULATED_ADDRESSES="ascending") == "[0, 64, 128]\n"


def test_each_gpu_has_addresses_of_its_own(on_gpu):
    source = """
def offset(device):
    return torch.cuda.caching_allocator_alloc(12 * MIB, device=device) - base[device]
base = {device: torch.cuda.caching_allocator_alloc(100 * MIB, device=device) for device in (1, 0)}
print(offset(1) // MIB, offset(0) // MIB, offset(1) // MIB, offset(0) // MIB)
"""
    assert on_gpu("MIB = 2**20\n" + source, gpu="h100x2") == "100 100 112 112\n"
