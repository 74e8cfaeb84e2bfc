"""Workspaces of convolutions on an emulated GPU: those that the real cuDNN plans where it is installed, and 0 where it is not."""

from __future__ import annotations

import json
import os
import re
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

from pytest_gpumem.base.units import format_bytes
from pytest_gpumem.emulating.emulation.cudnn import installed_cudnn
from pytest_gpumem.emulating.emulation.torch_build import installed_torch
from tests.emulated.processes import REPOSITORY

HERE = Path(__file__).parent
HIDDEN = """
from dataclasses import replace
from pytest_gpumem.emulating.emulation import cudnn, load
cudnn.installed_cudnn = lambda torch: {library}
for at, there in enumerate(load._loaded):
    there.cudnn._stand_in.gpumem_use_cudnn(b"")
    load._loaded[at] = replace(there, cudnn=cudnn.Cudnn(there.cudnn._stand_in, there.cudnn._torch))
"""
"""Run before convolutions are: this library is what is installed, whether torch has been loaded or not."""
NOTHING = HIDDEN.format(library=None)
CONVOLUTIONS = """
from torch.nn.functional import conv2d
from pytest_gpumem.emulating.emulation.load import current_emulation
cudnn = current_emulation().cudnn

def beside(run):
    # The most that was live in `run` beside what it returned, in bytes.
    before = torch.cuda.memory_stats()["requested_bytes.all.current"]
    torch.cuda.reset_peak_memory_stats()
    kept = run()
    stats = torch.cuda.memory_stats()
    return stats["requested_bytes.all.peak"] - before - sum(one.nbytes for one in kept)

def operands(dtype, memory_format, shape=(32, 64, 56, 56), filters=64):
    x = torch.empty(shape, dtype=dtype, device="cuda").to(memory_format=memory_format)
    w = torch.empty((filters, shape[1], 3, 3), dtype=dtype, device="cuda").to(memory_format=memory_format)
    return x, w
"""


SHAPE = ("32", "64", "56", "64")
"""Batch, channels, height and filters of the operands above."""


def real_cudnn() -> Path:
    """The cuDNN that torch requires; skips the test where it is not installed, or is too old."""
    torch = installed_torch()
    if torch.cudnn < (9, 8):
        pytest.skip("needs a torch with cuDNN 9.8 or newer, which plans without a GPU")
    found = installed_cudnn(torch)
    if found is None:
        pytest.skip(f"needs cuDNN (pip install {torch.cudnn_wheel}), 0.4 GB to load, and cuBLAS, which it requires")
    return found


@pytest.fixture
def fake_cudnn(tmp_path) -> str:
    """What has a library be installed whose first engine cannot be planned, and whose second takes 4,096 bytes."""
    return fake(tmp_path)


def fake(folder: Path, *flags: str) -> str:
    if installed_torch().cudnn < (9, 8):
        pytest.skip("with this torch's cuDNN nothing is planned, whatever is installed")
    compiler, library = shutil.which("cc"), folder / "fake.so"
    assert compiler is not None, "the suite needs a C compiler"
    command = [compiler, "-shared", "-fPIC", *flags, "-o", str(library), str(HERE / "fake_cudnn.c")]
    subprocess.run(command, check=True)
    return HIDDEN.format(library=repr(str(library)))


# The real library


@pytest.mark.parametrize(
    ("dtype", "number", "channels_last"), [("float32", 0, False), ("bfloat16", 9, True)], ids=["nchw", "channels_last"]
)
def test_a_convolution_takes_the_workspaces_that_cudnn_plans_when_asked_directly(on_gpu, dtype, number, channels_last):
    asked = subprocess.run(
        [sys.executable, str(HERE / "ask_cudnn.py"), str(real_cudnn()), str(number), str(int(channels_last)), *SHAPE],
        env={**os.environ, "PYTHONPATH": str(REPOSITORY)},
        capture_output=True,
        text=True,
        check=True,
    )
    memory_format = "channels_last" if channels_last else "contiguous_format"
    told = on_gpu(
        CONVOLUTIONS + f"x, w = operands(torch.{dtype}, torch.{memory_format})\n"
        "y = conv2d(x, w, padding=1)\n"
        "def backward(of_x, of_w):\n"
        "    made = torch.ops.aten.convolution_backward(\n"
        "        y, x, w, None, [1, 1], [1, 1], [1, 1], False, [0, 0], 1, [of_x, of_w, False])\n"
        "    return [one for one in made if one is not None]\n"
        "print(beside(lambda: [conv2d(x, w, padding=1)]), beside(lambda: backward(True, False)), "
        "beside(lambda: backward(False, True)))\n"
    )
    assert told == asked.stdout


