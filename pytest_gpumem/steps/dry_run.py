"""Dry run of a step under a config: checks that what the config asks for happens."""

from __future__ import annotations

from contextlib import contextmanager
from dataclasses import dataclass
from functools import partial
from typing import TYPE_CHECKING, Any

from pytest_gpumem.explain.tracker import function_mode
from pytest_gpumem.measure.reading import run_phases
from pytest_gpumem.measurement import MeasuringError
from pytest_gpumem.step_config.errors import ConfigError
from pytest_gpumem.steps.checkpointing import BlockRuns, checkpointed
from pytest_gpumem.steps.precision import precision_named
from pytest_gpumem.torch_support.reachability import tensors_in

if TYPE_CHECKING:
    from collections.abc import Iterable, Iterator, Sequence

    import torch

    from pytest_gpumem.devices.contract import Device
    from pytest_gpumem.measure.reading import Phase
    from pytest_gpumem.step_config.config import StepConfig
    from pytest_gpumem.steps.training import Training

MOST_OVERFLOWS = 18
"""Steps in which a `GradScaler` may halve its scale: from 65536 to below 1."""


@dataclass(frozen=True, slots=True)
class DryRun:
    """Result of the dry run: notes for the measurement, and how many module calls were repeated in backward."""

    notes: tuple[str, ...] = ()
    recomputed: int | None = None
    overflows: bool = False
    """True if gradients overflow at every scale, so that the optimizer is skipped in every step."""


def dry_run(training: Training, device: Device) -> DryRun:
    """Run the training step, not compiled, until it is like the ones that follow: on several ranks, on all of them.

    Raises `ConfigError` when what was to be recomputed, or cast by autocast, was not; and `MeasuringError` when gradients
    are not numbers (NaN) at every scale, with the parameter's name.
    """
    config = training.config
    runs = BlockRuns()
    attention = CallsOfAttention(config)
    data = None if config.sharding is None else config.sharding.data
    waits, without_gradient = data is not None and data.wrapped, list[str]()
    cast, routes = CastTo(config.precision), ChoicesAssumed(config, device)
    wrong: list[str] = []
    notes: tuple[str, ...] = ()
    overflows = False

    def look() -> None:
        # What is offloaded is on the host by now.
        if waits and "optimizer" not in config.offloaded:
            without_gradient.extend(_without_gradient(training.model))
        if training.scaler is not None:
            wrong.extend(_not_a_number(training.model))

    training.before_optimizer = look
    again = CallsInBackward()
    with checkpointed(training.model, config, runs):
        for attempt in range(MOST_OVERFLOWS + 1):
            wrong.clear()
            again.number = 0
            parts_before = runs.again()
            before = training.scale()
            for phase in training.phases():
                forward = phase.name == "forward" or training.pipeline is not None
                with attention.watched(), cast.watched() if forward else again.counted():
                    phase.run()
            if without_gradient:
                others = f" and {len(without_gradient) - 1} more" if len(without_gradient) > 1 else ""
                raise ConfigError(
                    f"shard={config.shard}: DistributedDataParallel waits for the gradient of each parameter, and "
                    f"{without_gradient[0]}{others} got none; freeze what the step does not use "
                    "(requires_grad_(False)), or under torchrun leave shard= out and give "
                    "DistributedDataParallel(model, find_unused_parameters=True)"
                )
            after = training.scale()
            device.consensus.rest()  # the buckets of DistributedDataParallel are made anew in its second step
            if device.consensus.all(before is None or after is None or after >= before):
                break
            if attempt == MOST_OVERFLOWS:
                overflows = True
                if wrong:
                    more = f" ({len(wrong)} gradients are)" if len(wrong) > 1 else ""
                    raise MeasuringError(
                        f"the gradient of {wrong[0]} is not a number (NaN) under {config}, whatever the gradients are scaled "
                        f"by: the optimizer would be skipped in every step{more}"
                    )
                notes = (
                    f"the gradients overflow at every scale down to {after:g}: the optimizer is skipped in every step",
                )
    training.before_optimizer = None
    runs.check(training.model, config)
    cast.check()
    attention.check()
    notes += routes.check()
    # The parts themselves are run again without being called, so that no hook of theirs sees it.
    return DryRun(notes, again.number + runs.again() - parts_before, overflows=overflows)


def dry_run_inference(phases: Iterable[Phase], config: StepConfig, device: Device) -> tuple[str, ...]:
    """Run an inference step that autocasts or assumes a routing once, not compiled, and return notes for the measurement.

    Raises `ConfigError` when autocast cast nothing, or there was nothing to assume.
    """
    cast, routes = CastTo(config.precision), ChoicesAssumed(config, device)
    if cast.is_idle and config.routing is None:
        return ()
    with cast.watched():
        run_phases(phases)
    cast.check()
    return routes.check()


