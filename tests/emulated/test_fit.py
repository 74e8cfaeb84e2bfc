"""Which GPUs a program fits into, by running out of memory in PyTorch's own allocator."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import time
from typing import TYPE_CHECKING, Any

import pytest

from tests.emulated.processes import REPOSITORY
from tests.support.processes import wait_until_ended
from tests.workspaces import KEPT, WORKSPACE

if TYPE_CHECKING:
    from collections.abc import Callable

MIB = 2**20
BLOCK = "import torch\n\n\ndef block(mib):\n    return torch.empty(mib * 2**20, dtype=torch.uint8, device='cuda')\n\n\n"
NEEDS_TWO_GIB = BLOCK + "kept = block(2000)\ntorch.cuda.reset_peak_memory_stats()\ndel kept\ntorch.cuda.empty_cache()\n"
NEEDS_TWO_GIB += "torch.cuda.reset_peak_memory_stats()\nblock(10)\n"
IN_BACKWARD = """
import torch


def train():
    model = torch.nn.Sequential(*(torch.nn.Linear(2048, 2048, bias=False) for _ in range(10))).cuda()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    for step in range(100):
        loss = model(torch.ones(1, 2048, device="cuda")).sum()
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
    raise SystemExit("should have been ended before")


train()
"""
# Four segments of 200 MiB, of each of which 80 MiB stay unused: 250 MiB more are 1,050 in all, or 730 where a segment can give
# back what is unused of it. 910 MiB are there.
IN_PIECES = (
    BLOCK
    + "large = [block(200) for _ in range(4)]\nkept = []\nwhile large:\n    large.pop()\n    kept.append(block(120))\nblock(250)\n"
)
CHILDREN = """
import subprocess, sys, time
code = '''
import os, sys, time, torch
x = torch.empty(500 * 2**20, dtype=torch.uint8, device="cuda")
open(sys.argv[1], "w").close()
while not all(os.path.exists(name) for name in sys.argv[1:]): time.sleep(0.01)
os._exit(0)
'''
def child(*names):
    return subprocess.Popen([sys.executable, "-c", code, *names])
if sys.argv[1] == "together":
    assert [one.wait() for one in (child("a", "b"), child("b", "a"))] == [0, 0]
else:
    assert [child("a").wait(), child("b").wait()] == [0, 0]
"""
RANKS = """
import os, subprocess, sys
if "RANK" not in os.environ:  # as torchrun does, which loads torch for that
    each = [{"RANK": rank, "LOCAL_RANK": rank, "WORLD_SIZE": "2", "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": "0"} for rank in "01"]
    started = [subprocess.Popen([sys.executable, *sys.argv], env={**os.environ, **variables}) for variables in each]
    sys.exit(max(one.wait() for one in started))
import torch
import torch.distributed as dist
rank = int(os.environ["LOCAL_RANK"])
torch.cuda.set_device(rank)
dist.init_process_group("nccl", init_method=f"file://{os.path.abspath('store')}-{os.environ['GPUMEM_EMULATED']}", rank=rank, world_size=2)
model = torch.nn.parallel.DistributedDataParallel(torch.nn.Linear(4096, 4096, bias=False).cuda())
optimizer = torch.optim.AdamW(model.parameters())
for _ in range(3):
    model(torch.ones(4, 4096, device="cuda")).sum().backward()
    optimizer.step()
    optimizer.zero_grad()
if rank == 1:
    torch.empty(1000 * 2**20, dtype=torch.uint8, device="cuda")