RESNET = (
    CONVOLUTIONS
    + """
from torch import nn

class Block(nn.Module):
    def __init__(self, width):
        super().__init__()
        self.conv1, self.conv2 = (nn.Conv2d(width, width, 3, padding=1, bias=False) for _ in range(2))
        self.norm1, self.norm2 = (nn.BatchNorm2d(width) for _ in range(2))

    def forward(self, x):
        return (x + self.norm2(self.conv2(self.norm1(self.conv1(x)).relu()))).relu()

def train(steps=3):
    model = nn.Sequential(
        nn.Conv2d(3, 64, 7, stride=2, padding=3), nn.MaxPool2d(2), Block(64), nn.Conv2d(64, 128, 3, stride=2), Block(128),
        nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Linear(128, 10),
    ).cuda()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
    images = torch.zeros(32, 3, 224, 224, device="cuda")
    peaks = []
    for _ in range(steps):
        torch.cuda.reset_peak_memory_stats()
        with torch.autocast("cuda", torch.bfloat16):
            loss = model(images).square().mean()
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        peaks.append(torch.cuda.memory_stats()["requested_bytes.all.peak"])
    return peaks
"""
)


def test_the_peak_of_a_training_step_is_the_same_in_every_step_and_process(on_gpu):
    real_cudnn()
    source = RESNET + "print(train()[1:])"
    told = on_gpu(source)
    first, second = map(int, re.findall(r"\d+", told))
    assert first == second
    assert on_gpu(source) == told
    without = on_gpu(NOTHING + source)
    assert int(re.findall(r"\d+", without)[0]) < first


def test_benchmarking_takes_what_the_largest_plan_needs_then_what_the_first_does(on_gpu):
    # All plans take the same time here.
    real_cudnn()
    source = (
        CONVOLUTIONS + "x, w = operands(torch.float32, torch.contiguous_format)\n"
        "torch.backends.cudnn.benchmark = {}\n"
        "print(*(beside(lambda: [conv2d(x, w, padding=1)]) for _ in range(2)))\n"
    )
    plain, again = map(int, on_gpu(source.format(False)).split())
    first, later = map(int, on_gpu(source.format(True)).split())
    assert plain == again == later < first


def test_each_gpu_has_plans_of_its_own(on_gpu):
    real_cudnn()
    source = (
        CONVOLUTIONS + "x, w = operands(torch.float32, torch.contiguous_format)\n"
        "print(beside(lambda: [conv2d(x, w)]))\n"
    )
    assert on_gpu(source, "b200") != on_gpu(source)


ATTENTION = (
    CONVOLUTIONS
    + """
q, k, v = (torch.empty(8, 12, 1024, 64, dtype=torch.bfloat16, device="cuda", requires_grad=True) for _ in range(3))
def attend():
    out = torch.nn.functional.scaled_dot_product_attention(q, k, v)
    out.backward(torch.empty_like(out))
    return [out]
print(beside(attend), cudnn.convolutions(), current_emulation().launches().get("cudnnBackendExecute"))
"""
)


