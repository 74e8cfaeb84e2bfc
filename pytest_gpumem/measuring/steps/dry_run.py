"""Dry run of a step, to check that the step's config takes effect."""

from __future__ import annotations

from contextlib import contextmanager, nullcontext
from dataclasses import dataclass
from functools import partial
from typing import TYPE_CHECKING, Any

from pytest_gpumem.base.errors import ConfigError, MeasuringError
from pytest_gpumem.measuring.measure.reading import run_phases
from pytest_gpumem.measuring.steps.checkpointing import BlockRuns, activation_checkpointing
from pytest_gpumem.measuring.steps.precision import precision_named
from pytest_gpumem.torch_support.private_api.dispatch import function_mode
from pytest_gpumem.torch_support.reachability import tensors_in

if TYPE_CHECKING:
    from collections.abc import Iterable, Iterator, Sequence

    import torch

    from pytest_gpumem.measuring.devices.contract import Device
    from pytest_gpumem.measuring.measure.reading import Phase
    from pytest_gpumem.measuring.step_config.config import StepConfig
    from pytest_gpumem.measuring.steps.training import Training

MOST_OVERFLOWS = 18
"""A dry run repeats its step at most this many times, while a `GradScaler` halves its scale: from 65536 to 0.25."""


@dataclass(frozen=True, slots=True)
class DryRun:
    """The dry run's result: notes for the measurement, and the number of module calls repeated by backward."""

    notes: tuple[str, ...] = ()
    recomputed: int | None = None
    overflows: bool = False
    """True if gradients overflow at every scale, so every step skips the optimizer."""


def dry_run(training: Training, device: Device) -> DryRun:
    """Run the uncompiled training step until the gradient scale no longer falls on any rank, and check the config's effect.

    Args:
        training: The training step.
        device: The step's device.

    Returns:
        The notes and the number of recomputed module calls.

    Raises:
        ConfigError: The config has no effect, for example because nothing was recomputed, or autocast cast nothing.
        MeasuringError: A gradient is NaN at every scale. The message names its parameter.
    """
    config = training.config
    runs = None if config.checkpoint == "none" else BlockRuns()
    attention = AttentionDetector(config)
    data = None if config.sharding is None else config.sharding.data
    waits, without_gradient = data is not None and data.wrapped, list[str]()
    cast, routes = AutocastDetector(config.precision), AssumedChoices(config, device)
    nan_gradients: list[str] = []
    notes: tuple[str, ...] = ()
    overflows = False

    def check_gradients() -> None:
        # An offloading optimizer has moved the gradients to the host by now, so they look missing.
        if waits and "optimizer" not in config.offloaded:
            without_gradient.extend(_without_gradient(training.model))
        if training.scaler is not None:
            nan_gradients.extend(_not_a_number(training.model))

    training.before_optimizer = check_gradients
    again = BackwardCallCounter()
    with nullcontext() if runs is None else activation_checkpointing(training.model, config, runs):
        for attempt in range(MOST_OVERFLOWS + 1):
            nan_gradients.clear()
            again.number = 0
            parts_before = 0 if runs is None else runs.again()
            scale_before = training.scale()
            _run_watched(training, attention, cast, again)
            if without_gradient:
                more = f" and {len(without_gradient) - 1} more" if len(without_gradient) > 1 else ""
                raise ConfigError(
                    f"shard={config.shard}: DistributedDataParallel waits for a gradient for each parameter, but "
                    f"{without_gradient[0]}{more} got no gradient; freeze parameters that the step does not use "
                    "(requires_grad_(False)), or under torchrun leave shard= out and pass "
                    "DistributedDataParallel(model, find_unused_parameters=True)"
                )
            scale = training.scale()
            # DistributedDataParallel creates its buckets anew in its second step, so wait until the old buckets are freed.
            device.consensus.rest()
            if device.consensus.all(scale_before is None or scale is None or scale >= scale_before):
                break
            if attempt == MOST_OVERFLOWS:
                overflows = True
                if nan_gradients:
                    number = f" ({len(nan_gradients)} gradients are NaN)" if len(nan_gradients) > 1 else ""
                    raise MeasuringError(
                        f"the gradient of {nan_gradients[0]} is not a number (NaN) under {config} at every gradient scale, so "
                        f"every step would skip the optimizer{number}"
                    )
                notes = (f"the gradients overflow at every scale down to {scale:g}, so every step skips the optimizer",)
    training.before_optimizer = None
    if runs is not None:
        runs.check(training.model, config)
    cast.check()
    attention.check()
    notes += routes.check()
    # Recomputation runs a checkpointed module's forward without calling the module. Module hooks do not see this run, so
    # `runs` counts it.
    parts = 0 if runs is None else runs.again() - parts_before
    return DryRun(notes, again.number + parts, overflows=overflows)


def _run_watched(
    training: Training, attention: AttentionDetector, cast: AutocastDetector, again: BackwardCallCounter
) -> None:
    """Run the step once. ``cast`` watches forward, ``again`` counts calls in backward, and ``attention`` watches both."""
    for phase in training.phases():
        forward = phase.name == "forward" or training.pipeline is not None
        with attention.watched(), cast.watched() if forward else again.counted():
            phase.run()


def dry_run_inference(phases: Iterable[Phase], config: StepConfig, device: Device) -> tuple[str, ...]:
    """Run an inference step once without compiling, and return notes for the measurement.

    Without autocast and ``routing=`` in the config, nothing runs, because there is nothing to check.

    Raises:
        ConfigError: Autocast cast nothing, or no choice in the step used the assumed routing.
    """
    cast, routes = AutocastDetector(config.precision), AssumedChoices(config, device)
    if cast.is_idle and config.routing is None:
        return ()
    with cast.watched():
        run_phases(phases)
    cast.check()
    return routes.check()


