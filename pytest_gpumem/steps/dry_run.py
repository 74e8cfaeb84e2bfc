"""Dry run of a step under a config: checks that what the config asks for happens."""

from __future__ import annotations

from contextlib import AbstractContextManager, contextmanager, nullcontext
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from pytest_gpumem.measurement import MeasuringError
from pytest_gpumem.ranks.together import ALONE
from pytest_gpumem.steps.checkpointing import Runs, checkpointed
from pytest_gpumem.steps.config import ConfigError
from pytest_gpumem.steps.precision import precision_named
from pytest_gpumem.torch_support.reachability import tensors_in

if TYPE_CHECKING:
    from collections.abc import Iterable, Iterator

    import torch

    from pytest_gpumem.ranks.together import Alone
    from pytest_gpumem.steps.config import StepConfig
    from pytest_gpumem.steps.runner import Phase
    from pytest_gpumem.steps.training import Training

MOST_OVERFLOWS = 18
"""Steps in which a `GradScaler` may halve its scale: from 65536 to below 1."""


@dataclass(frozen=True, slots=True)
class DryRun:
    """Result of the dry run: notes for the measurement, and how many module calls were repeated in backward."""

    notes: tuple[str, ...] = ()
    recomputed: int | None = None
    overflows: bool = False
    """Whether gradients overflow at every scale, so that the optimizer is skipped in every step."""


def dry_run(training: Training, together: Alone = ALONE) -> DryRun:
    """Run the training step, not compiled, until it is like the ones that follow: on several ranks, on all of them.

    Raises `ConfigError` when what was to be recomputed, or cast by autocast, was not; and `MeasuringError` when gradients
    are not numbers (NaN) at every scale, with the parameter's name.
    """
    config = training.config
    runs = Runs()
    cast = CastTo(precision_named(config.precision))
    wrong: list[str] = []
    notes: tuple[str, ...] = ()
    if training.scaler is not None:
        training.before_optimizer = lambda: wrong.extend(_not_a_number(training.model))
    again = _CallsInBackward()
    with checkpointed(training.model, config, runs):
        for attempt in range(MOST_OVERFLOWS + 1):
            wrong.clear()
            again.number = 0
            parts_before = runs.again()
            before = training.scale()
            for phase in training.phases():
                forward = phase.name == "forward" or training.pipeline is not None
                with cast.watched() if forward else again.counted():
                    phase.run()
            after = training.scale()
            if together.all(before is None or after is None or after >= before):
                break
            if attempt == MOST_OVERFLOWS:
                if wrong:
                    raise MeasuringError(
                        f"the gradient of {wrong[0]} is not a number (NaN) under {config}, whatever the gradients are scaled "
                        f"by: the optimizer would be skipped in every step{_more(wrong)}"
                    )
                notes = (
                    f"the gradients overflow at every scale down to {after:g}: the optimizer is skipped in every step",
                )
    training.before_optimizer = None
    runs.check(training.model, config)
    cast.check(config.precision)
    # The parts themselves are run again without being called, so that no hook of theirs sees it.
    return DryRun(notes, again.number + runs.again() - parts_before, overflows=bool(notes))


def dry_run_inference(phases: Iterable[Phase], config: StepConfig) -> None:
    """Run an inference step that autocasts once, not compiled. Raises `ConfigError` when autocast cast nothing."""
    cast = CastTo(precision_named(config.precision))
    if cast.is_idle:
        return
    with cast.watched():
        for phase in phases:
            phase.run()
    cast.check(config.precision)


class _CallsInBackward:
    """Counter of module calls while backward runs: what is called then is recomputed."""

    def __init__(self) -> None:
        self.number = 0

    @contextmanager
    def counted(self) -> Iterator[None]:
        from torch.nn.modules.module import register_module_forward_pre_hook

        handle = register_module_forward_pre_hook(self._count)
        try:
            yield
        finally:
            handle.remove()

    def _count(self, *_: object) -> None:
        self.number += 1


def _more(names: list[str]) -> str:
    return f" ({len(names)} gradients are)" if len(names) > 1 else ""


def _not_a_number(model: torch.nn.Module) -> Iterator[str]:
    import torch

    for name, parameter in model.named_parameters():
        gradient = parameter.grad
        if gradient is not None:
            values = gradient.coalesce().values() if gradient.is_sparse else gradient
            if bool(torch.isnan(values).any()):
                yield name


class CastTo:
    """Detector of autocast's effect: whether any operation, or any module, returned a tensor of its dtype."""

    def __init__(self, precision: Any) -> None:
        self._name: str | None = None if precision is None else precision.autocast
        self._seen = False

    @property
    def is_idle(self) -> bool:
        """Whether the precision has no autocast, so that there is nothing to detect."""
        return self._name is None

    def watched(self) -> AbstractContextManager[object]:
        """Look at the results of what runs within the context."""
        return nullcontext() if self._name is None else self._watched(self._name)

    @contextmanager
    def _watched(self, name: str) -> Iterator[None]:
        import torch
        from torch.nn.modules.module import register_module_forward_hook
        from torch.overrides import TorchFunctionMode

        dtype = getattr(torch, name)
        outer = self

        class Watch(TorchFunctionMode):
            def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
                result = func(*args, **(kwargs or {}))
                outer._see(result, dtype)
                return result

        # What a scripted module computes is seen by its output only.
        handle = register_module_forward_hook(lambda _module, _inputs, output: self._see(output, dtype))
        try:
            with Watch():
                yield
        finally:
            handle.remove()

    def _see(self, result: object, dtype: torch.dtype) -> None:
        self._seen = self._seen or any(tensor.dtype == dtype for tensor in tensors_in(result))

    def check(self, word: str | None) -> None:
        if self._name is not None and not self._seen:
            raise ConfigError(
                f"{word}: autocast was on and cast nothing to {self._name}; the model switches it off, or has no operation "
                "that autocast casts"
            )
