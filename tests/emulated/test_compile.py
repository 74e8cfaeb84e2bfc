"""torch.compile on an emulated GPU: Triton compiles for its architecture, and what it compiled is launched and counted."""

from __future__ import annotations

import importlib.util
import json
import re

import pytest

from pytest_gpumem.torch_support.private_api.compiler import compiles_within_modes

old = not compiles_within_modes()
needs_triton = pytest.mark.skipif(
    old or importlib.util.find_spec("triton") is None,
    reason="needs Triton (pip install --no-deps, the release that torch requires), and torch 2.11 or so",
)

TEST = """
import os
import pytest
import torch
from torch import nn


class Block(nn.Module):
    def __init__(self, inner):
        super().__init__()
        self.up, self.down = nn.Linear(256, inner, bias=False), nn.Linear(inner, 256, bias=False)

    def forward(self, x):
        return self.down(nn.functional.gelu(self.up(x)))


def train(gpumem, compile, inner=1024):
    gpumem.train_step(
        lambda: Block(inner),
        lambda: torch.randn(8, 256, 256),
        loss=lambda out, _: out.square().mean(),
        config=f"fp32,optimizer=adamw,compile={compile}",
    )


@pytest.mark.parametrize("compile", ["default", "max-autotune"])
def test_train(gpumem, compile):
    train(gpumem, compile)


def test_other(gpumem):
    train(gpumem, "default", 2048 if os.environ.get("PLANTED") else 1024)
"""


@pytest.fixture(scope="module")
def cache(tmp_path_factory) -> str:
    """Of what is compiled: each test would compile the same anew."""
    return str(tmp_path_factory.mktemp("compiled"))


@needs_triton
def test_a_compiled_step_is_gated_and_peaks_alike_with_a_cold_cache_and_a_warm_one(processes, tmp_path):
    (tmp_path / "test_it.py").write_text(TEST, encoding="utf-8")

    def session(*arguments: str, planted: str = "") -> str:
        kept = {"TORCHINDUCTOR_CACHE_DIR": tmp_path / "compiled", "TORCHINDUCTOR_COMPILE_THREADS": 1}
        done = processes.pytest("-rfs", "--gpumem-report=report.json", *arguments, timeout=500, **kept, PLANTED=planted)
        assert done.returncode == (1 if planted else 0), done.stdout + done.stderr
        return done.stdout

    def figures() -> dict[str, int]:
        report = json.loads((tmp_path / "report.json").read_text(encoding="utf-8"))
        found = {result["verdict"]["test"]: result["verdict"]["verdicts"] for result in report["results"]}
        return found["test_train[default]"][0]["measurement"]["metrics"]

    told = session("--gpumem-update=new")
    assert (
        "compile=max-autotune times kernels to choose the fastest ones, and an emulated GPU cannot time kernels" in told
    )
    first = figures()
    assert first["launches"] > 0
    red = session("--gpumem-baseline", planted="yes")
    assert figures() == first
    assert re.findall(r"^FAILED test_it.py::(\S+)", red, re.MULTILINE) == ["test_other"]
    assert "GPU memory regressed: peak " in red


@needs_triton
def test_processes_that_compile_find_the_gpu_of_the_session(processes, tmp_path):
    (tmp_path / "test_it.py").write_text(
        "from torch._inductor.async_compile import AsyncCompile\n"
        "def test_it(gpumem):\n"
        "    asked = \"__import__('pytest_gpumem.emulating.emulation.load', fromlist=['_']).current_emulation().gpu.word\"\n"
        "    assert AsyncCompile.process_pool().submit(eval, asked).result(timeout=100) == 'h100'\n",
        encoding="utf-8",
    )
    done = processes.pytest(TORCHINDUCTOR_COMPILE_THREADS=2)
    assert done.returncode == 0, done.stdout + done.stderr


@needs_triton
def test_triton_refuses_a_tensor_of_the_host_and_takes_one_of_the_gpu(on_gpu, tmp_path, cache):
    (tmp_path / "kernels.py").write_text(
        "import triton\nimport triton.language as tl\n\n"
        "@triton.jit\ndef ones(out):\n    tl.store(out + tl.arange(0, 16), 1.0)\n",
        encoding="utf-8",
    )
    launch = "from kernels import ones\nones[(1,)](torch.empty(16, device='{}'))\nprint('launched')"
    assert on_gpu(launch.format("cuda"), TRITON_CACHE_DIR=cache) == "launched\n"
    told = on_gpu(launch.format("cpu"), fails=True, TRITON_CACHE_DIR=cache)
    assert "cannot be accessed from Triton (cpu tensor?)" in told


@needs_triton
def test_what_a_kernel_of_triton_writes_to_is_no_longer_known_and_what_it_reads_is(on_gpu, tmp_path, cache):
    (tmp_path / "kernels.py").write_text(
        "import triton\nimport triton.language as tl\n\n"
        "@triton.jit\ndef gather(given, index, out, counts):\n"
        "    at = tl.load(index + tl.arange(0, 16))\n"
        "    tl.store(out + at, tl.load(given + at))\n"
        "    tl.atomic_add(counts, 1)\n",
        encoding="utf-8",
    )
    source = """
from kernels import gather
from pytest_gpumem.emulating.host_values.scope import current
given, index = torch.arange(16, device="cuda"), torch.arange(16, device="cuda")
out, counts = torch.zeros(32, dtype=torch.int64, device="cuda"), torch.zeros(1, dtype=torch.int64, device="cuda")
gather[(1,)](given, index, out[16:], counts)
print([current().notes.is_unknown(one) for one in (given, index, out, counts)])
int(counts)
print(current().reads.take_trouble())

@torch.compile
def compiled(given, index, out):
    out.add_(given[index].sin())
    return given.cos()

out = torch.zeros(16, device="cuda")
made = compiled(given.float(), index, out)
print([current().notes.is_unknown(one) for one in (given, index, out, made)])
"""
    by_hand, read, compiled = on_gpu(source, TRITON_CACHE_DIR=cache, TORCHINDUCTOR_CACHE_DIR=cache).splitlines()
    assert by_hand == compiled == "[False, False, True, True]"
    assert read.startswith("a value is read that an emulated GPU does not compute")


@pytest.mark.skipif(not old, reason="compiles")
def test_a_torch_that_does_not_compile_within_a_mode_says_so(processes, tmp_path):
    (tmp_path / "test_it.py").write_text(TEST, encoding="utf-8")
    done = processes.pytest("-k", "default")
    assert done.returncode == 1, done.stdout + done.stderr
    assert "does not compile on an emulated GPU" in done.stdout
