"""Private names of torch's CUDA allocator, on an emulated GPU."""

from __future__ import annotations

import pytest

from pytest_gpumem.emulating.emulated_process.counter_library import counter_library
from pytest_gpumem.torch_support.private_api.native_frames import naming_native_frames

LIBRARY = counter_library()


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


def test_each_reader_of_statistics_has_the_bytes_of_a_gpus_tensors(on_gpu):
    printed = on_gpu("""
from pytest_gpumem.torch_support.private_api.allocator import PEAK_READERS, cuda_statistics
kept = torch.ones(1250, device="cuda")
for read in (cuda_statistics, *(getattr(torch._C, name) for name in PEAK_READERS if hasattr(torch._C, name))):
    torch.ones(2500, device="cuda")
    bytes_of = {name: values["all"] for name, values in read(0).items() if name.endswith("_bytes")}
    print(bytes_of["requested_bytes"]["current"], bytes_of["allocated_bytes"]["current"], bytes_of["requested_bytes"]["peak"])
""")
    assert set(printed.splitlines()) == {"5000 5120 15000"}


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


def test_a_snapshot_with_frames_and_notes_in_a_thread_imports_nothing(on_gpu):
    printed = on_gpu("""
import sys
import threading
from pytest_gpumem.emulating.emulated_process.block_recorder import BlockRecorder

torch.cuda.init()
recorder = BlockRecorder()
recorder.begin()
model = torch.nn.Sequential(torch.nn.Linear(4, 4)).cuda()
kept = model(torch.ones(4, device="cuda"))
for name in [name for name in sys.modules if name.startswith(("torch._inductor", "torch._dynamo"))]:
    del sys.modules[name]  # the tests' server has loaded them
vars(torch).pop("_inductor", None)
before = set(sys.modules)
recorded = {}
thread = threading.Thread(target=lambda: recorded.update(recorder.recorded({})))
thread.start()
thread.join()
print(recorder.failure, set(sys.modules) - before)
others = [blocks for blocks in recorded[0].at_peak if blocks.nbytes == 16 and blocks.category == "other"]
print(sorted(blocks.module for blocks in others if blocks.frames))
recorder.end()
print(torch._C._cuda_isHistoryEnabled(), len(torch.nn.modules.module._global_forward_hooks))
""")
    assert printed.splitlines() == ["None set()", "['', 'Sequential.0']", "False 0"]


def test_a_program_that_begins_its_own_history_ends_the_recording_and_keeps_its_own(on_gpu):
    printed = on_gpu("""
from pytest_gpumem.emulating.emulated_process.block_recorder import BlockRecorder

torch.cuda.init()
recorder = BlockRecorder()
recorder.begin()
ours = torch.ones(1000, device="cuda")
torch.cuda.memory._record_memory_history(max_entries=100)
theirs = torch.ones(2000, device="cuda")
print(recorder.recorded({}), recorder.failure)
recorder.begin()
recorder.end()
print([entry["size"] for entry in torch.cuda.memory._snapshot()["device_traces"][0] if entry["action"] == "alloc"])
""")
    assert printed.splitlines() == ["{} the program records them itself", "[8000]"]


def test_a_program_that_allocates_more_often_than_the_history_has_room_says_so(on_gpu):
    printed = on_gpu("""
from pytest_gpumem.emulating.emulated_process import block_recorder

block_recorder.MOST_ENTRIES = 12
torch.cuda.init()
recorder = block_recorder.BlockRecorder()
for count in (1, 10):
    recorder.begin()
    for _ in range(count):
        torch.ones(1000, device="cuda")
    print(len(recorder.recorded({})), recorder.failure)
""")
    assert printed.splitlines() == ["1 None", "0 the history has no room for more than 12 entries"]


def test_a_program_with_more_nodes_than_the_history_has_room_says_so(on_gpu):
    printed = on_gpu(f"""
from pytest_gpumem.emulating.emulated_process import block_recorder

block_recorder.MOST_ENTRIES = 4096
kept = torch.ones(1000, device="cuda", requires_grad=True)
recorder = block_recorder.BlockRecorder(block_recorder.CudaHistory({str(LIBRARY)!r}))
for count in (1, 5000):
    recorder.begin()
    for _ in range(count):
        kept.view(-1)
    print(len(recorder.recorded({{}})), recorder.failure)
""")
    assert printed.splitlines() == ["1 None", "0 the history has no room for more than 4,096 entries"]


def test_frees_are_counted(on_gpu):
    printed = on_gpu("""
from pytest_gpumem.torch_support.private_api.allocator import cuda_frees
kept = torch.empty(8, device="cuda")
before = cuda_frees(0)
del kept
print(cuda_frees(0) - before)
""")
    assert printed == "1\n"


def test_a_history_with_native_frames_names_operators_and_nodes(on_gpu):
    printed = on_gpu(
        """
from pytest_gpumem.torch_support.private_api.allocator import cuda_snapshot, start_cuda_history, stop_cuda_history
from pytest_gpumem.torch_support.private_api.native_frames import names_native_frames, node_in, operator_in
weight = torch.ones(64, 64, device="cuda", requires_grad=True)
for native in (False, names_native_frames()):
    start_cuda_history(native=native)
    weight.exp().sum().backward()
    names = {frame["name"] for entry in cuda_snapshot()["device_traces"][0] for frame in entry.get("frames", ())}
    stop_cuda_history()
    print(native, "aten::exp" in map(operator_in, names), "ExpBackward0" in map(node_in, names))
""",
        **naming_native_frames({}),
    )
    assert printed.splitlines() == ["False False False", "True True True"]
