"""Comparison of the gradients under two step configs, as saving memory must not change them."""

from __future__ import annotations

import copy
from contextlib import ExitStack
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from pytest_gpumem.devices.contract import CannotRun
from pytest_gpumem.measure.random_numbers import random_numbers_given_back
from pytest_gpumem.measure.reading import run_phases
from pytest_gpumem.measurement import MeasuringError
from pytest_gpumem.step_config.config import StepConfig
from pytest_gpumem.step_config.errors import ConfigError
from pytest_gpumem.steps.batches import on_device
from pytest_gpumem.steps.checkpointing import BlockRuns, checkpointed
from pytest_gpumem.steps.compiling import compiled, something_compiled, warnings_of_compiling
from pytest_gpumem.steps.dry_run import CastTo
from pytest_gpumem.steps.model_step import build_model, given_model, precision_of
from pytest_gpumem.steps.precision import batch_in_precision, in_precision
from pytest_gpumem.steps.surroundings import can_run, initialise, surroundings
from pytest_gpumem.steps.training import Training
from pytest_gpumem.units import agreeing, counted

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping

    import torch

    from pytest_gpumem.devices.contract import Device
    from pytest_gpumem.steps.model_step import Loss

DEFAULT_TOLERANCES: Mapping[str, float] = {
    "fp32": 1e-4,
    "tf32": 1e-2,
    "amp-fp16": 5e-2,
    "fp16": 5e-2,
    "amp-bf16": 1e-1,
    "bf16": 1e-1,
}
"""``rtol`` by precision, of the root mean square of a parameter's gradient.

Some tens of the precision's unit roundoff (6e-8, 5e-4 of TF32 and float16, 4e-3 of bfloat16; for float32 some thousands,
since kernels sum in different orders), as errors add up over the layers. A gradient that is wrong is off by about its size.
"""
SEED = 0
_MOST_TRIES = 5
"""Scales from 65536 down to 1, by 16: gradients that overflow at a large scale are no error."""


@dataclass(frozen=True, slots=True)
class Gradients:
    """The gradients of one step, by parameter, on the host; ``None`` where there is none."""

    config: str
    by_name: Mapping[str, torch.Tensor | None]
    precisions: tuple[str, ...] = ("fp32",)
    """Words of the precision in which they were computed."""


def assert_same_gradients(
    device: Device,
    model_factory: Callable[[], torch.nn.Module],
    batch: Any,
    configs: tuple[StepConfig, StepConfig],
    *,
    rtol: float | None = None,
    atol: float | None = None,
    loss: Loss | None = None,
) -> None:
    """Run a step under each config and compare. See ``Gpumem.assert_same_gradients``."""
    if given_model(model_factory) is not None:
        raise TypeError("assert_same_gradients builds the model twice: pass a class or function, not a model")
    for config in configs:
        config.only_for("train_step")
        if config.sharding is not None:
            raise ConfigError(f"step config '{config}': a rank alone has gradients of its own; leave shard= out")
        can_run(device, config)
    no_values = device.lacks("values")
    if no_values is not None:
        raise CannotRun(no_values)
    batch = on_device(batch, device.torch_device)
    weights: dict[str, Any] = {}
    first, second = (_gradients(device, model_factory, batch, config, loss, weights) for config in configs)
    if rtol is None:
        words = (*first.precisions, *second.precisions)
        rtol = max(DEFAULT_TOLERANCES.get(word, DEFAULT_TOLERANCES["fp32"]) for word in words)
    message = difference(first, second, rtol, atol, _hint(*configs))
    if message is not None:
        raise AssertionError(message)