SHAPES = {
    "ResNet's stem": ((32, 3, 224, 224), (64, 3, 7, 7), 2, 3, 1, 1),
    "the same without a stride": ((32, 3, 224, 224), (64, 3, 7, 7), 1, 3, 1, 1),
    "ResNet's blocks": ((32, 128, 56, 56), (128, 128, 3, 3), 2, 1, 1, 1),
    "ResNet's shortcuts": ((32, 256, 56, 56), (512, 256, 1, 1), 2, 0, 1, 1),
    "UNet": ((4, 64, 256, 256), (128, 64, 3, 3), 1, 1, 1, 1),
    "ConvNeXt, one channel a group": ((32, 96, 56, 56), (96, 1, 7, 7), 1, 3, 1, 96),
    "dilated": ((8, 256, 64, 64), (256, 256, 3, 3), 1, 4, 4, 1),
    "groups": ((32, 128, 56, 56), (128, 4, 3, 3), 1, 1, 1, 32),
    "ViT's patches": ((32, 3, 224, 224), (768, 3, 16, 16), 16, 0, 1, 1),
    "three dimensions": ((2, 16, 32, 64, 64), (32, 16, 3, 3, 3), 1, 1, 1, 1),
    "one image": ((1, 64, 56, 56), (64, 64, 3, 3), 1, 1, 1, 1),
    "a small one": ((2, 8, 9, 9), (8, 8, 3, 3), 1, 0, 1, 1),
    "many channels": ((2, 2048, 7, 7), (2048, 2048, 3, 3), 1, 1, 1, 1),
}
"""Input, weight, stride, padding, dilation and groups."""


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_no_plan_takes_more_than_the_estimate_without_cudnn(on_gpu, dtype):
    real_cudnn()
    source = f"""
import ctypes
most = ctypes.c_int64.in_dll(cudnn._stand_in, "gpumem_most_workspace")
for name, (given, filters, *how, groups) in {SHAPES!r}.items():
    sides = len(given) - 2
    stride, padding, dilation = ([one] * sides for one in how)
    how = stride, padding, dilation, False, [0] * sides, groups
    for last in (False, True):
        memory_format = [torch.contiguous_format, torch.channels_last if sides == 2 else torch.channels_last_3d][last]
        x, w = (torch.empty(s, dtype=torch.{dtype}, device="cuda").to(memory_format=memory_format) for s in (given, filters))
        y = torch.ops.aten.convolution(x, w, None, *how)
        def backward(of_x, of_w):
            made = torch.ops.aten.convolution_backward(y, x, w, None, *how, [of_x, of_w, False])
            return [one for one in made if one is not None]
        for run in (
            lambda: [torch.ops.aten.convolution(x, w, None, *how)], lambda: backward(True, False), lambda: backward(False, True)
        ):
            most.value, before = 0, cudnn.convolutions()
            taken = beside(run)
            if cudnn.convolutions() > before and not 0 <= taken <= most.value:
                print(name, memory_format, taken, most.value)
print(cudnn.convolutions() > 50)
"""
    assert on_gpu(CONVOLUTIONS + source) == "True\n"


# A library that is made for the test


@pytest.mark.parametrize(
    "convolution",
    [
        "conv2d(x, w, padding=1)",
        "torch.cudnn_convolution_relu(x, w, x[0, :, 0, 0], (1, 1), (1, 1), (1, 1), 1)",
        "torch.cudnn_convolution_add_relu(x, w, x, 0.5, x[0, :, 0, 0], (1, 1), (1, 1), (1, 1), 1)",
    ],
    ids=["plain", "with bias and activation", "with an addition as well"],
)
def test_an_engine_that_cannot_be_planned_is_passed_over(on_gpu, fake_cudnn, convolution):
    told = on_gpu(
        fake_cudnn + CONVOLUTIONS + "x, w = operands(torch.float32, torch.contiguous_format)\n"
        f"print(beside(lambda: [{convolution}]), cudnn.release(), cudnn.convolutions(), cudnn.lacking())\n"
    )
    assert told == "4096 9.20.0 1 None\n"


def test_the_library_is_in_a_process_of_its_own_which_is_no_child(on_gpu, fake_cudnn):
    source = (
        CONVOLUTIONS
        + """
import os
x, w = operands(torch.float32, torch.contiguous_format)
def taken():
    return beside(lambda: [conv2d(x, w, padding=1)])
print(taken(), "fake.so" in open("/proc/self/maps").read())
try:
    os.wait()
except ChildProcessError:
    print("no child")
x = torch.cat([x, x])
child = os.fork()
if not child:
    os._exit(taken() // 4096)
print(os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]), taken())
"""
    )
    assert on_gpu(fake_cudnn + source, before="import os\n").split("\n")[:-1] == ["4096 False", "no child", "1 4096"]


def test_a_planner_that_crashes_fails_its_convolution_and_ends_no_session(session, tmp_path):
    done = session(fake(tmp_path, "-DCRASHES"))
    assert done.returncode == 1
    assert (
        "RuntimeError: the real cuDNN, which plans convolutions for the emulated GPU in a process of its own, ended"
        in (done.stdout)
    )
    assert "1 failed, 1 passed" in done.stdout.splitlines()[-1]


