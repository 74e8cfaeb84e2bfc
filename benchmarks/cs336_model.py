"""A language model of Stanford's course CS336 with its optimizer and training step, written from a description of it.

The same operators are called on the same shapes in the same order as by those who published its peaks, and what is held by a
local variable there is held by one here: that is all that a peak depends on. `published_peaks.py` says whose they are.
"""

from __future__ import annotations

import math
from contextlib import nullcontext
from dataclasses import dataclass
from typing import TYPE_CHECKING

import torch
import torch.distributed as dist
from torch import nn
from torch.utils.checkpoint import checkpoint

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable

BATCH = 4
VOCABULARY = 10_000
THETA = 10_000.0
EPSILON = 1e-5


@dataclass(frozen=True)
class Size:
    """One of the course's models."""

    width: int
    inner: int
    layers: int
    heads: int


SIZES = {
    "small": Size(768, 3072, 12, 12),
    "medium": Size(1024, 4096, 24, 16),
    "xl": Size(2560, 10240, 32, 32),
}


class Projection(nn.Module):
    """A linear layer without bias, as one einsum."""

    def __init__(self, inputs: int, outputs: int) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.empty(outputs, inputs))
        nn.init.normal_(self.weight, std=math.sqrt(2 / (inputs + outputs)))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return torch.einsum("bsi,oi->bso", x, self.weight)


class Lookup(nn.Module):
    """An embedding that is read by indexing its weight."""

    def __init__(self, entries: int, width: int) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.empty(entries, width))
        nn.init.normal_(self.weight)

    def forward(self, tokens: torch.Tensor) -> torch.Tensor:
        return self.weight[tokens, :]


class RootMeanSquareNorm(nn.Module):
    """RMS norm, as separate operators."""

    def __init__(self, width: int) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.empty(width))
        nn.init.ones_(self.weight)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        given = x.dtype
        x = x.to(torch.float32)
        scale = torch.rsqrt(x.pow(2).mean(-1, keepdim=True) + EPSILON)
        x = x * scale
        return (self.weight * x).to(given)


class Rotary(nn.Module):
    """Rotary positions: a table of cosines and sines, and neighbouring elements turned by them."""

    table: torch.Tensor

    def __init__(self, context: int, width: int) -> None:
        super().__init__()
        rates = THETA ** -(torch.arange(0, width, 2) / width)
        angles = torch.outer(torch.arange(context), rates)
        self.register_buffer("table", torch.stack((torch.cos(angles), torch.sin(angles))), persistent=False)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        first, second = x.unflatten(-1, (-1, 2)).movedim(-1, 0).unbind(0)
        cos, sin = self.table.unbind(0)
        turned_first = cos * first - sin * second
        turned_second = sin * first + cos * second
        return torch.cat((turned_first, turned_second), dim=-1)


def softmax(x: torch.Tensor) -> torch.Tensor:
    """Softmax over the last dimension, by hand."""
    shifted = x - torch.max(x, dim=-1, keepdim=True)[0]
    powers = torch.exp(shifted)
    return powers / torch.sum(powers, dim=-1, keepdim=True)


def attend(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, mask: torch.Tensor) -> torch.Tensor:
    """Attention proper: what it makes on the way is let go when it returns."""
    scores = torch.einsum("bhqd,bhkd->bhqk", q, k) / math.sqrt(q.shape[-1])
    scores = torch.where(mask, scores, float("-inf"))
    weights = softmax(scores)
    return torch.einsum("bhqk,bhkd->bhqd", weights, v)


class Attention(nn.Module):
    """Causal attention of several heads with rotary positions."""

    def __init__(self, size: Size, rotary: Rotary) -> None:
        super().__init__()
        self.heads = size.heads
        self.q = Projection(size.width, size.width)
        self.k = Projection(size.width, size.width)
        self.v = Projection(size.width, size.width)
        self.out = Projection(size.width, size.width)
        self.rotary = rotary

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        length = x.shape[1]
        q, k, v = self.q(x), self.k(x), self.v(x)
        q, k, v = (one.unflatten(-1, (self.heads, -1)).permute(0, 2, 1, 3) for one in (q, k, v))
        q = self.rotary(q)
        k = self.rotary(k)
        positions = torch.arange(length, device=x.device)
        mask = (positions.view(length, 1) >= positions.view(1, length))[None]
        mixed = attend(q, k, v, mask)
        mixed = mixed.permute(0, 2, 1, 3).flatten(2).contiguous()
        return self.out(mixed)


def silu(x: torch.Tensor) -> torch.Tensor:
    """SiLU as two operators."""
    return x * torch.sigmoid(x)


class FeedForward(nn.Module):
    """SwiGLU."""

    def __init__(self, size: Size) -> None:
        super().__init__()
        self.gate = Projection(size.width, size.inner)
        self.down = Projection(size.inner, size.width)
        self.up = Projection(size.width, size.inner)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.down(silu(self.gate(x)) * self.up(x))


class Block(nn.Module):
    """A block with its norms in front."""

    def __init__(self, size: Size, rotary: Rotary) -> None:
        super().__init__()
        self.attention = Attention(size, rotary)
        self.feed_forward = FeedForward(size)
        self.before_attention = RootMeanSquareNorm(size.width)
        self.before_feed_forward = RootMeanSquareNorm(size.width)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        mixed = self.attention(self.before_attention(x))
        attended = x + mixed
        fed = self.feed_forward(self.before_feed_forward(attended))
        return attended + fed