def difference(
    mine: Gradients, theirs: Gradients, rtol: float, atol: float | None = None, hint: str = ""
) -> str | None:
    """Return the difference of two steps' gradients as a message; ``None`` when they are the same.

    The root mean square of the error may be ``atol`` + ``rtol`` times that of the gradient: single entries may be far off where
    rounding decides on which side of a ReLU's corner a value falls. Without ``atol`` it is one hundredth of ``rtol`` times the
    largest gradient's: one that is 0 but for rounding (the bias of an attention's keys) has no size of its own.
    ``hint`` ends the message where values differ.
    """
    names = list(theirs.by_name)
    if mine.by_name.keys() != theirs.by_name.keys():
        odd = sorted(mine.by_name.keys() ^ theirs.by_name.keys())
        return f"the models have different parameters: {odd[0]} is only in one of them; build the same model each time"
    missing = [
        (name, one, other)
        for name in names
        for one, other in ((mine, theirs), (theirs, mine))
        if one.by_name[name] is None and other.by_name[name] is not None
    ]
    if missing:
        name, one, other = missing[0]
        return (
            f"gradients differ: {name} has no gradient under {one.config}, and has one under {other.config}: something "
            f"between it and the loss is detached ({len(missing)} of {counted(len(names), 'parameter')})"
        )
    pairs = [
        (name, a, b)
        for name in names
        if (a := mine.by_name[name]) is not None and (b := theirs.by_name[name]) is not None
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
    differ = agreeing(len(wrong), "differs", "differ")
    return (
        f"gradients differ: {name}: {error} (rtol {rtol:g}, atol {atol:.3g}); "
        f"{mine.config} against {theirs.config}, {len(wrong)} of {counted(len(names), 'parameter')} {differ}{hint}"
    )


def _hint(one: StepConfig, other: StepConfig) -> str:
    """Return why a model's gradients may differ between two configs that are right, as the end of a message."""
    if one.compile != other.compile or "none" not in (one.compile, other.compile):
        return "; compiled code draws random numbers of its own: compare with dropout switched off"
    if one.accumulate != other.accumulate:
        return "; each micro-batch draws its own dropout, and a mean over unequal numbers of tokens is not that of its parts"
    if one.precision != other.precision:
        return (
            "; rounding moves values across a ReLU's corner, which changes gradients by far more than itself: give rtol, or "
            "compare within one precision"
        )
    return ""


def _error(mine: torch.Tensor, theirs: torch.Tensor, rtol: float, atol: float) -> str | None:
    """Return the difference of two gradients of a parameter as a clause; ``None`` when they are equal."""
    if mine.shape != theirs.shape:
        return f"shape {list(mine.shape)} against {list(theirs.shape)}"
    if not mine.numel():
        return None
    error, allowed = _size(mine - theirs), atol + rtol * _size(theirs)
    # Not `error > allowed`: NaN compares false.
    if error <= allowed:
        return None
    at = int((mine - theirs).abs().nan_to_num(nan=float("inf")).argmax())
    values = f"{mine.flatten()[at].item():.6g} against {theirs.flatten()[at].item():.6g}"
    return f"error {error:.3g}, allowed {allowed:.3g}; entry {at} is {values}"


def _gradients(
    device: Device,
    model_factory: Callable[[], torch.nn.Module],
    batch: Any,
    config: StepConfig,
    loss: Loss | None,
    weights: dict[str, Any],
) -> Gradients:
    """Return the gradients of one forward and backward. ``weights`` are the first model's; empty before it is built."""
    import torch

    torch_device = device.torch_device
    found: dict[str, torch.Tensor | None] = {}

    def keep() -> None:
        found.update(_unscaled(model, training.scale() or 1.0))

    runs = BlockRuns()
    cast = CastTo(config.precision)
    with ExitStack() as stack:
        # Random numbers of the test must not depend on this comparison.
        stack.enter_context(random_numbers_given_back(device))
        # Buffers that are not in the state are the same in both models if they are drawn the same.
        torch.manual_seed(SEED)
        model = build_model(model_factory, torch_device)
        initialise(model, batch, StepConfig(), device, training=True)
        if weights:
            model.load_state_dict(weights)
        else:
            weights.update(copy.deepcopy(model.state_dict()))
        model = in_precision(model, config.precision, given=False)
        batch = batch_in_precision(batch, config.precision)
        training = Training(model, model, batch, None, loss, config, torch_device, before_optimizer=keep)
        training.scale_gradients()
        stack.enter_context(surroundings(model, config, device, training=True))
        stack.enter_context(checkpointed(model, config, runs if config.compile == "none" else None))
        if config.compile == "none":
            stack.enter_context(cast.watched())
        else:
            training.run = stack.enter_context(compiled(model, config.compile))
            stack.enter_context(warnings_of_compiling())
            stack.enter_context(something_compiled(config.compile))
        for _ in range(_MOST_TRIES):
            torch.manual_seed(SEED)
            run_phases(training.phases())
            if training.scaler is None or _not_finite(found) is None:
                break
            training.scaler.update(training.scaler.get_scale() / 16)
    runs.check(model, config)
    if config.compile == "none":
        cast.check()
    if (name := _not_finite(found)) is not None:
        raise MeasuringError(f"the gradient of {name} is not finite under {config}")
    precision = config.precision or precision_of(model)
    return Gradients(str(config), found, tuple(precision.split("+")))


def _size(gradient: torch.Tensor) -> float:
    """Return the root mean square of a gradient's entries."""
    return float(gradient.abs().double().square().mean().sqrt()) if gradient.numel() else 0.0


def _on_the_host(gradient: torch.Tensor) -> torch.Tensor:
    """Return a dense copy, in at least single precision."""
    dense = gradient.detach().to_dense().cpu()
    return dense.float() if dense.element_size() < 4 else dense


def _unscaled(model: torch.nn.Module, scale: float) -> dict[str, torch.Tensor | None]:
    return {
        name: None if parameter.grad is None else _on_the_host(parameter.grad) / scale
        for name, parameter in model.named_parameters()
        if parameter.requires_grad
    }


def _not_finite(gradients: Mapping[str, torch.Tensor | None]) -> str | None:
    """Return the first parameter whose gradient is not finite."""
    import torch

    return next(
        (name for name, one in gradients.items() if one is not None and not bool(torch.isfinite(one).all())), None
    )
