"""The precision of a step: the dtype of the weights, autocast, the gradient scaler, and TF32."""

from __future__ import annotations

from contextlib import contextmanager, nullcontext
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from pytest_gpumem.measurement import MeasuringError
from pytest_gpumem.steps.batches import tensors_in
from pytest_gpumem.steps.config import ConfigError

if TYPE_CHECKING:
    from collections.abc import Iterator
    from contextlib import AbstractContextManager

    import torch


@dataclass(frozen=True, slots=True)
class Precision:
    """What a word of ``precision=`` means. Dtypes by name, since torch is loaded later."""

    weights: str
    autocast: str | None = None
    scaled: bool = False
    """Whether gradients are scaled (``torch.amp.GradScaler``), as float16's narrow exponent asks for."""
    matmul: str = "highest"
    """``torch.set_float32_matmul_precision``."""


_PRECISIONS = {
    "fp32": Precision("float32"),
    "tf32": Precision("float32", matmul="high"),
    "amp-fp16": Precision("float32", autocast="float16", scaled=True),
    "amp-bf16": Precision("float32", autocast="bfloat16"),
    "bf16": Precision("bfloat16"),
    "fp16": Precision("float16"),
}


def precision_named(word: str | None) -> Precision | None:
    """The precision that a config names; ``None`` for the model's own."""
    return None if word is None else _PRECISIONS[word]


def in_precision(model: torch.nn.Module, word: str | None, given: bool) -> torch.nn.Module:
    """The model with its floating-point parameters and buffers as the precision wants them.

    Only a model that was built here is converted. Raises `ConfigError` for one that was ``given`` in another dtype.
    """
    import torch

    precision = precision_named(word)
    if precision is None:
        return model
    wanted = getattr(torch, precision.weights)
    others = {parameter.dtype for parameter in model.parameters() if parameter.is_floating_point()} - {wanted}
    if not others:
        return model
    if given:
        are = ", ".join(sorted(str(dtype).removeprefix("torch.") for dtype in others))
        raise ConfigError(
            f"{word} trains {precision.weights} parameters, but the model has {are}; "
            f"pass a function that builds the model, or convert it with model.to(torch.{precision.weights})"
        )
    return model.to(wanted)


def batch_in_precision(batch: Any, word: str | None) -> Any:
    """The batch with its floating-point tensors in the dtype of half-precision weights; as it is otherwise.

    Autocast and float32 weights take it as it comes.
    """
    import torch

    from pytest_gpumem.steps.batches import mapped

    if word not in ("bf16", "fp16"):
        return batch
    wanted = getattr(torch, _PRECISIONS[word].weights)
    if not any(tensor.is_floating_point() for tensor in tensors_in(batch)):
        return batch
    return mapped(batch, lambda tensor: tensor.to(wanted) if tensor.is_floating_point() else tensor)


def autocasting(word: str | None, device: torch.device) -> AbstractContextManager[object]:
    """Autocast around a forward pass, as the precision wants it; none for the others.

    Raises `MeasuringError` when autocast did not come on: then a step would be measured in another precision.
    """
    precision = precision_named(word)
    if precision is None or precision.autocast is None:
        return nullcontext()
    return _autocast(device.type, precision.autocast)


@contextmanager
def _autocast(device_type: str, dtype_name: str) -> Iterator[None]:
    import torch

    dtype = getattr(torch, dtype_name)
    with torch.autocast(device_type, dtype=dtype):
        if not torch.is_autocast_enabled(device_type) or torch.get_autocast_dtype(device_type) != dtype:
            raise MeasuringError(f"autocast to {dtype_name} is not on: torch does not support it on {device_type} here")
        yield
    # Within somebody else's autocast the copies of weights would stay: torch frees them when the outermost one ends.
    torch.clear_autocast_cache()


@contextmanager
def matmul_precision(word: str | None) -> Iterator[None]:
    """Within, float32 matrix products run in TF32 (``tf32``) or in full precision (the others)."""
    import torch

    precision = precision_named(word)
    if precision is None:
        yield
        return
    before = torch.get_float32_matmul_precision()
    torch.set_float32_matmul_precision(precision.matmul)
    try:
        yield
    finally:
        torch.set_float32_matmul_precision(before)


def scaler_of(word: str | None, device: torch.device) -> torch.amp.GradScaler | None:
    """A new gradient scaler, for the precisions that are trained with one."""
    import torch

    precision = precision_named(word)
    return torch.amp.GradScaler(device.type) if precision is not None and precision.scaled else None
