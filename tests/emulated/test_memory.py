"""Bytes on an emulated GPU: torch's own allocator, to the byte, in every process alike."""

from __future__ import annotations

import pytest

from tests.workspaces import KEPT, RELEASE

GPT2 = """
import os
os.environ["HF_HUB_OFFLINE"] = "1"
from transformers import GPT2Config, GPT2LMHeadModel
from transformers.utils import logging
logging.set_verbosity_error()
def train(precision, layers=12, steps=3):
    torch.manual_seed(0)
    model = GPT2LMHeadModel(GPT2Config(n_layer=layers)).cuda().train()
    if precision == "bf16":
        model = model.bfloat16()
    elif precision == "fp16":
        model = model.half()
    ids = torch.randint(0, 50257, (8, 1024)).cuda()
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-4, foreach=True)
    scaler = torch.amp.GradScaler("cuda", enabled=precision == "amp-fp16")
    dtype = {"amp-bf16": torch.bfloat16, "amp-fp16": torch.float16}.get(precision)
    for _ in range(steps):
        torch.cuda.reset_peak_memory_stats()
        with torch.autocast("cuda", dtype or torch.bfloat16, enabled=dtype is not None):
            loss = model(input_ids=ids, labels=ids).loss
        scaler.scale(loss).backward()
        scaler.unscale_(optimizer) if scaler.is_enabled() else None
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        scaler.step(optimizer)
        scaler.update()
        optimizer.zero_grad(set_to_none=True)
        del loss
    stats = torch.cuda.memory_stats()
    return stats["requested_bytes.all.peak"], stats["requested_bytes.all.current"]
"""
LAYERS = 2
PARAMETERS = 39_385_344 + LAYERS * 7_087_872
WORKSPACES = 2 * KEPT
"""Of the thread that runs forward and of autograd's."""
LT_WORKSPACE = {(2, 11): 2**20}
"""cuBLASLt's, by release of torch, where it is not cuBLAS's own (TORCH_CUBLASLT_UNIFIED_WORKSPACE)."""
PEAK = {(2, 6): 13_593_158_152, (2, 11): 13_594_206_920, (2, 13): 13_593_158_440}
"""Of the step in amp-bf16, by release of torch."""
BATCH = 8 * 1024 * 8


@pytest.mark.parametrize(
    ("precision", "bytes_a_parameter", "scaler"),
    [("fp32", 12, 0), ("amp-fp16", 12, 8), ("bf16", 6, 0)],
)
def test_what_lives_between_two_steps_is_the_sum_by_hand(on_gpu, precision, bytes_a_parameter, scaler):
    pytest.importorskip("transformers", "5.0")
    _, live = map(int, on_gpu(GPT2 + f"print(*train({precision!r}, {LAYERS}))").split())
    assert live == bytes_a_parameter * PARAMETERS + WORKSPACES + LT_WORKSPACE.get(RELEASE, 0) + BATCH + scaler


def test_a_training_step_has_the_same_peak_in_every_process_and_after_other_work(on_gpu):
    pytest.importorskip("transformers", "5.0")
    alone = on_gpu(GPT2 + "print(train('amp-bf16')[0])")
    before = "x = [torch.randn(1000, 1000 + i, device='cuda') for i in range(50)]; del x; torch.arange(9).cuda().sum().item()\n"
    assert on_gpu(GPT2 + before + "print(train('amp-bf16')[0])") == alone
    assert int(alone) == PEAK.get(RELEASE, int(alone))


def test_memory_runs_out_with_the_message_of_torch(on_gpu):
    source = """
try:
    torch.empty(2**40, device="cuda")
except torch.OutOfMemoryError as error:
    print(str(error).splitlines()[0][:120])
kept = []
try:
    while True:
        kept.append(torch.empty(2**28, device="cuda"))
except torch.OutOfMemoryError:
    print(len(kept), torch.cuda.get_device_properties(0).total_memory)
"""
    said = on_gpu(source, "24GB").splitlines()
    assert said[0].startswith(
        "CUDA out of memory. Tried to allocate 4096.00 GiB. GPU 0 has a total capacity of 22.35 GiB"
    )
    assert said[1] == "21 24000000000"


def test_expandable_segments_leave_less_unused(on_gpu):
    source = """
for size in (300, 200, 400, 350):
    x = torch.empty(size * 2**20 + 1, dtype=torch.uint8, device="cuda")
    del x
print(torch.cuda.memory_reserved())
"""
    plain = int(on_gpu(source))
    expandable = int(on_gpu(source, PYTORCH_CUDA_ALLOC_CONF="expandable_segments:True"))
    assert expandable == 420 * 2**20
    assert plain > expandable


