"""Compare a step's gradients under two step configs, because a config that saves memory must not change gradients."""

from __future__ import annotations

import copy
from contextlib import ExitStack
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from pytest_gpumem.base.errors import CannotRun, ConfigError, MeasuringError
from pytest_gpumem.base.units import counted, word_form
from pytest_gpumem.measuring.measure.random_numbers import restored_random_numbers
from pytest_gpumem.measuring.measure.reading import run_phases
from pytest_gpumem.measuring.step_config.config import StepConfig
from pytest_gpumem.measuring.steps.batches import on_device
from pytest_gpumem.measuring.steps.checkpointing import BlockRuns, activation_checkpointing
from pytest_gpumem.measuring.steps.compiling import compilation_required, compiled_model, warnings_of_compiling
from pytest_gpumem.measuring.steps.dry_run import AutocastDetector
from pytest_gpumem.measuring.steps.global_settings import can_run, global_settings, initialise
from pytest_gpumem.measuring.steps.model_source import ExistingModel
from pytest_gpumem.measuring.steps.model_step import precision_of
from pytest_gpumem.measuring.steps.precision import batch_in_precision, in_precision
from pytest_gpumem.measuring.steps.training import Training

if TYPE_CHECKING:
    from collections.abc import Mapping

    import torch

    from pytest_gpumem.measuring.devices.contract import Device
    from pytest_gpumem.measuring.steps.model_source import ModelFactory, ModelSource
    from pytest_gpumem.measuring.steps.model_step import Loss

DEFAULT_TOLERANCES: Mapping[str, float] = {
    "fp32": 1e-4,
    "tf32": 1e-2,
    "amp-fp16": 5e-2,
    "fp16": 5e-2,
    "amp-bf16": 1e-1,
    "bf16": 1e-1,
}
"""The default ``rtol`` for each precision, relative to the root mean square of a parameter's gradient.

Rounding errors add up over the layers. So each tolerance is tens of times the precision's unit roundoff, which is 5e-4 for TF32
and float16, and 4e-3 for bfloat16. For float32 (6e-8) the tolerance is over a thousand times the unit roundoff, because kernels
sum in different orders. A wrong gradient exceeds all these tolerances, because its error is about as large as the gradient.
"""
SEED = 0
_MOST_TRIES = 5
"""The number of loss scales to try under float16: 65536, 4096, 256, 16 and 1. An overflow is no error unless the
last scale overflows as well."""


@dataclass(frozen=True, slots=True)
class Gradients:
    """A step's gradients under one step config, copied to the host."""

    config: str
    by_name: Mapping[str, torch.Tensor | None]
    """The gradients by parameter name; ``None`` for a parameter without a gradient."""
    precisions: tuple[str, ...] = ("fp32",)
    """The step config's words for the precisions in which the gradients were computed."""


def assert_same_gradients(
    device: Device,
    source: ModelSource,
    batch: Any,
    configs: tuple[StepConfig, StepConfig],
    *,
    rtol: float | None = None,
    atol: float | None = None,
    loss: Loss | None = None,
) -> None:
    """Run a step under two step configs, and compare the gradients. See ``Gpumem.assert_same_gradients``."""
    if isinstance(source, ExistingModel):
        raise TypeError(
            "assert_same_gradients builds the model twice: pass a class or function that builds it, not a model"
        )
    for config in configs:
        config.only_for("train_step")
        if config.sharding is not None:
            raise ConfigError(f"step config '{config}': each rank has its own gradients; leave shard= out")
        can_run(device, config)
    no_values = device.lacks("values")
    if no_values is not None:
        raise CannotRun(no_values)
    batch = on_device(batch, device.torch_device)
    weights: dict[str, Any] = {}
    first, second = (_gradients(device, source, batch, config, loss, weights) for config in configs)
    if rtol is None:
        words = (*first.precisions, *second.precisions)
        rtol = max(DEFAULT_TOLERANCES.get(word, DEFAULT_TOLERANCES["fp32"]) for word in words)
    message = difference(first, second, rtol, atol, _hint(*configs))
    if message is not None:
        raise AssertionError(message)


