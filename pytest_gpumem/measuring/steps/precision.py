"""A step's precision: weight dtype, autocast, gradient scaler, and TF32."""

from __future__ import annotations

from contextlib import contextmanager, nullcontext
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from pytest_gpumem.base.errors import ConfigError, MeasuringError
from pytest_gpumem.torch_support.reachability import tensors_in

if TYPE_CHECKING:
    from collections.abc import Iterator
    from contextlib import AbstractContextManager

    import torch

    from pytest_gpumem.measuring.devices.contract import Device


@dataclass(frozen=True, slots=True)
class Precision:
    """The settings for a precision, such as ``amp-bf16``. Dtypes are stored as names, because torch is imported later.

    Example:
        ``amp-bf16`` has float32 weights and computes forward under autocast to bfloat16, without a gradient scaler.
    """

    weights: str
    autocast: str | None = None
    scaled: bool = False
    """True if gradients are scaled (``torch.amp.GradScaler``), because small gradients would become 0 in float16."""
    tf32: bool = False
    """True if a GPU may compute float32 matrix products and convolutions in TF32."""
    computed: str | None = None
    """The dtype to which ``fully_shard`` casts gathered parameters."""


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
    """Return the precision for a word in a config; ``None`` if the config has no precision."""
    return None if word is None else _PRECISIONS[word]


def dtype_of(word: str) -> str:
    """Return the name of the weight dtype for a precision, for example ``"bfloat16"`` for ``"bf16"``."""
    return _PRECISIONS[word].weights


def dtype_of_weights(word: str | None) -> torch.dtype:
    """Return the weight dtype for a precision; float32 if ``word`` is ``None``."""
    import torch

    dtype: torch.dtype = torch.float32 if word is None else getattr(torch, dtype_of(word))
    return dtype


def in_precision(model: torch.nn.Module, word: str | None) -> torch.nn.Module:
    """Return the model with floating-point parameters and buffers converted to the precision's weight dtype.

    Args:
        model: The model.
        word: The word for ``precision=``, or ``None`` to leave the model unchanged.

    Raises:
        ConfigError: Conversion would lose the imaginary part of a parameter.
    """
    return model.to(dtype_of_weights(word)) if _other_dtypes(model, word) else model


def check_precision(model: torch.nn.Module, word: str | None) -> None:
    """Check that an existing model has the precision's weight dtype, because a step converts only models that it built.

    Args:
        model: The model.
        word: The word for ``precision=``, or ``None`` to accept every dtype.

    Raises:
        ConfigError: The model has parameters with another dtype.
    """
    other_dtypes = _other_dtypes(model, word)
    if word is not None and other_dtypes:
        names = ", ".join(sorted(str(other).removeprefix("torch.") for other in other_dtypes))
        raise ConfigError(
            f"{word} needs {dtype_of(word)} parameters, but the model has {names}; "
            f"pass a function that builds the model, or convert the model with model.to(torch.{dtype_of(word)})"
        )


def _other_dtypes(model: torch.nn.Module, word: str | None) -> set[torch.dtype]:
    """Return the floating-point dtypes of parameters that differ from the precision's weight dtype."""
    if word is None:
        return set()
    dtype = dtype_of_weights(word)
    tensors = [*model.named_parameters(), *model.named_buffers()]
    complex_names = [name for name, tensor in tensors if tensor.is_complex()]
    other_dtypes = {parameter.dtype for parameter in model.parameters() if parameter.is_floating_point()} - {dtype}
    if complex_names and (other_dtypes or dtype_of(word) != "float32"):
        raise ConfigError(
            f"{word}: converting the model would drop the imaginary part of {complex_names[0]}; leave the precision out, or "
            "build the model in float32 for fp32 or AMP"
        )
    return other_dtypes


def batch_in_precision(batch: Any, word: str | None) -> Any:
    """Return the batch with floating-point tensors converted to the weight dtype, under ``bf16`` or ``fp16``.

    Under other precisions the batch stays unchanged, because autocast and float32 weights take any floating-point input.
    """
    import torch

    from pytest_gpumem.measuring.steps.batches import map_tensors

    if word not in ("bf16", "fp16"):
        return batch
    dtype = getattr(torch, _PRECISIONS[word].weights)
    if not any(tensor.is_floating_point() for tensor in tensors_in(batch)):
        return batch
    return map_tensors(batch, lambda tensor: tensor.to(dtype) if tensor.is_floating_point() else tensor)


@contextmanager
def autocasting(word: str | None, device: torch.device, *, cached: bool = True) -> Iterator[None]:
    """Enable the precision's autocast within the context. Do nothing for a precision without autocast.

    Args:
        word: The word for ``precision=``.
        device: The step's device.
        cached: True to cast a weight only once even if forward uses the weight twice (torch's default).

    Raises:
        MeasuringError: torch did not enable autocast, so the step would be measured in another precision.
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
                f"torch did not enable autocast to {precision.autocast} on {device.type}; use another precision"
            )
        yield


def float32_precision(word: str | None, device: Device) -> AbstractContextManager[object]:
    """Return a context in which float32 matrix products and convolutions run in TF32 (for ``tf32``) or in full precision.

    Without a precision, the context changes nothing.
    """
    precision = precision_named(word)
    return nullcontext() if precision is None else device.tf32(precision.tf32)


def scaler_of(word: str | None, device: torch.device) -> torch.amp.GradScaler | None:
    """Return a new gradient scaler if the precision needs it, or ``None``."""
    import torch

    precision = precision_named(word)
    return torch.amp.GradScaler(device.type) if precision is not None and precision.scaled else None
