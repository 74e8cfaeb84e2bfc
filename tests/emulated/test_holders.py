"""Holders on an emulated GPU, where hooks and methods of torch are wrapped: paths lead through the wrappers."""

from __future__ import annotations

SOURCE = """
import pytest
import torch

pytestmark = pytest.mark.gpumem(max_retained="64 kB")
CACHE = {}
KEPT = []
WEIGHT = torch.nn.Parameter(torch.ones(16, device="cuda"))


class Strategy:
    def __init__(self):
        self.memo = []

    def __call__(self, gradient):
        self.memo.append(torch.ones(200, 200, device="cuda"))


WEIGHT.register_hook(Strategy())


def test_hook():
    (WEIGHT * 2).sum().backward()


def test_first_use():
    CACHE.setdefault(0, torch.ones(200, 200, device="cuda"))


def test_graph():
    KEPT.append((WEIGHT * torch.ones(4000, 16, device="cuda")).exp().sum())
"""


def test_the_holder_is_told_without_what_wraps_it(processes, tmp_path):
    (tmp_path / "pyproject.toml").write_text("", encoding="utf-8")
    (tmp_path / "test_it.py").write_text(SOURCE, encoding="utf-8")
    done = processes.pytest("-p", "no:randomly")
    assert done.returncode == 1, done.stdout + done.stderr
    holders = [line.strip() for line in done.stdout.splitlines() if line.startswith(("  kept in", "  filled by"))]
    assert holders == [
        "kept in: test_it.WEIGHT[...] -> Strategy.memo[...]",
        "filled by the first use: test_it.CACHE[...]",
        "kept in: the autograd graph of test_it.KEPT[...]",
    ]
