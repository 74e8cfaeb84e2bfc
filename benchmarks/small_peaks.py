"""Small steps' peaks under other instruction sets: what the absolute part of the memory tolerance has to swallow.

``python benchmarks/small_peaks.py`` measures training steps of ten kinds of layers, in three sizes and three precisions, on
the CPU device, in a process for each instruction set that torch can be told to use, and prints how many pairs differ and by
how much. ``--with REPORT`` adds a report of another environment (another release of torch), written with ``--out REPORT``.
"""

from __future__ import annotations

import argparse
import itertools
import json
import os
import subprocess
import sys
import tempfile
from pathlib import Path

SETS = ("default", "avx2", "avx512")
TESTS = '''
import pytest
import torch
from torch import nn


class First(nn.Module):
    """The first result of a recurrent layer."""

    def __init__(self, layer):
        super().__init__()
        self.layer = layer

    def forward(self, x):
        return self.layer(x)[0]


class Attention(nn.Module):
    def __init__(self, width):
        super().__init__()
        self.attention, self.norm = nn.MultiheadAttention(width, 4, batch_first=True), nn.LayerNorm(width)

    def forward(self, x):
        return self.norm(self.attention(x, x, x, need_weights=False)[0])


class Fused(nn.Module):
    def __init__(self, width):
        super().__init__()
        self.qkv = nn.Linear(width, 3 * width)

    def forward(self, x):
        batch, length, width = x.shape
        q, k, v = self.qkv(x).view(batch, length, 3, 4, width // 4).permute(2, 0, 3, 1, 4)
        return nn.functional.scaled_dot_product_attention(q, k, v, is_causal=True)


def images(width):
    return torch.ones(4, 3, 32, 32)


def vectors(width):
    return torch.ones(32, width)


def sequences(width):
    return torch.ones(4, width, width)


LAYERS = {
    "mlp": (lambda d: nn.Sequential(nn.Linear(d, 4 * d), nn.GELU(), nn.Linear(4 * d, d)), vectors),
    "conv": (lambda d: nn.Sequential(nn.Conv2d(3, d, 3), nn.BatchNorm2d(d), nn.ReLU(), nn.Conv2d(d, d, 3)), images),
    "conv1d": (lambda d: nn.Sequential(nn.Conv1d(d, d, 5, padding=2), nn.ReLU(), nn.Conv1d(d, d, 5, padding=2)), sequences),
    "depthwise": (lambda d: nn.Sequential(nn.Conv2d(3, d, 1), nn.Conv2d(d, d, 3, groups=d), nn.GroupNorm(4, d)), images),
    "transposed": (lambda d: nn.Sequential(nn.Conv2d(3, d, 3, stride=2), nn.ConvTranspose2d(d, 3, 4, stride=2)), images),
    "lstm": (lambda d: First(nn.LSTM(d, d, 2, batch_first=True)), sequences),
    "gru": (lambda d: First(nn.GRU(d, d, 2, batch_first=True)), sequences),
    "attention": (Attention, sequences),
    "fused attention": (Fused, sequences),
    "encoder": (lambda d: nn.TransformerEncoderLayer(d, 4, 2 * d, batch_first=True), sequences),
}


@pytest.mark.parametrize("precision", ["fp32", "amp-bf16", "bf16"])
@pytest.mark.parametrize("width", [16, 64, 128])
@pytest.mark.parametrize("name", LAYERS)
def test_peak(gpumem, name, width, precision):
    make, batch = LAYERS[name]
    gpumem.train_step(
        lambda: make(width), batch(width), config=precision, loss=lambda output, batch: output.float().square().mean()
    )
'''


def measure(instructions: str) -> dict[str, int]:
    """Peaks in bytes by test, in a process that is told to use ``instructions``. What it lacks kernels for is left out."""
    with tempfile.TemporaryDirectory() as folder:
        Path(folder, "pyproject.toml").touch()
        Path(folder, "test_small.py").write_text(TESTS, encoding="utf-8")
        command = [sys.executable, "-m", "pytest", "-q", "-p", "no:randomly", "-p", "no:cacheprovider"]
        command += ["--gpumem-device=cpu", "--gpumem-no-time", "--gpumem-explain=never", "--gpumem-report=report.json"]
        environment = {**os.environ, "ATEN_CPU_CAPABILITY": instructions}
        subprocess.run(command, cwd=folder, env=environment, stdout=subprocess.DEVNULL, check=False)
        report = json.loads(Path(folder, "report.json").read_text(encoding="utf-8"))
    return {
        result["verdict"]["test"]: result["verdict"]["verdicts"][0]["measurement"]["metrics"]["peak_allocated"]
        for result in report["results"]
        if result["verdict"]["verdicts"]
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--out", type=Path, help="write the peaks there, for --with in another environment")
    parser.add_argument(
        "--with", dest="other", type=Path, action="append", default=[], help="peaks of another environment"
    )
    arguments = parser.parse_args()
    peaks = {f"{instructions} here": measure(instructions) for instructions in SETS}
    if arguments.out is not None:
        arguments.out.write_text(json.dumps(peaks, indent=1), encoding="utf-8")
    for file in arguments.other:
        peaks |= {f"{name} in {file.stem}": of for name, of in json.loads(file.read_text(encoding="utf-8")).items()}
    for (one, mine), (other, theirs) in itertools.combinations(peaks.items(), 2):
        both = sorted(mine.keys() & theirs.keys())
        moved = [(abs(mine[test] - theirs[test]), test) for test in both if mine[test] != theirs[test]]
        largest = f", the largest difference {max(moved)[0]} bytes in {max(moved)[1]}" if moved else ""
        print(f"{one} and {other}: {len(both)} peaks, {len(moved)} differ{largest}")


if __name__ == "__main__":
    main()