dist.destroy_process_group()
"""


@pytest.fixture
def fit(processes, tmp_path) -> Callable[..., subprocess.CompletedProcess[str]]:
    def run(source: str, *arguments: str, program: tuple[str, ...] = ("program.py",), new: bool = False, **more: str):
        (tmp_path / "program.py").write_text(source, encoding="utf-8")
        return processes.gpumem("fit", *arguments, *program, new=new, **more)

    return run


@pytest.fixture
def found(fit) -> Callable[..., list[dict[str, Any]]]:
    """What is found for each of the GPUs, checked against the exit status."""

    def run(*given: str, status: int, **more: Any) -> list[dict[str, Any]]:
        # Nothing is run again but where the test is about that.
        more = {"PYTORCH_CUDA_ALLOC_CONF": "expandable_segments:False", **more}
        done = fit(given[0], "--format", "json", *given[1:], **more)
        assert done.returncode == status, done.stdout + done.stderr
        return json.loads(done.stdout)["gpus"]

    return run


def test_it_fits_where_there_is_room_and_not_where_there_is_not(fit):
    done = fit(NEEDS_TWO_GIB, "--device", "1GB", "--device", "4GB", new=True)
    assert done.returncode == 1, done.stderr
    lines = done.stdout.splitlines()
    assert lines[-1] == "needs 2.10 GB reserved (emulated): fits H100 with 4GB; not H100 with 1GB"
    assert "H100 with 1GB: out of memory at program.py:5 block: 2.10 GB wanted, 0 B allocated and 0 B reserved" in lines
    message = next(line for line in lines if line.startswith("  "))
    assert message.startswith(
        "  CUDA out of memory. Tried to allocate 1.95 GiB. GPU 0 has a total capacity of 953.67 MiB"
    )
    assert "[2/2] H100 with 4GB (emulated) ... fits, 2.10 GB reserved" in done.stderr


def test_the_context_is_taken_off_once(found):
    room = 1000 - 520
    fits, lacks = found(BLOCK + f"block({room})", "--device", "1000MiB", "--device", "998MiB", status=1)
    assert (fits["reserved"], fits["outcome"], lacks["outcome"]) == (room * MIB, "fits", "out of memory")


def test_memory_in_pieces_fits_with_expandable_segments_only(fit, found):
    done = fit(IN_PIECES, "--device", "1500MB")
    assert done.returncode == 1, done.stderr
    assert done.stdout.splitlines()[-1] == (
        "fits none (emulated); not H100 with 1500MB; with expandable segments 838.86 MB: fits H100 with 1500MB"
    )
    (set_by_user,) = found(
        IN_PIECES, "--device", "1500MB", status=0, PYTORCH_CUDA_ALLOC_CONF="expandable_segments:True"
    )
    assert set_by_user["expandable"]
    own_settings = "import os\nos.environ['PYTORCH_CUDA_ALLOC_CONF'] = ''\n" + IN_PIECES
    (own,) = found(own_settings, "--device", "1500MB", status=1, PYTORCH_CUDA_ALLOC_CONF="")
    assert not own["with_expandable_segments"]["expandable"]


def test_a_program_ends_after_the_steps_and_backward_is_shown_at_its_callers_line(found):
    # Behind each step it keeps 256 MiB more.
    keeps = "optimizer.zero_grad()\n        model.kept = *getattr(model, 'kept', ()), torch.empty(2**26, device='cuda')"
    program = IN_BACKWARD.replace("optimizer.zero_grad()", keeps)
    # Ten matrices of 16 MiB twice, and a workspace of 32 MiB for each thread, do not fit into 315 MiB.
    ended, lacks = found(program, "--device", "2GB", "--device", "835MiB", "--steps", "2", status=1)
    assert ended["outcome"] == "fits"
    assert ended["allocated"] // (256 * MIB) == (20 * 16 * MIB + max(2 * KEPT, WORKSPACE)) // (256 * MIB) + 2
    assert lacks["ran_out"]["line"].endswith("program.py:10 train")
    assert lacks["ran_out"]["wanted"] in (16 * MIB, 32 * MIB)


INFERS = """
import contextlib, sys
import torch

layers = 1 if "outputs" in sys.argv else 8
model = torch.nn.Sequential(*(torch.nn.Sequential(torch.nn.Linear(1024, 1024), torch.nn.ReLU()) for _ in range(layers))).cuda()
inputs, kept = torch.ones(4096, 1024, device="cuda"), []
if "optimizer" in sys.argv:
    optimizer = torch.optim.SGD(model.parameters())
if "backward" in sys.argv:
    model(inputs).sum().backward()
with torch.no_grad() if "no_grad" in sys.argv else contextlib.nullcontext():
    for _ in range(1000):
        kept.append(model(inputs))
