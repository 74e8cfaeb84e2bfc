"""A training script as people write it. The corpus edits copies of it; it is not run from here."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import torch

if TYPE_CHECKING:
    from collections.abc import Callable


def training(model: torch.nn.Module, batch: dict[str, torch.Tensor]) -> Callable[[], object]:
    """A step: forward, backward, optimizer."""
    model.train()
    optimizer = torch.optim.AdamW(model.parameters(), foreach=False)

    def step() -> None:
        loss = model(**batch, use_cache=False).loss
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()

    return step


def accumulating(model: torch.nn.Module, batch: dict[str, torch.Tensor], parts: int = 4) -> Callable[[], object]:
    """A step whose gradients are those of several small batches."""
    model.train()
    optimizer = torch.optim.SGD(model.parameters())

    def step() -> None:
        for part in range(parts):
            few = {name: tensor.chunk(parts)[part] for name, tensor in batch.items()}
            loss = model(**few, use_cache=False).loss / parts
            loss.backward()
        optimizer.step()
        optimizer.zero_grad()

    return step


def autocasting(model: torch.nn.Module, batch: dict[str, torch.Tensor]) -> Callable[[], object]:
    """A step in mixed precision."""
    model.train()
    optimizer = torch.optim.SGD(model.parameters())

    def step() -> None:
        with torch.autocast("cpu", dtype=torch.bfloat16):
            loss = model(**batch, use_cache=False).loss
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()

    return step


def truncating(model: torch.nn.Module, batch: dict[str, torch.Tensor], longest: int = 64) -> Callable[[], object]:
    """A step that cuts what is too long."""
    model.train()
    optimizer = torch.optim.SGD(model.parameters())

    def step() -> None:
        ids = batch["input_ids"]
        loss = model(input_ids=ids[:, :longest], labels=ids[:, :longest], use_cache=False).loss
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()

    return step


def evaluating(model: torch.nn.Module, batch: dict[str, torch.Tensor]) -> Callable[[], object]:
    """A step of validation."""
    model.eval()
    history: list[Any] = []

    def step() -> None:
        with torch.no_grad():
            history.append(model(**batch, use_cache=False).loss.item())

    return step
