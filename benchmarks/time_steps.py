"""The steps that `time_samples.py` times: equal sub-steps of four kinds of work, and more of them as a planted slowdown."""

from __future__ import annotations

import time
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from collections.abc import Callable

SUB_STEPS = 100
"""A step is this many sub-steps, so that N more of them make it exactly N % longer."""
SLOWDOWNS = (3, 5, 10, 20)
"""Planted, in percent."""
LARGE_SLOWDOWNS = (25, 100)
"""Planted beside loads, in percent: more of the step's own work, and as a busy wait."""
_TIMED_FOR_A_WAIT = 5


def planted(sub_step: Callable[[], object], percent: int = 0, wait: int = 0) -> Callable[[], None]:
    """A step of `SUB_STEPS` sub-steps and ``percent`` more, and a busy wait of ``wait`` percent of their time on a core."""
    count = SUB_STEPS + percent

    def step() -> None:
        for _ in range(count):
            sub_step()

    return step if wait == 0 else _waiting(step, wait / 100)


def _waiting(step: Callable[[], None], share: float) -> Callable[[], None]:
    step()
    seconds = share * min(_seconds_on_core(step) for _ in range(_TIMED_FOR_A_WAIT))

    def longer() -> None:
        step()
        until = time.perf_counter() + seconds
        while time.perf_counter() < until:
            pass

    return longer


def _seconds_on_core(step: Callable[[], None]) -> float:
    began = time.thread_time()
    step()
    return time.thread_time() - began


def gpt() -> Callable[[], object]:
    """A training step of a GPT-2 of one tiny block: much dispatching, little arithmetic."""
    import torch
    from torch import nn
    from torch.nn import functional

    class Gpt(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.tokens, self.positions = nn.Embedding(64, 32), nn.Embedding(16, 32)
            self.before, self.between = nn.LayerNorm(32), nn.LayerNorm(32)
            self.attention, self.projection = nn.Linear(32, 96), nn.Linear(32, 32)
            self.up, self.down = nn.Linear(32, 128), nn.Linear(128, 32)

        def forward(self, tokens: torch.Tensor) -> torch.Tensor:
            x = self.tokens(tokens) + self.positions.weight
            heads = (
                part.unflatten(-1, (4, 8)).transpose(1, 2) for part in self.attention(self.before(x)).chunk(3, dim=-1)
            )
            seen = functional.scaled_dot_product_attention(*heads, is_causal=True)
            x = x + self.projection(seen.transpose(1, 2).flatten(2))
            x = x + self.down(functional.gelu(self.up(self.between(x))))
            return functional.linear(x, self.tokens.weight)

    tokens = torch.randint(64, (2, 16))
    return _training(Gpt(), lambda model: functional.cross_entropy(model(tokens).flatten(0, 1), tokens.flatten()))


def convnet() -> Callable[[], object]:
    """A training step of a convnet of two layers."""
    import torch
    from torch import nn

    model = nn.Sequential(nn.Conv2d(3, 8, 3), nn.BatchNorm2d(8), nn.ReLU(), nn.Conv2d(8, 8, 3))
    batch = torch.randn(2, 3, 14, 14)
    return _training(model, lambda model: model(batch).square().mean())


def mlp() -> Callable[[], object]:
    """A training step of an MLP whose 2 MB of weights and gradients do not stay in the fastest cache: mostly arithmetic."""
    import torch
    from torch import nn

    model = nn.Sequential(nn.Linear(256, 512), nn.GELU(), nn.Linear(512, 256))
    batch = torch.randn(16, 256)
    return _training(model, lambda model: model(batch).square().mean())


def python() -> Callable[[], object]:
    """Nearly pure Python, as around the small operators of a data pipeline: objects, dicts, one tiny tensor."""
    import torch

    row = torch.arange(8)

    def sub_step() -> int:
        table: dict[int, tuple[int, str]] = {}
        for number in range(1000):
            table[number * 7919 % 1009] = (number, str(number))
        return sum(number for number, _ in sorted(table.values())) + int(row.sum())

    return sub_step


STEPS: dict[str, Callable[[], Callable[[], object]]] = {"gpt": gpt, "convnet": convnet, "mlp": mlp, "python": python}


def _training(model, loss_of) -> Callable[[], object]:  # type: ignore[no-untyped-def] # noqa: ANN001
    import torch

    optimizer = torch.optim.SGD(model.parameters(), lr=1e-3)

    def sub_step() -> None:
        loss_of(model).backward()
        optimizer.step()
        optimizer.zero_grad(set_to_none=True)

    return sub_step
