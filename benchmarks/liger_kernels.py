"""Five kernels in plain PyTorch, as Liger's benchmarks of memory call them beside its own.

Shapes, calls and the metric are those of linkedin/Liger-Kernel's ``benchmark/scripts``. The norms and the gated layers are what
`transformers` has for Llama, the others are torch's own.
"""

from __future__ import annotations

import json
import statistics
from typing import TYPE_CHECKING, Any

import torch
from torch import nn

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping

REPEATS = 10
VOCABULARIES = {
    "llama_2_7b": 32_000,
    "llama_3_8b": 128_256,
    "qwen2.5_7b": 152_064,
    "qwen2.5_14b": 152_064,
    "qwen2.5_72b": 152_064,
    "deepseek_v2_lite": 102_400,
    "deepseek_v3": 129_280,
}
"""Meaning of the names of models in the published rows."""


class RootMeanSquareNorm(nn.Module):
    """RMS norm as Llama's: computed in fp32, rounded to the input's type, then scaled."""

    def __init__(self, width: int, eps: float) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.ones(width))
        self.eps = eps

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        given = x.dtype
        x = x.to(torch.float32)
        variance = x.pow(2).mean(-1, keepdim=True)
        x = x * torch.rsqrt(variance + self.eps)
        return self.weight * x.to(given)


class GatedLayer(nn.Module):
    """The gated feed-forward layer of Llama, without biases."""

    def __init__(self, width: int, inner: int, activation: nn.Module) -> None:
        super().__init__()
        self.gate = nn.Linear(width, inner, bias=False)
        self.up = nn.Linear(width, inner, bias=False)
        self.down = nn.Linear(inner, width, bias=False)
        self.activation = activation

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.down(self.activation(self.gate(x)) * self.up(x))


def warm_up(row: Mapping[str, str]) -> None:
    """Run a kernel forward and backward, and let go of it: there, it had been timed before. The workspaces of cuBLAS stay."""
    call, backward = _KERNELS[row["kernel"]](row["x"], json.loads(row["config"]))
    backward(call())


def peak_of(row: Mapping[str, str]) -> float:
    """Run a published row, and return its metric in bytes: the median of the peaks of ten calls. All that is alive counts."""
    call, backward = _KERNELS[row["kernel"]](row["x"], json.loads(row["config"]))
    measured: Callable[[], Any]
    if row["mode"] == "forward":
        measured = call
    elif row["mode"] == "backward":
        made = call()
        gradient = torch.randn_like(made)

        def measured() -> None:
            made.backward(gradient, retain_graph=True)
    else:

        def measured() -> None:
            made = call()
            backward(made)

    peaks = []
    for _ in range(REPEATS):
        torch.cuda.reset_peak_memory_stats()
        measured()
        peaks.append(torch.cuda.max_memory_allocated())
    return statistics.median(peaks)


_Made = tuple["Callable[[], torch.Tensor]", "Callable[[torch.Tensor], None]"]
"""The call, and what is done with its result to go backward."""


def _layer_norm(x: str, config: Mapping[str, Any]) -> _Made:
    beside = nn.LayerNorm(int(x)).to("cuda")
    return _normed(nn.LayerNorm(int(x), eps=config["eps"]).to("cuda"), beside, config)


def _rms_norm(x: str, config: Mapping[str, Any]) -> _Made:
    beside = RootMeanSquareNorm(int(x), config["eps"]).to("cuda")
    return _normed(RootMeanSquareNorm(int(x), config["eps"]).to("cuda"), beside, config)


def _normed(norm: nn.Module, beside: nn.Module, config: Mapping[str, Any]) -> _Made:
    """``beside`` stands for Liger's norm, which is there as well while the other is measured."""
    given = torch.randn(config["M"], norm.weight.shape[0], dtype=_dtype(config), device="cuda")
    gradient = torch.randn_like(given)
    given.requires_grad_()

    def backward(made: torch.Tensor, _beside: nn.Module = beside) -> None:
        made.backward(gradient, retain_graph=True)

    return lambda: norm(given), backward


def _backward(made: torch.Tensor) -> None:
    made.backward(torch.randn_like(made), retain_graph=True)


def _cross_entropy(x: str, config: Mapping[str, Any]) -> _Made:
    if x in VOCABULARIES:
        rows, entries = config["bsz"] * config["seq_len"], VOCABULARIES[x]
    elif "vocab_size" in config:
        rows, entries = int(x), config["vocab_size"]
    else:
        rows, entries = config["B"] * config["T"], int(x)
    loss = nn.CrossEntropyLoss()
    given = torch.randn(rows, entries, requires_grad=True, device="cuda")
    target = torch.randint(entries, (rows,), device="cuda")
    # The script of 2024, whose rows give B and T, went backward without a gradient.
    return lambda: loss(given, target), torch.Tensor.backward if "B" in config else _backward


def _gated(x: str, config: Mapping[str, Any]) -> _Made:
    batch, width, inner = config.get("bsz") or config["B"], config["hidden_size"], config["intermediate_size"]
    given = torch.randn(batch, int(x), width, device="cuda", dtype=_dtype(config), requires_grad=True)
    activation = nn.SiLU() if config["hidden_act"] == "silu" else nn.GELU(approximate="tanh")
    layer = GatedLayer(width, inner, activation).to("cuda").to(_dtype(config))
    return lambda: layer(given), _backward


def _dtype(config: Mapping[str, Any]) -> torch.dtype:
    return {"torch.float32": torch.float32, "torch.bfloat16": torch.bfloat16}[config["dtype"]]


_KERNELS: dict[str, Callable[[str, Mapping[str, Any]], _Made]] = {
    "layer_norm": _layer_norm,
    "rms_norm": _rms_norm,
    "cross_entropy": _cross_entropy,
    "swiglu": _gated,
    "geglu": _gated,
}