"""


@pytest.mark.parametrize(
    ("how", "noted"),
    [("plain", True), ("optimizer", False), ("backward", False), ("no_grad", False), ("outputs", False)],
)
def test_graphs_that_fill_the_card_of_a_program_without_backward_are_noted(fit, how, noted):
    done = fit(
        INFERS, "--device", "2GB", program=("program.py", how), PYTORCH_CUDA_ALLOC_CONF="expandable_segments:False"
    )
    assert done.stdout.splitlines()[-1].startswith("fits none"), done.stdout + done.stderr
    assert ("run it under torch.no_grad()" in done.stdout) == noted


def test_a_program_that_fails_by_itself_is_an_error_with_what_it_said(fit):
    done = fit(BLOCK + "block(1)\nraise ValueError('no data')\n", "--device", "2GB", "--device", "3GB")
    assert done.returncode == 2
    assert done.stdout.count("failed by itself (exit status 1)") == 2
    assert "  ValueError: no data" in done.stdout.splitlines()


LACKING = """
import sys, torch
from torch.nn.attention import SDPBackend, sdpa_kernel
q = torch.zeros(1, 2, 64, 64, device="cuda", dtype=torch.float16)
with sdpa_kernel(SDPBackend.FLASH_ATTENTION):
    torch.nn.functional.scaled_dot_product_attention(q, q, q)
"""


def test_missing_torch_kernels_for_a_gpu_are_no_failure_of_the_program(fit):
    done = fit(LACKING, "--device", "v100", "--device", "t4", "--device", "h100")
    assert done.returncode == 2
    lines = done.stdout.splitlines()
    words = "RuntimeError: No available kernel. Aborting execution"
    why = "(flash attention needs compute capability 8.0, and this GPU has 7.5)"
    assert f"T4: cannot run on it: {words} {why}" in lines
    assert "failed by itself" not in done.stdout + done.stderr
    assert "Traceback" not in done.stdout
    if "V100 16GB: cannot run on it: RuntimeError: No available kernel" in done.stdout:
        pytest.skip("this torch has kernels for a V100")
    assert lines[1].split()[-4:] == ["cannot", "run", "on", "it"]
    why = "and none for 7.0, as on a real GPU"
    assert any(line.startswith("V100 16GB: cannot run on it: torch ") and why in line for line in lines)
    assert lines[-1].endswith("fits H100 80GB; cannot run on T4, V100 16GB")


def test_a_program_without_gpu_memory_is_an_error(fit):
    done = fit("import torch\ntorch.ones(3)\n", "--device", "2GB")
    assert (done.returncode, done.stdout) == (2, "")
    assert "Error: the program uses no GPU memory" in done.stderr


def test_a_value_that_is_not_computed_is_told(found):
    (one,) = found("import torch\nx = torch.randn(1000, 1000, device='cuda')\nx[x > 0]\n", "--device", "2GB", status=0)
    assert one["unknown"].startswith("a boolean index reads values that an emulated GPU does not compute, at ")
    assert one["unknown"].endswith("program.py:3")


@pytest.mark.parametrize(
    ("gpu", "how", "status", "together"),
    [
        pytest.param("3GB", "together", 0, 2, marks=pytest.mark.thorough),
        ("2GB", "together", 1, 2),
        ("2GB", "one by one", 0, 1),
    ],
)
def test_processes_that_use_a_gpu_at_the_same_time_are_added_up(found, gpu, how, status, together):
    (one,) = found(CHILDREN, "--device", gpu, status=status, program=("program.py", how))
    assert (one["together"], one["reserved"]) == (together, together * 500 * MIB)
    assert one["outcome"] == ("out of memory together" if status else "fits")


def test_ranks_have_a_gpu_each(found):
    fits, lacks = found(RANKS, "--device", "4GBx2", "--device", "1500MBx2", status=1)
    assert (fits["devices"], fits["together"], fits["count"]) == (2, 1, 2)
    assert fits["reserved"] >= 1000 * MIB
    assert (lacks["outcome"], lacks["ran_out"]["device"]) == ("out of memory", 1)


def test_the_drivers_allocator_runs_out_as_well(found):
    conf = {"PYTORCH_CUDA_ALLOC_CONF": "backend:cudaMallocAsync"}
    small, large = found(BLOCK + "block(2000)", "--device", "1GB", "--device", "4GB", status=1, **conf)
    assert (small["outcome"], large["outcome"]) == ("out of memory", "fits")


OF_EACH_CARD = (
    """