def test_a_block_that_another_stream_uses_is_reused_only_when_the_host_has_waited(on_gpu):
    source = """
stream = torch.cuda.Stream()
x = torch.empty(2**20, device="cuda")
where = x.data_ptr()
x.record_stream(stream)
with torch.cuda.stream(stream):
    x + 1
del x
print(torch.empty(2**20, device="cuda").data_ptr() == where)
torch.cuda.synchronize()
print(torch.empty(2**20, device="cuda").data_ptr() == where)
"""
    assert on_gpu(source) == "False\nTrue\n"


def test_graphs_pinned_memory_and_several_gpus_work(on_gpu):
    source = """
x = torch.ones(100, device="cuda:3")
print(x.device, torch.cuda.device_count(), torch.cuda.memory_allocated(3), torch.cuda.memory_allocated(0))
graph = torch.cuda.CUDAGraph()
static = torch.ones(1000, device="cuda")
with torch.cuda.graph(graph):
    static * 2
graph.replay()
print(torch.ones(5).pin_memory().cuda(non_blocking=True).tolist())
"""
    assert on_gpu(source, "h100x8") == "cuda:3 8 512 0\n[1.0, 1.0, 1.0, 1.0, 1.0]\n"


def test_a_gpu_can_view_pinned_memory(on_gpu):
    source = """
class View:
    __cuda_array_interface__ = {"shape": (4,), "typestr": "<i8", "data": (host.data_ptr(), False), "version": 2}
view = torch.as_tensor(View(), device="cuda")
print(view.device, view.data_ptr() == host.data_ptr(), view.tolist())
"""
    assert on_gpu("host = torch.arange(4).pin_memory()" + source) == "cuda:0 True [0, 1, 2, 3]\n"


def test_a_training_step_asks_for_nothing_that_the_emulated_gpu_lacks(processes):
    step = """
import torch
model = torch.nn.Linear(64, 64, device="cuda")
optimizer = torch.optim.AdamW(model.parameters())
model(torch.ones(64, 64, device="cuda")).sum().backward()
optimizer.step()
"""
    done = processes.run(step, new=True)
    assert (done.returncode, done.stderr) == (0, "")


LACKING = {
    "torch.linalg.cholesky(x)": "cusolver",
    "torch.linalg.qr(x)": "cusolver",
    "torch.linalg.svd(x)": "cusolver",
    "torch.linalg.eigh(x)": "cusolver",
    "torch.linalg.solve(x, x)": "cusolver",
    "torch.linalg.inv(x)": "cusolver",
    "torch.linalg.eig(x)": "torch.linalg.eig",
    "torch.linalg.eigvals(x)": "cusolver",
    "torch.fft.fft(x)": "cufft",
    "torch.stft(x, 64, window=x[0, :64], return_complex=True)": "cufft",
    "torch.fft.rfft2(x.requires_grad_()).abs().sum().backward()": "cufft",
    "torch.nn.functional.ctc_loss(x[:, None], i[:30], i[:1] + 299, i[:1] + 29)": "cudnn",
}
"""What is called, with a matrix and a list of integers of the host, and the library that is asked."""


def test_the_error_of_what_the_emulated_gpu_lacks_says_what_it_is_and_what_to_do(on_gpu):
    source = f"""
x, i = torch.randn(300, 300, device="cuda"), torch.arange(1, 40, dtype=torch.int32)
for code, library in {LACKING!r}.items():
    try:
        exec(code)
    except RuntimeError as error:
        text = str(error)
        ok = text.startswith(f"the emulated GPU lacks {{library}}") and " of lib" in text
        if not ok or "measure this on a GPU or on the CPU (--gpumem-device=cpu)" not in text:
            print(code, text)
    else:
        print(code, "passed")
print("the emulated GPU goes on:", int(torch.ones(3, device="cuda").sum()))
"""
    assert on_gpu(source) == "the emulated GPU goes on: 3\n"


def test_an_error_of_the_runtime_names_the_function(on_gpu):
    said = on_gpu("torch.ones(3, device='cuda').untyped_storage()._share_cuda_()", fails=True)
    assert "CUDA error: the emulated GPU lacks cudaIpcGetMemHandle of libcudart" in said


def test_a_library_of_another_s_gets_a_status_and_no_exception(on_gpu):
    # As from bitsandbytes, which Python calls through ctypes: nothing there would catch it.
    source = """
import ctypes
from pytest_gpumem.emulating.emulation.build import stand_ins
from pytest_gpumem.emulating.emulation.torch_build import installed_torch
(path,) = (path for path in stand_ins(installed_torch()) if path.name.startswith("libcufft"))
print(ctypes.CDLL(str(path)).cufftCreate(None))
"""
    assert on_gpu(source) == "16\n"