def test_attention_is_not_asked_of_it(on_gpu, fake_cudnn):
    told = on_gpu(fake_cudnn + ATTENTION)
    assert on_gpu(NOTHING + ATTENTION) == told
    assert told.endswith(" 0 2\n")


# Where it is not installed

RUN = (
    CONVOLUTIONS
    + "x, w = operands(torch.float32, torch.contiguous_format)\nprint(beside(lambda: [conv2d(x, w, padding=1)]))\n"
)
# Elements of input and output, of the weight, and of the input at the nine places of the weight; and 16 MiB.
MOST = 4 * (11 * 32 * 64 * 56 * 56 + 64 * 64 * 9) + 2**24
AT_MOST = f"a peak is too low by at most {format_bytes(MOST)}"


def test_without_it_workspaces_are_taken_as_0_and_that_is_said(on_gpu):
    torch = installed_torch()
    none, zero, said = on_gpu(
        NOTHING + CONVOLUTIONS + "print(cudnn.lacking())\n" + RUN + "print(cudnn.lacking())\n"
    ).splitlines()
    assert (none, zero) == ("None", "0")
    assert said.startswith("workspaces of convolutions count as 0 bytes, because ")
    assert said.endswith(f"; {AT_MOST}")
    if torch.cudnn >= (9, 8):
        assert said.endswith(f"no cuDNN is installed (pip install {torch.cudnn_wheel}); {AT_MOST}")


def test_one_that_cannot_be_told_of_a_gpu_is_none(on_gpu, tmp_path):
    too_old = fake(tmp_path, "-DTOO_OLD")
    zero, said = on_gpu(RUN + "print(cudnn.lacking())\n", before=too_old).splitlines()
    assert (zero, said) == (
        "0",
        f"workspaces of convolutions count as 0 bytes, because the cuDNN in {tmp_path / 'fake.so'} cannot be used; {AT_MOST}",
    )


@pytest.mark.parametrize("printed", ["1", "quiet"])
def test_a_program_is_told_at_its_end_what_its_own_peak_may_lack(on_gpu, printed):
    end = "raise SystemExit(1)\n"
    fails = on_gpu(NOTHING + RUN + end, fails=True, GPUMEM_EMULATED_PEAKS=printed)
    assert "gpumem: peaks may be too low: workspaces of convolutions count as 0 bytes, because " in fails
    # Input, weight and output are live at the convolution, and so is the peak.
    assert f"; {AT_MOST}\n" in fails
    assert ("peak 51." in fails) == (printed == "1")
    large = f"del x, w; torch.empty({MOST} + 10**8, dtype=torch.uint8, device='cuda')\n"
    assert "too low" not in on_gpu(NOTHING + RUN + large + end, fails=True, GPUMEM_EMULATED_PEAKS=printed)
    nothing = NOTHING + "torch.ones(9, device='cuda')\n" + end
    assert "too low" not in on_gpu(nothing, fails=True, GPUMEM_EMULATED_PEAKS=printed)


@pytest.mark.parametrize("printed", ["1", "quiet"])
def test_a_program_is_told_at_its_end_that_an_uncomputed_value_was_read(on_gpu, printed):
    read = "x = torch.rand(3000, 3000, device='cuda')\nx[x > 0.5]\nraise SystemExit(1)\n"
    told = on_gpu(read, fails=True, GPUMEM_EMULATED_PEAKS=printed)
    assert "gpumem: peaks may be wrong: a boolean index reads values that an emulated GPU does not compute, at " in told


def test_the_estimate_takes_the_elements_as_wide_as_they_are(on_gpu):
    source = (
        NOTHING
        + CONVOLUTIONS
        + """
for dtype in (torch.float32, torch.bfloat16, torch.float16):
    x, w = operands(dtype, torch.contiguous_format)
    cudnn._most = 0
    conv2d(x, w, padding=1)
    print(cudnn._most)
"""
    )
    elements, weight, parts = 11 * 32 * 64 * 56 * 56, 64 * 64 * 9, 2**24
    full, *halves = map(int, on_gpu(source).split())
    assert full == 4 * (elements + weight) + parts
    assert halves == 2 * [2 * elements + 4 * weight + parts]


