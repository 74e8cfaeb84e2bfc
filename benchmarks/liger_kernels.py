"""Sixteen kernels in plain PyTorch, as Liger's benchmarks of memory call them beside its own.

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
    if row["mode"] == "forward" and row["kernel"] not in _ALWAYS_FULL:
        measured = call
    elif row["mode"] == "backward" and row["kernel"] not in _ALWAYS_FULL:
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


_ALWAYS_FULL = ("group_norm",)
"""Kernels whose script runs forward and backward whatever the row's mode is."""
_Made = tuple["Callable[[], Any]", "Callable[[Any], None]"]
"""The call, and what is done with its result to go backward."""


def _layer_norm(x: str, config: Mapping[str, Any]) -> _Made:
    beside = nn.LayerNorm(int(x)).to("cuda")
    return _normed(nn.LayerNorm(int(x), eps=config["eps"]).to("cuda"), beside, config)


def _rms_norm(x: str, config: Mapping[str, Any]) -> _Made:
    beside = RootMeanSquareNorm(int(x), config["eps"]).to("cuda")
    return _normed(RootMeanSquareNorm(int(x), config["eps"]).to("cuda"), beside, config)


def _normed(norm: nn.Module, beside: nn.Module, config: Mapping[str, Any]) -> _Made:
    """``beside`` stands for Liger's norm, which is there as well while the other is measured."""
    given = torch.randn(config["M"], norm.get_parameter("weight").shape[0], dtype=_dtype(config), device="cuda")
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