def test_sampling_an_image_by_cudnn_trains(on_gpu):
    source = """
image, grid = (torch.randn(2, *size, device="cuda", requires_grad=True) for size in ((3, 8, 8), (4, 4, 2)))
y = torch.nn.functional.grid_sample(image, grid, align_corners=True)
y.sum().backward()
print(*y.shape, *image.grad.shape, *grid.grad.shape)
"""
    assert on_gpu(source) == "2 3 4 4 2 3 8 8 2 4 4 2\n"


def test_a_limit_on_address_space_is_told(on_gpu):
    source = """
import resource
now = int(open("/proc/self/statm").read().split()[0]) * 4096
resource.setrlimit(resource.RLIMIT_AS, (now + 2**30, now + 2**30))
torch.empty(2**31, device="cuda")
"""
    said = on_gpu(source, fails=True)
    assert "could not reserve 8589934592 bytes of address space for the emulated GPU" in said
    assert "ulimit -v" in said


@pytest.mark.parametrize("gpu", ["v100", "l4", "b200"])
def test_kernels_are_those_that_torch_was_compiled_with_for_this_gpu(on_gpu, gpu):
    # CUB, which sorts the indices of an embedding, asks for the version of its own code.
    source = """
embedding = torch.nn.Embedding(50257, 8).cuda()
try:
    embedding(torch.zeros(8192, dtype=torch.int64).cuda()).sum().backward()
    print("runs")
except RuntimeError as error:
    print("no kernel" if "no kernel image is available for execution on the device" in str(error) else error)
major, minor = torch.cuda.get_device_capability()
print(any(f"sm_{major}{older}" in torch.cuda.get_arch_list() for older in range(minor + 1)))
"""
    said, compiled = on_gpu(source, gpu).splitlines()
    assert said == ("runs" if compiled == "True" else "no kernel")


RAGGED = """
torch.manual_seed(0)
layers = [torch.nn.TransformerEncoderLayer(256, 4, 1024, batch_first=True, dropout=0.0) for _ in range(4)]
net = torch.nn.Sequential(torch.nn.Embedding(1000, 256), *layers, torch.nn.Linear(256, 1000)).cuda()
optimizer = torch.optim.AdamW(net.parameters())
for length in (50, *{lengths}):
    net(torch.zeros(8, length, dtype=torch.long, device="cuda")).sum().backward()
    optimizer.step()
    optimizer.zero_grad()
stats = torch.cuda.memory_stats()
print(stats["requested_bytes.all.peak"], stats["allocated_bytes.all.peak"])
"""


ORDERS = ((100, 173, 57, 211, 140, 96), (96, 211, 57, 140, 173, 100))
ORDERS_DIFFERENCE = {(2, 13): 778_240, (2, 15): 778_240}
"""Allocated bytes, by torch release, by which the peaks of both orders differ if threads keep their workspaces."""


def test_the_order_of_ragged_batches_moves_allocated_and_not_requested_bytes(on_gpu):
    # torch reads the variable from 2.15 on. Earlier releases always keep workspaces.
    runs = [on_gpu(RAGGED.format(lengths=order), TORCH_CUBLAS_WORKSPACE_CACHE="1").split() for order in ORDERS]
    (requested, other_requested), (allocated, other_allocated) = (map(int, peaks) for peaks in zip(*runs, strict=True))
    assert requested == other_requested
    difference = abs(allocated - other_allocated)
    assert 0 < difference < 0.01 * allocated
    assert difference == ORDERS_DIFFERENCE.get(RELEASE, difference)


@pytest.mark.skipif(KEPT > 0, reason="up to torch 2.14, threads keep their workspaces")
def test_the_order_of_ragged_batches_moves_no_bytes_if_workspaces_are_returned(on_gpu):
    assert [on_gpu(RAGGED.format(lengths=order)) for order in ORDERS] == ["178970856 180800000\n"] * 2


FSDP = """
import torch.distributed as dist
from torch.distributed.fsdp import FullyShardedDataParallel
from torch.distributed.fsdp.wrap import ModuleWrapPolicy
from torch.testing._internal.distributed.fake_pg import FakeStore
dist.init_process_group("fake", store=FakeStore(), rank=0, world_size=2)
net = torch.nn.Sequential(*[torch.nn.Linear(1024, 1024) for _ in range(8)]).cuda()
net = FullyShardedDataParallel(net, auto_wrap_policy=ModuleWrapPolicy({torch.nn.Linear}))
torch.cuda.reset_peak_memory_stats()
net(torch.zeros(8, 1024, device="cuda")).sum().backward()
stats = torch.cuda.memory_stats()
print(stats["requested_bytes.all.peak"], stats["allocated_bytes.all.peak"])
"""


def test_under_fsdp_more_can_be_requested_than_allocated(on_gpu):
    """A freed block that another stream still uses is requested until the host has waited, and not allocated."""
    requested, allocated = map(int, on_gpu(FSDP).split())
    assert requested > allocated