# Sessions

PROJECT = """
import torch
from torch import nn

def test_conv(gpumem):
    conv = nn.Conv2d(8, 8, 3).cuda()
    gpumem.measure(lambda: conv(torch.zeros(2, 8, 9, 9, device="cuda")))

def test_linear(gpumem):
    linear = nn.Linear(8, 8).cuda()
    gpumem.measure(lambda: linear(torch.zeros(2, 8, device="cuda")))
"""
BOTH = """
import pytest
import torch
from torch import nn

@pytest.fixture(scope="module")
def seen():
    return nn.Conv2d(8, 8, 3).cuda()(torch.zeros(2, 8, 9, 9, device="cuda"))

def test_both(gpumem, seen):
    conv, linear = nn.Conv2d(8, 8, 3).cuda(), nn.Linear(8, 8).cuda()
    gpumem.measure(lambda: linear(torch.zeros(2, 8, device="cuda")), name="before")
    gpumem.measure(lambda: conv(torch.zeros(2, 8, 9, 9, device="cuda")), name="conv")
    gpumem.measure(lambda: linear(torch.zeros(2, 8, device="cuda")), name="after")
"""


@pytest.fixture
def session(processes, tmp_path):
    """Run pytest with a cuDNN, by what has it be installed."""
    (tmp_path / "test_it.py").write_text(PROJECT, encoding="utf-8")

    def run(installed: str, *arguments: str) -> subprocess.CompletedProcess[str]:
        (tmp_path / "installed.py").write_text(installed, encoding="utf-8")
        path = os.pathsep.join([str(tmp_path), str(REPOSITORY)])
        return processes.pytest("-p", "installed", *arguments, PYTHONPATH=path)

    return run


@pytest.fixture
def large_cudnn(tmp_path) -> str:
    """The library that is made for the test, whose second engine takes 64 MiB."""
    folder = tmp_path / "large"
    folder.mkdir()
    return fake(folder, "-DWORKSPACE=67108864")


@pytest.mark.parametrize("with_it", ["first", pytest.param("then", marks=pytest.mark.thorough)])
def test_a_baseline_from_where_it_was_installed_is_not_held_against_what_is_not(session, large_cudnn, with_it):
    first, then = (large_cudnn, NOTHING) if with_it == "first" else (NOTHING, large_cudnn)
    recorded = session(first, "--gpumem-update=new")
    assert recorded.returncode == 0, recorded.stdout
    same = session(first, "--gpumem-baseline", "--gpumem-strict")
    assert same.returncode == 0, same.stdout
    other = session(then, "--gpumem-baseline")
    assert other.returncode == 0, other.stdout
    was, now = ("9.20.0", "none") if with_it == "first" else ("none", "9.20.0")
    assert (
        f"uncertain: emulated_cudnn was {was}, now {now}, which can change bytes without a code change" in other.stdout
    )
    assert "improved" not in other.stdout
    strict = session(then, "--gpumem-baseline", "--gpumem-strict")
    assert strict.returncode == 1
    assert "test_linear" not in strict.stdout.partition("FAILED")[2]
    assert ("memory is not comparable: peak" in strict.stdout) == (with_it == "first")


def test_a_session_says_how_many_peaks_lack_them(session):
    told = session(NOTHING)
    assert told.returncode == 0, told.stdout
    assert (
        "gpumem convolutions: the peaks of 1 measurement may be too low: workspaces of convolutions count as 0 bytes"
        in told.stdout
    )
    assert "without cuDNN the peak lacks workspaces of convolutions: at most 16.82 MB more is needed" in told.stdout


def test_only_a_measurement_in_which_convolutions_ran_depends_on_cudnn(session, tmp_path):
    (tmp_path / "test_it.py").write_text(BOTH, encoding="utf-8")
    assert session(NOTHING, "--gpumem-report=report.json").returncode == 0
    (result,) = json.loads((tmp_path / "report.json").read_text(encoding="utf-8"))["results"]
    measurements = [one["measurement"] for one in result["verdict"]["verdicts"]]
    told = {one["name"]: one["environment"]["details"].get("emulated_cudnn") for one in measurements}
    assert told == {"before": None, "conv": "none", "after": None}
