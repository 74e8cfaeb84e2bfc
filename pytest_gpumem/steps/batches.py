"""Batches: moved to a device, described, counted, shared out, and fed to a model."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from contextlib import suppress
from numbers import Integral, Real
from typing import TYPE_CHECKING, Any

from pytest_gpumem.measurement import ITEMS, SAMPLES, TOKENS
from pytest_gpumem.torch_support.reachability import members_of, tensors_in
from pytest_gpumem.torch_support.static_access import dtype_and_shape, instance_dict, is_a, tensor_text

if TYPE_CHECKING:
    import torch


def mapped(batch: Any, change: Callable[[torch.Tensor], torch.Tensor]) -> Any:
    """Return the batch with ``change`` applied to each of its tensors; everything else in it stays as it is.

    A mapping becomes a dict; lists and tuples keep their class, without its code being run. A part that leads back to
    one around it stays as it is.
    """
    import torch

    made: dict[int, Any] = {}
    opened: dict[int, tuple[object, dict[Any, Any]]] = {}
    stack = [batch]
    while stack:
        one = stack.pop()
        if id(one) in made or is_a(one, torch.Tensor):
            continue
        if id(one) in opened:
            # Its parts are made.
            _, parts = opened[id(one)]
            made[id(one)] = _like(one, {key: _changed(part, made, change) for key, part in parts.items()})
            continue
        members = members_of(one)
        if members is not None:
            opened[id(one)] = one, members
            stack += [one, *(member for member in members.values() if id(member) not in opened)]
    return _changed(batch, made, change)


def _changed(one: Any, made: Mapping[int, Any], change: Callable[[torch.Tensor], torch.Tensor]) -> Any:
    import torch

    return change(one) if is_a(one, torch.Tensor) else made.get(id(one), one)


def _like(container: object, members: dict[Any, Any]) -> Any:
    """Return a container of the same class with other members."""
    kind: Any = type(container)
    if not is_a(container, list, tuple):
        return members
    try:
        if is_a(container, tuple):
            made: Any = tuple.__new__(kind, members.values())
        else:
            made = list.__new__(kind)
            list.extend(made, members.values())
    except TypeError:  # it has a constructor in C (torch.Size)
        return kind(members.values())
    own, theirs = instance_dict(made), instance_dict(container)
    if own is not None and theirs is not None:
        dict.update(own, theirs)
    return made


def on_device(batch: Any, device: torch.device) -> Any:
    """Return the batch with its tensors on ``device``, not copied if they are there. A function that makes it is called.

    It is called as it is: within ``torch.device(device)`` one that draws with a generator of the CPU would fail.
    """
    import torch

    if callable(batch) and not is_a(batch, torch.Tensor):
        batch = batch()
    return mapped(batch, lambda tensor: tensor.to(device))


def micro_batches(batch: Any, number: int) -> list[Any]:
    """Return ``number`` parts of equal size, as views. Tensors without the batch's first dimension are the same in all parts.

    Raises ``ValueError`` when the samples cannot be shared out equally.
    """
    samples = samples_in(batch)
    if number == 1:
        return [batch]
    if samples is None or samples % number:
        what = "has no samples" if samples is None else f"has {samples} samples"
        raise ValueError(f"accumulate={number} needs a batch of a multiple of {number} samples; this one {what}")
    size = samples // number

    def part(first: int) -> Any:
        def cut(tensor: torch.Tensor) -> torch.Tensor:
            return tensor.narrow(0, first, size) if tensor.dim() and tensor.shape[0] == samples else tensor

        return mapped(batch, cut)

    return [part(first) for first in range(0, samples, size)]


def describe(batch: object) -> str:
    """Return dtypes and shapes of the batch's tensors: ``"int64[4, 256], float32[4]"``."""
    return ", ".join(tensor_text(*dtype_and_shape(tensor)) for tensor in tensors_in(batch))


def samples_in(batch: object) -> int | None:
    """Return the first dimension of the batch's first tensor; ``None`` when there is none."""
    for tensor in tensors_in(batch):
        _, shape = dtype_and_shape(tensor)
        return int(shape[0]) if shape else None
    return None


def work_in(batch: object, items: float | str | None) -> dict[str, float]:
    """Return what a step works on, by name; first that of ``items``: a number, ``"samples"`` (the default) or ``"tokens"``.

    Tokens are the elements of the batch's first tensor of integers. Raises ``ValueError`` for another word, for what is no
    finite number above zero, or for a batch without tokens when they are asked for.
    """
    counts = {SAMPLES: samples_in(batch), TOKENS: _tokens_in(batch)}
    work: dict[str, float] = {name: count for name, count in counts.items() if count is not None}
    if items is None:
        items = SAMPLES
    if not isinstance(items, str):
        return {ITEMS: number_of_items(items), **work}
    if items not in counts:
        raise ValueError(f"items={items!r}: write a number, 'samples' or 'tokens'")
    if items not in work and items == TOKENS:
        raise ValueError(f"items='tokens' counts a tensor of integers, and the batch has none: {describe(batch)}")
    return {items: work[items], **work} if items in work else {}


def work_of_items(items: float | None) -> dict[str, float]:
    """Return what a step without a batch works on, by name: nothing unless ``items`` are given.

    Raises as `number_of_items`.
    """
    return {} if items is None else {ITEMS: number_of_items(items)}


def number_of_items(items: object) -> float:
    """Return ``items`` as a plain number. Raises ``ValueError`` unless it is finite and above zero."""
    if isinstance(items, Real) and not isinstance(items, bool):
        with suppress(OverflowError):
            if 0 < float(items) < math.inf:
                return int(items) if isinstance(items, Integral) else float(items)
    raise ValueError(f"items={items!r}: write what one step works on as a finite number above zero")


def number_of_steps(steps: object, least: int, why: str) -> int:
    """Return ``steps``, a whole number.

    Raises:
        TypeError: It is something else, for example the list of a loop's batches.
        ValueError: There are fewer than ``least``. The message ends with ``why``.
    """
    if isinstance(steps, bool) or not isinstance(steps, Integral):
        raise TypeError(f"steps is a {type(steps).__name__}, and must be a whole number, {least} or more: {why}")
    if steps < least:
        raise ValueError(f"steps={steps}: {why}")
    return int(steps)


def _tokens_in(batch: object) -> int | None:
    for tensor in tensors_in(batch):
        dtype, shape = dtype_and_shape(tensor)
        if not dtype.startswith(("float", "bfloat", "complex")):
            return math.prod(shape)
    return None


def arguments_of(batch: Any) -> tuple[tuple[Any, ...], dict[str, Any]]:
    """Return the arguments that a model is called with for a batch: a mapping's by keyword, a tuple's or list's by position."""
    if issubclass(type(batch), Mapping):
        return (), dict(batch)
    return (tuple(batch) if is_a(batch, tuple, list) else (batch,)), {}


def feed(model: Any, batch: Any) -> Any:
    """Return the model's output for a batch."""
    args, kwargs = arguments_of(batch)
    return model(*args, **kwargs)
