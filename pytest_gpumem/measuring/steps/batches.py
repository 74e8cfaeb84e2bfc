"""Batches: move them to a device, describe, count and split them, and pass them to a model."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from contextlib import suppress
from numbers import Integral, Real
from typing import TYPE_CHECKING, Any

from pytest_gpumem.facts.measurement import ITEMS, SAMPLES, TOKENS
from pytest_gpumem.torch_support.reachability import members_of, tensors_in
from pytest_gpumem.torch_support.static_access import dtype_and_shape, instance_dict, is_a, tensor_text

if TYPE_CHECKING:
    import torch


def map_tensors(batch: Any, change: Callable[[torch.Tensor], torch.Tensor]) -> Any:
    """Return the batch with ``change`` applied to each tensor. Everything else in the batch stays the same.

    A mapping becomes a dict. A list or tuple keeps its class, for example a named tuple, but no Python code in this class runs,
    such as its constructor. If a container contains itself, the inner reference still points to the original container.

    Example:
        ``map_tensors({"x": torch.ones(2), "n": 3}, torch.neg)`` returns ``{"x": tensor([-1., -1.]), "n": 3}``.
    """
    import torch

    changed: dict[int, Any] = {}
    opened: dict[int, tuple[object, dict[Any, Any]]] = {}
    stack = [batch]
    while stack:
        part = stack.pop()
        if id(part) in changed or is_a(part, torch.Tensor):
            continue
        if id(part) in opened:
            # All members of this container have been changed by now.
            _, members_before = opened[id(part)]
            changed[id(part)] = _like(
                part, {key: _changed(member, changed, change) for key, member in members_before.items()}
            )
            continue
        members = members_of(part)
        if members is not None:
            opened[id(part)] = part, members
            stack += [part, *(member for member in members.values() if id(member) not in opened)]
    return _changed(batch, changed, change)


def _changed(part: Any, changed: Mapping[int, Any], change: Callable[[torch.Tensor], torch.Tensor]) -> Any:
    import torch

    return change(part) if is_a(part, torch.Tensor) else changed.get(id(part), part)


def _like(container: object, members: dict[Any, Any]) -> Any:
    """Return a container with the same class and attributes, but new members."""
    kind: Any = type(container)
    if not is_a(container, list, tuple):
        return members
    try:
        if is_a(container, tuple):
            new_container: Any = tuple.__new__(kind, members.values())
        else:
            new_container = list.__new__(kind)
            list.extend(new_container, members.values())
    except TypeError:  # the class has a constructor in C (torch.Size)
        return kind(members.values())
    new_attributes, attributes = instance_dict(new_container), instance_dict(container)
    if new_attributes is not None and attributes is not None:
        dict.update(new_attributes, attributes)
    return new_container


def on_device(batch: Any, device: torch.device) -> Any:
    """Return the batch with its tensors on ``device``. Tensors that are already on this device are not copied.

    If ``batch`` is a function, the function is called first. It is called without ``torch.device(device)`` as default device,
    because under this default, a function that draws random numbers from a CPU generator would fail.
    """
    import torch

    if callable(batch) and not is_a(batch, torch.Tensor):
        batch = batch()
    return map_tensors(batch, lambda tensor: tensor.to(device))


def micro_batches(batch: Any, number: int) -> list[Any]:
    """Split a batch into ``number`` micro-batches with equally many samples.

    Args:
        batch: Any batch. All tensors with the same first dimension as the first tensor are split.
        number: The number of micro-batches.

    Returns:
        The micro-batches. Their tensors are views into the batch. A tensor with another first dimension is not split, and is
        the same in all micro-batches.

    Raises:
        ValueError: The samples cannot be split equally.

    Example:
        With ``number=2``, a batch ``int64[8, 256]`` is split into two micro-batches ``int64[4, 256]``.
    """
    samples = samples_in(batch)
    if number == 1:
        return [batch]
    if samples is None or samples % number:
        actual = "has no samples" if samples is None else f"has {samples} samples"
        raise ValueError(f"accumulate={number} splits a batch into {number} equal parts, but this batch {actual}")
    size = samples // number

    def part(first: int) -> Any:
        def narrowed(tensor: torch.Tensor) -> torch.Tensor:
            return tensor.narrow(0, first, size) if tensor.dim() and tensor.shape[0] == samples else tensor

        return map_tensors(batch, narrowed)

    return [part(first) for first in range(0, samples, size)]


def describe(batch: object) -> str:
    """Return a text with the dtype and shape of each tensor in the batch: ``"int64[4, 256], float32[4]"``."""
    return ", ".join(tensor_text(*dtype_and_shape(tensor)) for tensor in tensors_in(batch))


def samples_in(batch: object) -> int | None:
    """Return the number of samples: the size of the first tensor's first dimension.

    Return ``None`` if the batch has no tensor, or if the first tensor is a scalar.
    """
    for tensor in tensors_in(batch):
        _, shape = dtype_and_shape(tensor)
        return int(shape[0]) if shape else None
    return None


def work_in(batch: object, items: float | str | None) -> dict[str, float]:
    """Return the numbers of samples, tokens and items in a step, by name. Throughput is computed from the first entry.

    Args:
        batch: The step's batch. Its tokens are the elements of its first integer tensor.
        items: The entry for throughput, which comes first: ``"samples"`` (the default), ``"tokens"``, or a number of items in
            the step.

    Raises:
        ValueError: ``items`` is an unknown word, or not a finite number above zero. Or ``items`` is ``"tokens"`` and the batch
            has no integer tensor.

    Example:
        ``work_in(batch, "tokens")`` returns ``{"tokens": 2048, "samples": 8}`` for a batch ``int64[8, 256]``.
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
        raise ValueError(
            f"items='tokens' counts the elements of an integer tensor, but the batch has no such tensor: {describe(batch)}"
        )
    return {items: work[items], **work} if items in work else {}


def work_of_items(items: float | None) -> dict[str, float]:
    """Return the work in a step without a batch: the number of items under the name ``items``.

    The result is empty if ``items`` is ``None``.

    Raises:
        ValueError: ``items`` is not a finite number above zero.
    """
    return {} if items is None else {ITEMS: number_of_items(items)}


def number_of_items(items: object) -> float:
    """Return ``items`` as a plain number.

    Raises:
        ValueError: ``items`` is not a finite number above zero.
    """
    if isinstance(items, Real) and not isinstance(items, bool):
        with suppress(OverflowError):
            if 0 < float(items) < math.inf:
                return int(items) if isinstance(items, Integral) else float(items)
    raise ValueError(f"items={items!r}: write the number of items in a step, a finite number above zero")


def number_of_steps(steps: object, least: int, why: str) -> int:
    """Return ``steps`` as an ``int``.

    Raises:
        TypeError: ``steps`` is not a whole number, for example a list with a loop's batches.
        ValueError: ``steps`` is less than ``least``. The message ends with ``why``.
    """
    if isinstance(steps, bool) or not isinstance(steps, Integral):
        raise TypeError(f"steps must be a whole number, {least} or more, but is a {type(steps).__name__}: {why}")
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
    """Return a model's positional and keyword arguments for a batch.

    A mapping becomes keyword arguments, and a tuple or list becomes positional arguments. Any other batch becomes a single
    positional argument.
    """
    if issubclass(type(batch), Mapping):
        return (), dict(batch)
    return (tuple(batch) if is_a(batch, tuple, list) else (batch,)), {}


def call_model(model: Any, batch: Any) -> Any:
    """Call the model with a batch, and return its output."""
    args, kwargs = arguments_of(batch)
    return model(*args, **kwargs)