def difference(
    first: Gradients, second: Gradients, rtol: float, atol: float | None = None, hint: str = ""
) -> str | None:
    """Return a message if two steps' gradients differ; ``None`` if they are equal within the tolerance.

    For each parameter, the root mean square of the error may be at most ``atol`` + ``rtol`` x the root mean square of the
    second gradient. Single entries are not compared, because near a ReLU's corner a rounding error changes an entry completely.

    Example: with ``rtol=1e-4`` and a largest gradient of 0.02, the default ``atol`` is 0.01 x 1e-4 x 0.02 = 2e-8. A gradient
    of size 0.01 may then have an error of 2e-8 + 1e-6.

    Args:
        first: The first gradients.
        second: The second gradients.
        rtol: The relative tolerance.
        atol: The absolute tolerance. The default is 0.01 x ``rtol`` x the largest gradient. Without ``atol``, gradients with
            nothing but rounding errors (for the bias in an attention's keys) would differ.
        hint: The text to add to the message if values differ.
    """
    names = list(second.by_name)
    if first.by_name.keys() != second.by_name.keys():
        unshared = sorted(first.by_name.keys() ^ second.by_name.keys())
        return (
            f"the models have different parameters: {unshared[0]} is in only one model; build the same model each time"
        )
    missing = [
        (name, without, other)
        for name in names
        for without, other in ((first, second), (second, first))
        if without.by_name[name] is None and other.by_name[name] is not None
    ]
    if missing:
        name, without, other = missing[0]
        return (
            f"gradients differ: {name} has a gradient under {other.config}, but none under {without.config}: a tensor "
            f"between the parameter and the loss is detached ({len(missing)} of {counted(len(names), 'parameter')})"
        )
    pairs = [
        (name, a, b)
        for name in names
        if (a := first.by_name[name]) is not None and (b := second.by_name[name]) is not None
    ]
    if not pairs:
        return "nothing to compare: no parameter has a gradient"
    if not any(bool(a.any()) or bool(b.any()) for _, a, b in pairs):
        return "nothing to compare: every gradient is 0"
    if atol is None:
        atol = 0.01 * rtol * max(_size(b) for _, _, b in pairs)
    wrong = [(name, error) for name, a, b in pairs if (error := _error(a, b, rtol, atol)) is not None]
    if not wrong:
        return None
    name, error = wrong[0]
    differ = word_form(len(wrong), "differs", "differ")
    return (
        f"gradients differ: {name}: {error} (rtol {rtol:g}, atol {atol:.3g}); "
        f"{first.config} against {second.config}, {len(wrong)} of {counted(len(names), 'parameter')} {differ}{hint}"
    )


def _hint(config: StepConfig, other: StepConfig) -> str:
    """Return a reason why gradients can differ although both configs are right, as the end of a message; otherwise empty."""
    if config.compile != other.compile or "none" not in (config.compile, other.compile):
        return "; compiled code draws other random numbers: compare with dropout switched off"
    if config.accumulate != other.accumulate:
        return (
            "; each micro-batch draws its own dropout, and the mean over micro-batches with unequal token counts differs from "
            "the mean over the batch"
        )
    if config.precision != other.precision:
        return (
            "; rounding can change the sign at a ReLU, and the gradient then changes by much more than the rounding error: "
            "pass rtol, or compare two configs with the same precision"
        )
    return ""