import os, sys, warnings
with open("began.txt", "a") as file:
    print("fork" if "torch" in sys.modules else "new", os.environ["GPUMEM_EMULATED"], file=file)
"""
    + BLOCK
    + """
total = torch.cuda.get_device_properties(0).total_memory
if total == 1000 * 10**6:
    sys.exit("exit with a text")
elif total == 1500 * 10**6:
    large = [block(200) for _ in range(4)]
    kept = []
    while large:
        large.pop()
        kept.append(block(120))
    block(250)
elif total == 2000 * 10**6:
    batch = 64
    while True:
        try:
            block(50 * batch)
            break
        except torch.OutOfMemoryError:
            batch //= 2
elif total == 2500 * 10**6:
    model = torch.nn.Linear(2048, 2048, bias=False).cuda()
    optimizer = torch.optim.AdamW(model.parameters())
    for step in range(5):
        model(torch.ones(1, 2048, device="cuda")).sum().backward()
        optimizer.step()
        block(100 * (step + 1))
elif total == 3000 * 10**6:
    block(torch.cuda.mem_get_info()[0] // 2**20 - 100)
elif total == 3500 * 10**6:
    block(10)
    os.kill(os.getpid(), 9)
else:
    torch.sort(torch.rand(2**20, device="cuda"))
    block(100)
    warnings.warn("careful")
    print((torch.ones(300, device="cuda") + 1).sum())
"""
)
EACH_CARD = ("h100", "1000mb", "1500mb", "2000mb", "2500mb", "3000mb", "3500mb", "v100", "l4", "b200")


def of_each_card(fit, *program: str, jobs: int = 1) -> list[dict[str, Any]]:
    words = [f"--jobs={jobs}", "--format=json", "--steps=3", *(f"--device={card}" for card in EACH_CARD)]
    done = fit(OF_EACH_CARD, *words, program=program, PYTORCH_CUDA_ALLOC_CONF="")
    assert done.returncode == 1, done.stdout + done.stderr
    return json.loads(done.stdout)["gpus"]


@pytest.mark.parametrize("jobs", [1, 3])
def test_each_further_card_is_a_fork_with_an_outcome_of_its_own(fit, tmp_path, jobs):
    gpus = {gpu["gpu"]: gpu for gpu in of_each_card(fit, "program.py", jobs=jobs)}
    assert tuple(gpus) == EACH_CARD
    began = [tuple(line.split()) for line in (tmp_path / "began.txt").read_text(encoding="utf-8").splitlines()]
    again = [card for card, gpu in gpus.items() for _ in range(1 + (gpu["with_expandable_segments"] is not None))]
    first, others = began[:2], began[2:]
    assert first == [("new", "emulated:h100"), ("fork", "emulated:h100")]
    in_turn = [("fork", f"emulated:{card}") for card in again[1:]]
    assert others == in_turn if jobs == 1 else sorted(others) == sorted(in_turn)
    assert {card: gpu["outcome"] for card, gpu in gpus.items()} == {
        "1000mb": "failed by itself",
        "1500mb": "out of memory",
        "2000mb": "ran out of memory and went on",
        "2500mb": "fits",
        "3000mb": "fits",
        "3500mb": "failed by itself",
        "v100": "cannot run on it",
        **dict.fromkeys(("h100", "l4", "b200"), "fits"),
    }
    assert (gpus["1000mb"]["status"], gpus["1000mb"]["last_lines"]) == (1, ["exit with a text"])
    pieces = gpus["1500mb"]
    assert pieces["ran_out"]["line"].endswith("program.py:9 block")
    assert (pieces["ran_out"]["wanted"], pieces["with_expandable_segments"]["outcome"]) == (250 * MIB, "fits")
    smaller = gpus["2000mb"]
    assert (smaller["times_out_of_memory"], smaller["reserved"]) == (2, 800 * MIB)
    assert gpus["2500mb"]["reserved"] >= 3 * 100 * MIB, "ended after three steps, of 100, 200 and 300 MiB"
    assert gpus["3000mb"]["allocated"] == 2242 * MIB, "of 2,861 MiB, less 520 and 100, in pages of 2 MiB"
    assert (gpus["3500mb"]["status"], gpus["3500mb"]["killed"]) == (-9, 1)


ASKED = """
import os
from pytest_gpumem.emulating.emulation.load import current_emulation

told = current_emulation().was_told
print(told(), torch.cuda.device_count(), told(), flush=True)
if not os.fork():
    print(torch.cuda.is_available(), torch.ones(1, device="cuda").is_cuda, told(), flush=True)
    os._exit(0)
os.wait()
torch.cuda.get_device_capability()
print(told())
"""


def test_counting_gpus_allows_a_fork_and_reading_their_properties_is_noted(on_gpu):
    assert on_gpu(ASKED).splitlines() == ["False 1 False", "True True True", "True"]


# Each card but the first waits to be ended, as does a process that it has started.
ENDLESS = """
import os, subprocess, sys, time
is_fork = "torch" in sys.modules
import torch
torch.ones(1, device="cuda")
if torch.cuda.get_device_properties(0).total_memory < 40 * 10**9:
    child = subprocess.Popen([sys.executable, "-c", "import time; time.sleep(600)"])
    with open("began.txt", "a") as file:
        print(os.getpid(), child.pid, is_fork, file=file)
    time.sleep(600)
"""


@pytest.mark.parametrize("signum", [signal.SIGINT, signal.SIGTERM, signal.SIGKILL])
def test_a_signal_ends_all_that_run_at_the_time_and_what_was_found_is_told(tmp_path, signum):
    (tmp_path / "program.py").write_text(ENDLESS, encoding="utf-8")
    began = tmp_path / "began.txt"
    cards = [f"--device={card}" for card in ("h100", "a100", "h200", "b200", "l40s", "l4", "t4", "a10")]
    command = [sys.executable, "-m", "pytest_gpumem.tools.main", "fit", "--jobs=2", *cards, "program.py"]
    environment = {**os.environ, "PYTHONPATH": str(REPOSITORY)}
    with subprocess.Popen(command, cwd=tmp_path, env=environment, stderr=subprocess.PIPE, text=True) as fit:
        while not began.exists() or began.read_text(encoding="utf-8").count("\n") < 2:
            assert fit.poll() is None
            time.sleep(0.1)
        fit.send_signal(signum)
        _, errors = fit.communicate(timeout=60)
    processes = [line.split() for line in began.read_text(encoding="utf-8").splitlines()]
    assert [is_fork for *_, is_fork in processes] == ["True", "True"]
    own, started = ([int(process[at]) for process in processes] for at in (0, 1))
    if signum == signal.SIGKILL:
        # Nobody is left to end what they have started.
        wait_until_ended(own)
        for pid in started:
            os.kill(pid, signal.SIGKILL)
        return
    assert fit.returncode == 128 + signum, errors
    assert "interrupted: 5 of 8 GPUs were tried" in errors
    wait_until_ended([*own, *started])


@pytest.mark.thorough
def test_forks_come_out_as_a_process_for_each_card_does(fit):
    assert of_each_card(fit, "program.py") == of_each_card(fit, "env", sys.executable, "program.py")


MODEL = """
import torch


class Block(torch.nn.Module):
    def __init__(self):
        super().__init__()
        self.up = torch.nn.Linear(1024, 4096)
        self.down = torch.nn.Linear(4096, 1024)

    def forward(self, x):
        return x + self.down(torch.nn.functional.gelu(self.up(x)))


def make():
    model = torch.nn.Sequential(*(Block() for _ in range(4)))
    return model, torch.randn(8192, 1024), lambda output, batch: output.square().mean()
"""


def test_advice_for_a_gpu_that_is_not_there(processes, tmp_path):
    (tmp_path / "models.py").write_text(MODEL, encoding="utf-8")
    done = processes.gpumem("advise", "models:make", "--fits", "1.5GB", "--device", "emulated:l4", gpu="l4")
    assert done.returncode == 0, done.stdout + done.stderr
    lines = done.stdout.splitlines()
    assert lines[0].split() == ["config", "L4", "(1.50", "GB)"]
    amp, fp32 = (line.split() for line in lines[1:3])
    assert amp[0] == "amp-bf16"
    assert amp[2:] == ["GB", "*"]
    assert fp32[:2] == ["fp32", "lacks"]
    assert f"L4: amp-bf16, {amp[1]} GB of 1.50 GB" in lines
    assert 'with torch.autocast("cuda", dtype=torch.bfloat16):' in done.stdout