def _group_norm(x: str, config: Mapping[str, Any]) -> _Made:
    channels, shape = int(x), (config["M"], int(x), config["H"])
    norm, beside = (
        nn.GroupNorm(channels // config["channels_per_group"], channels, eps=config["eps"]).to("cuda") for _ in range(2)
    )
    given = torch.randn(shape, dtype=_dtype(config), device="cuda")
    gradient = torch.randn_like(given)
    given.requires_grad_()

    def backward(made: torch.Tensor, _beside: nn.Module = beside) -> None:
        made.backward(gradient, retain_graph=True)

    return lambda: norm(given), backward


class AddedNorm(nn.Module):
    """A residual stream that is added to and normed, in fp32 and rounded to the input's type."""

    def __init__(self, width: int, eps: float) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.ones(width))
        self.eps = eps

    def forward(self, x: torch.Tensor, residual: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        given = x.dtype
        x = x.to(torch.float32)
        residual = residual.to(torch.float32)
        x = x + residual
        residual = x
        variance = x.pow(2).mean(-1, keepdim=True)
        x = x * torch.rsqrt(variance + self.eps)
        return self.weight * x.to(given), residual.to(given)


def _fused_add_rms_norm(x: str, config: Mapping[str, Any]) -> _Made:
    # Liger's two norms are there as well, one of which has two weights.
    beside = [torch.ones(int(x), device="cuda") for _ in range(3)]
    norm = AddedNorm(int(x), config["eps"]).to("cuda")
    given, residual = (torch.randn(config["M"], int(x), dtype=_dtype(config), device="cuda") for _ in range(2))
    gradients = torch.randn_like(given), torch.randn_like(residual)
    given.requires_grad_()
    residual.requires_grad_()

    def backward(made: tuple[torch.Tensor, torch.Tensor], _beside: Any = beside) -> None:
        torch.autograd.backward(made, gradients)

    return lambda: norm(given, residual), backward


def _megatron_rms_norm(x: str, config: Mapping[str, Any]) -> _Made:
    norm = nn.RMSNorm(int(x), eps=1e-6).to("cuda").to(torch.bfloat16)
    given = torch.randn(config["S"], config["B"], int(x), device="cuda", dtype=torch.bfloat16, requires_grad=True)
    return lambda: norm(given), _backward_of_sum


def _megatron_swiglu(x: str, config: Mapping[str, Any]) -> _Made:
    given = torch.randn(config["S"], config["B"], 2 * int(x), device="cuda", dtype=torch.bfloat16, requires_grad=True)

    def call() -> torch.Tensor:
        given.grad = None
        gate, up = torch.chunk(given, 2, -1)
        return nn.functional.silu(gate) * up

    return call, _backward_of_sum


def _backward_of_sum(made: torch.Tensor) -> None:
    made.sum().backward()


def _elementwise(run: Callable[[torch.Tensor], torch.Tensor]) -> Callable[[str, Mapping[str, Any]], _Made]:
    """Of one dimension, as the scripts gave the width alone as a shape."""

    def make(x: str, config: Mapping[str, Any]) -> _Made:
        given = torch.randn(int(x), device="cuda", dtype=_dtype(config), requires_grad=True)
        return lambda: run(given), lambda made: made.backward(torch.ones_like(made), retain_graph=True)

    return make


def _sparsemax(x: str, config: Mapping[str, Any]) -> _Made:
    given = torch.randn(config["B"] * config["T"], int(x), dtype=_dtype(config), device="cuda")
    gradient = torch.randn_like(given)
    given.requires_grad_()

    def call() -> torch.Tensor:
        ordered, _ = torch.sort(given, dim=-1, descending=True)
        sums = torch.cumsum(ordered, dim=-1)
        numbers = torch.arange(1, given.shape[-1] + 1, device="cuda", dtype=given.dtype).view(1, -1)
        bound = 1 + numbers * ordered
        support = bound > sums
        size = support.sum(dim=-1, keepdim=True).clamp(min=1)
        total = (ordered * support).sum(dim=-1, keepdim=True)
        threshold = (total - 1) / size
        return torch.clamp(given - threshold, min=0)

    return call, lambda made: made.backward(gradient, retain_graph=True)


def _between(
    loss: Callable[[torch.Tensor, torch.Tensor], torch.Tensor],
    given_as: Callable[..., torch.Tensor],
    target_as: Callable[..., torch.Tensor],
) -> Callable[[str, Mapping[str, Any]], _Made]:
    """A loss of two distributions over a vocabulary, made of random logits."""

    def make(x: str, config: Mapping[str, Any]) -> _Made:
        rows, entries = (
            (int(x), config["vocab_size"]) if "vocab_size" in config else (config["B"] * config["T"], int(x))
        )
        given = given_as(torch.randn(rows, entries, requires_grad=True, device="cuda"), dim=-1)
        target = target_as(torch.randn(rows, entries, device="cuda"), dim=-1)
        return lambda: loss(given, target), _backward if "vocab_size" in config else _backward_of_scalar

    return make


def _backward_of_scalar(made: torch.Tensor) -> None:
    made.backward(retain_graph=True)


def _jensen_shannon(p: torch.Tensor, q: torch.Tensor) -> torch.Tensor:
    divergence = nn.KLDivLoss(reduction="batchmean", log_target=True)
    mean = 0.5 * (torch.exp(p) + torch.exp(q))
    log_mean = torch.log(mean)
    return 0.5 * (divergence(log_mean, p) + divergence(log_mean, q))


def _total_variation(p: torch.Tensor, q: torch.Tensor) -> torch.Tensor:
    distance = torch.abs(p - q) / 2.0
    return torch.sum(distance) / p.size(0)


def _fused_linear_cross_entropy(x: str, config: Mapping[str, Any]) -> _Made:
    width, entries, dtype = config["H"], config["V"], _dtype(config)
    head, beside = (nn.Linear(width, entries, bias=False, dtype=dtype, device="cuda") for _ in range(2))
    loss = nn.CrossEntropyLoss()
    given = torch.randn(int(x), width, requires_grad=True, dtype=dtype, device="cuda")
    target = torch.randint(entries, (int(x), 1), device="cuda").squeeze(1)

    def call() -> torch.Tensor:
        logits = head(given)
        return loss(logits, target)

    def backward(made: torch.Tensor, _beside: nn.Module = beside) -> None:
        made.backward()

    return call, backward


def _dtype(config: Mapping[str, Any]) -> torch.dtype:
    return {"torch.float32": torch.float32, "torch.bfloat16": torch.bfloat16}[config["dtype"]]


_KERNELS: dict[str, Callable[[str, Mapping[str, Any]], _Made]] = {
    "layer_norm": _layer_norm,
    "rms_norm": _rms_norm,
    "cross_entropy": _cross_entropy,
    "swiglu": _gated,
    "geglu": _gated,
    "group_norm": _group_norm,
    "fused_add_rms_norm": _fused_add_rms_norm,
    "megatron_rms_norm": _megatron_rms_norm,
    "megatron_swiglu": _megatron_swiglu,
    "softmax": _elementwise(nn.Softmax(dim=-1)),
    "relu_squared": _elementwise(lambda x: torch.square(nn.functional.relu(x))),
    "sparsemax": _sparsemax,
    "kl_div": _between(nn.KLDivLoss(reduction="batchmean"), torch.log_softmax, torch.softmax),
    "jsd": _between(_jensen_shannon, torch.log_softmax, torch.log_softmax),
    "tvd": _between(_total_variation, torch.softmax, torch.softmax),
    "fused_linear_cross_entropy": _fused_linear_cross_entropy,
}