def _error(first: torch.Tensor, second: torch.Tensor, rtol: float, atol: float) -> str | None:
    """Return a clause on the difference between two gradients; ``None`` if they are equal within the tolerance."""
    if first.shape != second.shape:
        return f"shape {list(first.shape)} against {list(second.shape)}"
    if not first.numel():
        return None
    error, allowed = _size(first - second), atol + rtol * _size(second)
    # Do not test `error > allowed`, because this comparison is false for NaN, so an error of NaN would pass.
    if error <= allowed:
        return None
    index = int((first - second).abs().nan_to_num(nan=float("inf")).argmax())
    values = f"{first.flatten()[index].item():.6g} against {second.flatten()[index].item():.6g}"
    return f"error {error:.3g}, allowed {allowed:.3g}; entry {index} is {values}"


def _gradients(
    device: Device,
    factory: ModelFactory,
    batch: Any,
    config: StepConfig,
    loss: Loss | None,
    weights: dict[str, Any],
) -> Gradients:
    """Run forward and backward under one step config, and return the gradients.

    The first call stores the model's weights in ``weights``. The second call loads these weights, so both models are equal.
    """
    import torch

    torch_device = device.torch_device
    gradients: dict[str, torch.Tensor | None] = {}

    def keep() -> None:
        gradients.update(_unscaled(model, training.scale() or 1.0))

    runs = BlockRuns()
    cast = AutocastDetector(config.precision)
    with ExitStack() as stack:
        # Restore the random number generators at the end, so the comparison does not change the test's random numbers.
        stack.enter_context(restored_random_numbers(device))
        # Loading the weights does not make buffers outside the state dict equal, so build both models with the same seed.
        torch.manual_seed(SEED)
        model = factory.build(torch_device)
        initialise(model, batch, StepConfig(), device, training=True)
        if weights:
            model.load_state_dict(weights)
        else:
            weights.update(copy.deepcopy(model.state_dict()))
        model = in_precision(model, config.precision)
        batch = batch_in_precision(batch, config.precision)
        training = Training(model, model, batch, None, loss, config, torch_device, before_optimizer=keep)
        training.scale_gradients()
        stack.enter_context(global_settings(model, config, device, training=True))
        stack.enter_context(activation_checkpointing(model, config, runs if config.compile == "none" else None))
        if config.compile == "none":
            stack.enter_context(cast.watched())
        else:
            training.run = stack.enter_context(compiled_model(model, config.compile))
            stack.enter_context(warnings_of_compiling())
            stack.enter_context(compilation_required(config.compile))
        for _ in range(_MOST_TRIES):
            torch.manual_seed(SEED)
            run_phases(training.phases())
            if training.scaler is None or _not_finite(gradients) is None:
                break
            training.scaler.update(training.scaler.get_scale() / 16)
    runs.check(model, config)
    if config.compile == "none":
        cast.check()
    if (name := _not_finite(gradients)) is not None:
        raise MeasuringError(f"the gradient of {name} is not finite under {config}")
    precision = config.precision or precision_of(model)
    return Gradients(str(config), gradients, tuple(precision.split("+")))


def _size(gradient: torch.Tensor) -> float:
    """Return the root mean square over a gradient's entries."""
    return float(gradient.abs().double().square().mean().sqrt()) if gradient.numel() else 0.0


def _on_the_host(gradient: torch.Tensor) -> torch.Tensor:
    """Copy a gradient to the host, as a dense tensor in float32 or float64."""
    dense = gradient.detach().to_dense().cpu()
    return dense.float() if dense.element_size() < 4 else dense


def _unscaled(model: torch.nn.Module, scale: float) -> dict[str, torch.Tensor | None]:
    return {
        name: None if parameter.grad is None else _on_the_host(parameter.grad) / scale
        for name, parameter in model.named_parameters()
        if parameter.requires_grad
    }


def _not_finite(gradients: Mapping[str, torch.Tensor | None]) -> str | None:
    """Return the first parameter's name whose gradient is not finite; ``None`` if all gradients are finite."""
    import torch

    return next(
        (
            name
            for name, gradient in gradients.items()
            if gradient is not None and not bool(torch.isfinite(gradient).all())
        ),
        None,
    )