class CallsInBackward:
    """Counter of module calls while backward runs: what is called then is recomputed."""

    def __init__(self, number: int = 0) -> None:
        self.number = number

    @contextmanager
    def counted(self) -> Iterator[None]:
        """Count the module calls within the context."""
        from torch.nn.modules.module import register_module_forward_pre_hook

        with register_module_forward_pre_hook(self._count):
            yield

    def _count(self, *_: object) -> None:
        self.number += 1


def counted_again(phases: Sequence[Phase], recomputed: int | None) -> tuple[list[Phase], CallsInBackward]:
    """Return the phases of a step and how many module calls it repeats in backward.

    That is ``recomputed``, as a dry run has found; or else is counted in the first run, after which the phases are as given.
    """
    counting, again = list(phases), CallsInBackward(recomputed or 0)

    def first(index: int, phase: Phase) -> None:
        counting[index] = phase
        with again.counted():
            phase.run()

    for index, phase in enumerate(phases if recomputed is None else ()):
        if phase.name != "forward":
            counting[index] = phase._replace(run=partial(first, index, phase))
    return counting, again


def _without_gradient(model: torch.nn.Module) -> Iterator[str]:
    return (name for name, one in model.named_parameters() if one.requires_grad and one.grad is None)


def _not_a_number(model: torch.nn.Module) -> Iterator[str]:
    import torch

    for name, parameter in model.named_parameters():
        gradient = parameter.grad
        if gradient is not None:
            values = gradient.coalesce().values() if gradient.is_sparse else gradient
            if bool(torch.isnan(values).any()):
                yield name


class CallsOfAttention:
    """Detector of calls of scaled dot product attention, the only operation that ranks of ``cp:N`` share."""

    def __init__(self, config: StepConfig) -> None:
        self._config = config
        self._wanted = config.sharding is not None and config.sharding.degree("cp") > 1
        self._seen = False

    @contextmanager
    def watched(self) -> Iterator[None]:
        """Look at the calls of what runs within the context."""
        if not self._wanted:
            yield
            return

        def call(func: Any, args: Any, kwargs: Any) -> Any:
            if getattr(func, "__name__", "") == "scaled_dot_product_attention":
                self._seen = True
            return func(*args, **kwargs)

        with function_mode(call):
            yield

    def check(self) -> None:
        """Raise `ConfigError` if ranks were to share attention and the model never called it."""
        if self._wanted and not self._seen:
            raise ConfigError(
                f"shard={self._config.shard}: the model never calls torch.nn.functional.scaled_dot_product_attention, by which "
                "ranks of cp share a sequence, so that each would see its own part only; call it, or leave cp out"
            )


class ChoicesAssumed:
    """Detector of choices that a config has made by an assumption (``routing=``), from when this is made."""

    def __init__(self, config: StepConfig, device: Device) -> None:
        self._config = config
        self._device = device
        self._before = device.choices_assumed()

    def check(self) -> tuple[str, ...]:
        """Return notes for the measurement. Raises `ConfigError` if the device lacks values and nothing was chosen by them."""
        if self._config.routing is None:
            return ()
        word = f"routing={self._config.routing}"
        if self._device.lacks("values") is None:
            return (f"{word} is not needed on {self._device.name}, which computes what is chosen",)
        if self._device.choices_assumed() == self._before:
            raise ConfigError(
                f"{word}: the step chooses nothing by values that are not computed (topk, argmax, max, sort, multinomial); "
                "leave it out"
            )
        return ()


class CastTo:
    """Detector of autocast's effect: whether any operation, or any module, returned a tensor of its dtype.

    ``word`` is the precision in the config.
    """

    def __init__(self, word: str | None) -> None:
        precision = precision_named(word)
        self._word = word
        self._name = None if precision is None else precision.autocast
        self._seen = False

    @property
    def is_idle(self) -> bool:
        """True if the precision has no autocast, so that there is nothing to detect."""
        return self._name is None

    @contextmanager
    def watched(self) -> Iterator[None]:
        """Look at the results of what runs within the context."""
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

        # What a scripted module computes is seen by its output only.
        handle = register_module_forward_hook(lambda _module, _inputs, output: self._see(output, dtype))
        with handle, function_mode(call):
            yield

    def _see(self, result: object, dtype: torch.dtype) -> None:
        self._seen = self._seen or any(tensor.dtype == dtype for tensor in tensors_in(result))

    def check(self) -> None:
        """Raise `ConfigError` if autocast cast nothing."""
        if self._name is not None and not self._seen:
            raise ConfigError(
                f"{self._word}: autocast was on and cast nothing to {self._name}; the model switches it off, or has no "
                "operation that autocast casts"
            )
