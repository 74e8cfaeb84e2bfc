"""The precision of a step: the dtype of the weights, autocast, the gradient scaler, and TF32."""

from __future__ import annotations

from contextlib import contextmanager, nullcontext
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from pytest_gpumem.measurement import MeasuringError
from pytest_gpumem.step_config.errors import ConfigError
from pytest_gpumem.torch_support.reachability import tensors_in

if TYPE_CHECKING:
    from collections.abc import Iterator
    from contextlib import AbstractContextManager

    import torch

    from pytest_gpumem.devices.contract import Device


@dataclass(frozen=True, slots=True)
class Precision:
    """A word of ``precision=``. Dtypes are by name, since torch is loaded later."""

    weights: str
    autocast: str | None = None
    scaled: bool = False
    """True if gradients are scaled (``torch.amp.GradScaler``), as float16's narrow exponent asks for."""
    tf32: bool = False
    """True if float32 products and convolutions of a GPU may run in TF32."""
    computed: str | None = None
    """The dtype to which ``fully_shard`` casts parameters when it gathers them."""


_PRECISIONS = {
    "fp32": Precision("float32"),
    "tf32": Precision("float32", tf32=True),
    "amp-fp16": Precision("float32", autocast="float16", scaled=True),
    "amp-bf16": Precision("float32", autocast="bfloat16"),
    "bf16": Precision("bfloat16"),
    "fp16": Precision("float16"),
    "mp-bf16": Precision("float32", computed="bfloat16"),
    "mp-fp16": Precision("float32", computed="float16", scaled=True),
}


def precision_named(word: str | None) -> Precision | None:
    """Return the precision that a config names; ``None`` for the model's own."""
    return None if word is None else _PRECISIONS[word]


def dtype_of(word: str) -> str:
    """Return the name of the dtype that a word names: ``"bfloat16"`` for ``"bf16"``."""
    return _PRECISIONS[word].weights


def dtype_of_weights(word: str | None) -> torch.dtype:
    """Return the dtype in which weights are made for a step of a precision; float32 where it names none."""
    import torch

    made: torch.dtype = torch.float32 if word is None else getattr(torch, dtype_of(word))
    return made


def in_precision(model: torch.nn.Module, word: str | None, given: bool) -> torch.nn.Module:
    """Return the model with its floating-point parameters and buffers in the dtype of the precision.

    Only a model that was built here is converted. Raises `ConfigError` for one that was ``given`` in another dtype.
    """
    import torch

    precision = precision_named(word)
    if precision is None:
        return model
    wanted = getattr(torch, precision.weights)
    tensors = [*model.named_parameters(), *model.named_buffers()]
    imaginary = [name for name, tensor in tensors if tensor.is_complex()]
    others = {parameter.dtype for parameter in model.parameters() if parameter.is_floating_point()} - {wanted}
    if imaginary and (others or precision.weights != "float32"):
        raise ConfigError(
            f"{word}: converting the model would make {imaginary[0]} real, which is complex; leave the precision out, or "
            "build the model in float32 for fp32 or AMP"
        )
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
    """Return the batch with its floating-point tensors in the dtype of half-precision weights; as it is otherwise.

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


@contextmanager
def autocasting(word: str | None, device: torch.device, *, cached: bool = True) -> Iterator[None]:
    """Run a forward pass within the autocast of the precision; as it is for precisions without one.

    ``cached`` says whether a weight that is used twice is cast once (torch's default).
    Raises `MeasuringError` when autocast did not come on: then a step would be measured in another precision.
    """
    import torch

    precision = precision_named(word)
    if precision is None or precision.autocast is None:
        yield
        return
    dtype = getattr(torch, precision.autocast)
    with torch.autocast(device.type, dtype=dtype, cache_enabled=cached):
        if not torch.is_autocast_enabled(device.type) or torch.get_autocast_dtype(device.type) != dtype:
            raise MeasuringError(
                f"autocast to {precision.autocast} is not on: torch does not support it on {device.type} here"
            )
        yield


def float32_precision(word: str | None, device: Device) -> AbstractContextManager[object]:
    """Run the device's float32 products and convolutions in TF32 (``tf32``) or in full precision (the others)."""
    precision = precision_named(word)
    return nullcontext() if precision is None else device.tf32(precision.tf32)


def scaler_of(word: str | None, device: torch.device) -> torch.amp.GradScaler | None:
    """Return a new gradient scaler for the precisions that are trained with one, else ``None``."""
    import torch

    precision = precision_named(word)
    return torch.amp.GradScaler(device.type) if precision is not None and precision.scaled else None
