"""``gpumem run`` on an emulated GPU: a plain script gated, and faults that are planted in it."""

from __future__ import annotations

from typing import TYPE_CHECKING

import pytest

from tests.test_run import HELPERS, SCRIPT, line_of

if TYPE_CHECKING:
    import subprocess


def script_on_cuda() -> str:
    moved = SCRIPT.replace("in sys.argv else 64)\n", 'in sys.argv else 64).to("cuda")\n')
    return moved.replace("model[0].in_features)", 'model[0].in_features, device="cuda")')


@pytest.fixture
def run(processes, tmp_path):
    (tmp_path / "train.py").write_text(script_on_cuda(), encoding="utf-8")
    (tmp_path / "helpers.py").write_text(HELPERS, encoding="utf-8")
    (tmp_path / "pyproject.toml").write_text("[tool.gpumem]\n", encoding="utf-8")

    def command(*arguments: str, gpu: str = "h100", new: bool = False) -> subprocess.CompletedProcess[str]:
        return processes.gpumem("run", "train.py", f"--gpumem-device=emulated:{gpu}", *arguments, gpu=gpu, new=new)

    return command


def test_planted_faults_are_red_with_module_and_line_and_their_twin_is_green(run):
    assert run("--gpumem-update=new", new=True).returncode == 0
    green = run("--gpumem-baseline")
    assert (green.returncode, "gpumem: 1 gated" in green.stdout) == (0, True), green.stdout

    leak = run("--gpumem-baseline", "--", "leak")
    assert leak.returncode == 1
    assert f"growth per step {4 * 256 * (64 + 256 + 64) / 1000:.2f} kB, baseline 0 B" in leak.stdout
    kept = leak.stdout.partition("kept by each step")[2].partition("what grew")[0]
    assert f"train.py:{line_of('history.append')}" in kept

    red = run("--gpumem-baseline", "--", "wide")
    assert red.returncode == 1, red.stdout
    tensors = "was float32[256, 64], now float32[384, 96]"
    grew = [line for line in red.stdout.partition("what grew")[2].splitlines() if tensors in line]
    assert any(line.split("  ")[1] == "optimizer state" and "  Sequential.0  " in line for line in grew), red.stdout


ONLY_COUNTED = """
import sys
import torch

weight = torch.nn.Parameter(torch.ones(25_000_000, device="cuda"))
optimizer = torch.optim.SGD([weight])
for step in range(1000):
    # Three gradients of one tensor are summed in place, but not where operators are counted: 500 MB, not 400.
    twice = weight * 2
    (twice.sum() + (twice * 3).sum() + (twice * 4).sum()).backward()
    optimizer.step()
    optimizer.zero_grad()
    if "more" in sys.argv and step == 12:
        torch.empty(200_000_000, dtype=torch.uint8, device="cuda").add(1).add(1)
"""


def test_a_script_that_fits_but_for_its_counted_step_is_measured_without_counts(run, tmp_path):
    (tmp_path / "train.py").write_text(ONLY_COUNTED, encoding="utf-8")
    # Of which 545 MB are the context's.
    fits = run(gpu="1GB")
    assert fits.returncode == 0, fits.stdout
    assert "train.py::run  400.00 MB" in fits.stdout
    assert "note: train.py::run: not counted: OutOfMemoryError: CUDA out of memory" in fits.stdout
    larger = run(gpu="2GB")
    assert (larger.returncode, "not counted" in larger.stdout) == (0, False), larger.stdout

    fails = run("--", "more", gpu="1GB")
    assert (fails.returncode, "torch.OutOfMemoryError" in fails.stdout) == (1, True), fails.stdout