class LanguageModel(nn.Module):
    """The whole model. ``group`` blocks at a time are under one checkpoint; 0: none are."""

    def __init__(self, size: Size, context: int, group: int = 0) -> None:
        super().__init__()
        self.group = group
        self.embedding = Lookup(VOCABULARY, size.width)
        rotary = Rotary(context, size.width // size.heads)
        self.blocks = nn.ModuleList(Block(size, rotary) for _ in range(size.layers))
        self.norm = RootMeanSquareNorm(size.width)
        self.head = Projection(size.width, VOCABULARY)

    def forward(self, tokens: torch.Tensor) -> torch.Tensor:
        x = self.embedding(tokens)
        if self.group:
            for begin in range(0, len(self.blocks), self.group):
                x = checkpoint(self._blocks, x, begin, use_reentrant=False)
        else:
            for block in self.blocks:
                x = block(x)
        return self.head(self.norm(x))

    def _blocks(self, x: torch.Tensor, begin: int) -> torch.Tensor:
        for block in self.blocks[begin : begin + self.group]:
            x = block(x)
        return x


class LoopedAdamW(torch.optim.Optimizer):
    """AdamW as a loop over parameters, each operator of which makes a new tensor."""

    def __init__(
        self,
        params: Iterable[nn.Parameter],
        lr: float = 1e-3,
        betas: tuple[float, float] = (0.9, 0.999),
        eps: float = 1e-8,
        decay: float = 0.01,
    ) -> None:
        super().__init__(params, {"lr": lr, "betas": betas, "eps": eps, "decay": decay})

    @torch.no_grad()
    def step(self) -> None:  # type: ignore[override]
        """Update all parameters. ``get`` makes its default in each step, although it is needed in the first only."""
        for group in self.param_groups:
            (first, second), rate = group["betas"], group["lr"]
            for parameter in group["params"]:
                if parameter.grad is None:
                    continue
                state = self.state[parameter]
                gradient = parameter.grad.data
                parameter.data -= (rate * group["decay"]) * parameter.data
                times = state.get("times", 1)
                mean_before = state.get("mean", torch.zeros_like(gradient))
                square_before = state.get("square", torch.zeros_like(gradient))
                mean = first * mean_before + (1 - first) * gradient
                square = second * square_before + (1 - second) * torch.square(gradient)
                corrected = rate * math.sqrt(1 - second**times) / (1 - first**times)
                parameter.data -= corrected * mean / (torch.sqrt(square) + group["eps"])
                state["times"], state["mean"], state["square"] = times + 1, mean, square


@dataclass(frozen=True)
class Run:
    """Settings of a run: ``mode`` is ``"forward"``, ``"backward"`` or ``"train"``, ``precision`` ``"fp32"`` or ``"bf16"``."""

    size: str
    precision: str
    mode: str
    context: int
    group: int = 0
    """Blocks under one checkpoint; 0: none are."""
    ranks: int = 1
    """GPUs that share a batch, of which this is the first; each gradient is summed over them after backward."""
    sharded: bool = False
    """Shards each layer over these GPUs (torch's ``fully_shard``) in place of that."""


def _shard_layers(model: nn.Module, ranks: int) -> None:
    """Shard each layer that has parameters by itself over ``ranks`` GPUs, then the model."""
    from torch.distributed.device_mesh import init_device_mesh
    from torch.distributed.fsdp import fully_shard

    mesh = init_device_mesh("cuda", (ranks,))
    for layer in list(model.modules()):
        if layer is not model and any(True for _ in layer.parameters(recurse=False)):
            fully_shard(layer, mesh=mesh)
    fully_shard(model, mesh=mesh)


def _sum_gradients(model: nn.Module, run: Run) -> None:
    """Sum each gradient over the ranks, unless they were shared out in backward."""
    for parameter in model.parameters() if run.ranks > 1 and not run.sharded else ():
        dist.all_reduce(parameter.grad)


def make_step(run: Run) -> Callable[[dict[str, int] | None], torch.Tensor]:
    """Build the model, its optimizer and a batch on the GPU.

    Returns:
        A function that makes a step. It puts the bytes that are allocated after each phase into the dictionary it is given.
    """
    torch.manual_seed(0)
    torch.backends.cuda.matmul.allow_tf32 = False
    torch.backends.cudnn.allow_tf32 = False
    if run.ranks > 1:
        # The others are emulated by this process: they do as it does.
        dist.init_process_group("nccl", store=dist.HashStore(), rank=0, world_size=run.ranks)
    with torch.device("cuda"):
        model = LanguageModel(SIZES[run.size], run.context, run.group)
    if run.sharded:
        _shard_layers(model, run.ranks)
    optimizer = LoopedAdamW(model.parameters())
    rows = BATCH // run.ranks
    tokens = torch.randint(VOCABULARY, (rows, run.context), device="cuda")
    targets = torch.randint(VOCABULARY, (rows, run.context), device="cuda")

    def step(stages: dict[str, int] | None) -> torch.Tensor:
        def tell(stage: str) -> None:
            if stages is not None:
                torch.cuda.synchronize()
                stages[stage] = torch.cuda.memory_allocated()

        optimizer.zero_grad(set_to_none=True)
        with torch.autocast("cuda", torch.bfloat16) if run.precision == "bf16" else nullcontext():
            logits = model(tokens)
            if run.mode != "forward":
                loss = nn.functional.cross_entropy(logits.flatten(0, 1).float(), targets.flatten())
        tell("after_forward_allocated")
        if run.mode == "forward":
            return logits[0, 0, 0].detach()
        loss.backward()
        _sum_gradients(model, run)
        tell("after_backward_allocated")
        if run.mode == "train":
            optimizer.step()
            tell("after_optimizer_allocated")
        return loss.detach()

    return step
