"""Private names of torch's CUDA allocator, on an emulated GPU."""

from __future__ import annotations

import pytest


def test_a_gpu_has_allocated_since_its_first_tensor_also_if_statistics_are_reset(on_gpu):
    printed = on_gpu("""
from pytest_gpumem.torch_support.private_api.allocator import cuda_has_allocated
torch.cuda.init()
print(cuda_has_allocated(0))
torch.ones(1, device="cuda")
print(cuda_has_allocated(0))
torch.cuda.reset_accumulated_memory_stats()
torch.cuda.reset_peak_memory_stats()
kept = torch.ones(1, device="cuda")
print(cuda_has_allocated(0))
""")
    assert printed.split() == ["False", "True", "True"]


def test_an_allocation_is_reported_before_it_runs_out_of_memory(on_gpu):
    printed = on_gpu("""
from pytest_gpumem.torch_support.private_api.allocator import observe_out_of_memory
torch.cuda.init()
total = torch.cuda.get_device_properties(0).total_memory
observe_out_of_memory(
    lambda device, requested, of, free: print(device, requested == 2**40, of == total, 0 < free <= total)
)
try:
    torch.empty(2**40, dtype=torch.uint8, device="cuda")
except torch.OutOfMemoryError:
    print("raised")
""")
    assert printed.splitlines() == ["0 True True True", "raised"]


def test_the_drivers_allocator_reports_nothing_and_has_no_segments(on_gpu):
    printed = on_gpu(
        """
from pytest_gpumem.torch_support.private_api.allocator import expandable_segments_are_on, observe_out_of_memory
torch.cuda.init()
observe_out_of_memory(lambda *reported: print(reported))
print(expandable_segments_are_on())
""",
        before="import os\nos.environ['PYTORCH_CUDA_ALLOC_CONF'] = 'backend:cudaMallocAsync,expandable_segments:True'\n",
    )
    assert printed.split() == ["False"]


@pytest.mark.parametrize("on", [True, False])
def test_expandable_segments_are_read_from_the_allocators_settings(on_gpu, on):
    printed = on_gpu(f"""
from pytest_gpumem.torch_support.private_api.allocator import expandable_segments_are_on
torch.cuda.init()
torch.cuda.memory._set_allocator_settings("expandable_segments:{on}")
print(expandable_segments_are_on())
""")
    assert printed.split() == [str(on)]


def test_a_block_is_allocated_until_it_is_returned_or_memory_runs_out(on_gpu):
    printed = on_gpu("""
from pytest_gpumem.torch_support.private_api.allocator import allocate_on_cuda, free_on_cuda
device = torch.device("cuda", 0)
address = allocate_on_cuda(3000, device)
print(address > 0, torch.cuda.memory_stats()["requested_bytes.all.current"])
free_on_cuda(address)
print(torch.cuda.memory_stats()["requested_bytes.all.current"])
try:
    allocate_on_cuda(2**40, device)
except torch.OutOfMemoryError:
    print("raised")
""")
    assert printed.splitlines() == ["True 3000", "0", "raised"]