class BackwardCallCounter:
    """Counter for module calls in backward. Backward calls a module only to recompute the module's output."""

    def __init__(self, number: int = 0) -> None:
        self.number = number

    @contextmanager
    def counted(self) -> Iterator[None]:
        """Count module calls within the context."""
        from torch.nn.modules.module import register_module_forward_pre_hook

        with register_module_forward_pre_hook(self._count):
            yield

    def _count(self, *_: object) -> None:
        self.number += 1


def counting_recomputation(phases: Sequence[Phase], recomputed: int | None) -> tuple[list[Phase], BackwardCallCounter]:
    """Return the step's phases, and a counter for module calls repeated by backward.

    Args:
        phases: The step's phases, in order.
        recomputed: The number of repeated calls in a dry run. If this is ``None``, the returned phases count the calls in
            their first run, and no longer count in later runs.
    """
    counting, again = list(phases), BackwardCallCounter(recomputed or 0)

    def run_first(index: int, phase: Phase) -> None:
        counting[index] = phase
        with again.counted():
            phase.run()

    for index, phase in enumerate(phases if recomputed is None else ()):
        if phase.name != "forward":
            counting[index] = phase._replace(run=partial(run_first, index, phase))
    return counting, again


def _without_gradient(model: torch.nn.Module) -> Iterator[str]:
    return (name for name, parameter in model.named_parameters() if parameter.requires_grad and parameter.grad is None)


def _not_a_number(model: torch.nn.Module) -> Iterator[str]:
    import torch

    for name, parameter in model.named_parameters():
        gradient = parameter.grad
        if gradient is not None:
            values = gradient.coalesce().values() if gradient.is_sparse else gradient
            if bool(torch.isnan(values).any()):
                yield name


class AttentionDetector:
    """Detector for calls to scaled dot product attention, the only function that ``cp:N`` runs on all ranks together."""

    def __init__(self, config: StepConfig) -> None:
        self._config = config
        self._is_required = config.sharding is not None and config.sharding.degree("cp") > 1
        self._is_called = False

    @contextmanager
    def watched(self) -> Iterator[None]:
        """Watch for attention calls within the context."""
        if not self._is_required:
            yield
            return

        def call(func: Any, args: Any, kwargs: Any) -> Any:
            if getattr(func, "__name__", "") == "scaled_dot_product_attention":
                self._is_called = True
            return func(*args, **kwargs)

        with function_mode(call):
            yield

    def check(self) -> None:
        """Raise `ConfigError` if the config has ``cp:N``, but the model never called scaled dot product attention."""
        if self._is_required and not self._is_called:
            raise ConfigError(
                f"shard={self._config.shard}: the ranks of cp share a sequence only in "
                "torch.nn.functional.scaled_dot_product_attention, but the model never calls this function; call it, or "
                "leave cp out"
            )


class AssumedChoices:
    """Detector for choices that the device makes by assumption after this object is created.

    An emulated GPU computes the values of small tensors only. If an operator such as ``topk`` chooses by uncomputed values, the
    device assumes a result, as ``routing=`` says.
    """

    def __init__(self, config: StepConfig, device: Device) -> None:
        self._config = config
        self._device = device
        self._before = device.choices_assumed()

    def check(self) -> tuple[str, ...]:
        """Return notes for the measurement.

        Raises:
            ConfigError: The config has ``routing=``, but no choice in the step depends on an uncomputed value.
        """
        if self._config.routing is None:
            return ()
        word = f"routing={self._config.routing}"
        if self._device.lacks("values") is None:
            return (f"{word} is not needed on {self._device.name}, which computes all values",)
        if self._device.choices_assumed() == self._before:
            raise ConfigError(
                f"{word} has no effect, because no operator in the step (topk, argmax, max, sort, multinomial) chooses by "
                f"uncomputed values; leave {word} out"
            )
        return ()


class AutocastDetector:
    """Detector for autocast's effect: did any operation or module return a tensor with autocast's dtype?

    ``word`` is the precision in the config, for example ``"amp-bf16"``.
    """

    def __init__(self, word: str | None) -> None:
        precision = precision_named(word)
        self._word = word
        self._name = None if precision is None else precision.autocast
        self._has_cast = False

    @property
    def is_idle(self) -> bool:
        """True if the precision has no autocast, so nothing is detected."""
        return self._name is None

    @contextmanager
    def watched(self) -> Iterator[None]:
        """Watch the results of all operations and modules within the context."""
        if self._name is None:
            yield
            return
        import torch
        from torch.nn.modules.module import register_module_forward_hook

        dtype = getattr(torch, self._name)

        def call(func: Any, args: Any, kwargs: Any) -> Any:
            result = func(*args, **kwargs)
            self._see(result, dtype)
            return result

        # The function mode does not see operations inside a scripted module (TorchScript), so look at the module's output.
        handle = register_module_forward_hook(lambda _module, _inputs, output: self._see(output, dtype))
        with handle, function_mode(call):
            yield

    def _see(self, result: object, dtype: torch.dtype) -> None:
        self._has_cast = self._has_cast or any(tensor.dtype == dtype for tensor in tensors_in(result))

    def check(self) -> None:
        """Raise `ConfigError` if autocast cast nothing."""
        if self._name is not None and not self._has_cast:
            raise ConfigError(
                f"{self._word}: autocast was on but cast nothing to {self._name}; the model switches autocast off, or has no "
                "operation that autocast casts"
            )
