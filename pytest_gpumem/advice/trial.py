"""Trial of one config: the model's training step is measured under it, and a failure is a result, too."""

from __future__ import annotations

import gc
import inspect
import traceback
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

from pytest_gpumem.advice.foretold_peak import LEAST_TOKENS, foretold_peak, is_long
from pytest_gpumem.advice.run_warnings import warnings_kept
from pytest_gpumem.advice.search_order import OUT_OF_MEMORY, Tried, is_start
from pytest_gpumem.devices.contract import CannotRun
from pytest_gpumem.explain.recording import is_out_of_memory
from pytest_gpumem.explain.sites import Sites
from pytest_gpumem.measure.context import MeasuringContext
from pytest_gpumem.measure.reading import run_phases
from pytest_gpumem.measurement import MeasuringError
from pytest_gpumem.models.attention import attention_of
from pytest_gpumem.models.sources import named_model
from pytest_gpumem.models.task import TRAINING, Task
from pytest_gpumem.step_config.blocks import repeated_blocks
from pytest_gpumem.step_config.errors import ConfigError, NotAStep
from pytest_gpumem.steps.batches import on_device, samples_in
from pytest_gpumem.steps.inference import prepared_infer_step
from pytest_gpumem.steps.model_step import built_on
from pytest_gpumem.steps.precision import dtype_of_weights
from pytest_gpumem.steps.train_step import prepared_train_step
from pytest_gpumem.timing.sampling import TimeBudget
from pytest_gpumem.torch_support.static_access import instance_dict, parameters_of
from pytest_gpumem.torch_support.tracebacks import RAISED_BY_A_STEP
from pytest_gpumem.units import counted, format_large_count
from pytest_gpumem.values.composition import NOT_EXPLAINED
from pytest_gpumem.values.unknown_reads import decided_a_branch

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator
    from contextlib import AbstractContextManager

    import torch

    from pytest_gpumem.advice.largest import Sought
    from pytest_gpumem.advice.snippet import BlockContainer
    from pytest_gpumem.devices.contract import Device, Peak
    from pytest_gpumem.measure.prepared import PreparedStep
    from pytest_gpumem.models.name import BatchSize
    from pytest_gpumem.models.named_model import NamedModel
    from pytest_gpumem.step_config.blocks import Block
    from pytest_gpumem.step_config.config import StepConfig
    from pytest_gpumem.steps.model_step import Loss
    from pytest_gpumem.values.composition import Explanation

_NO_BLOCKS = (
    "the model has no repeated blocks (a ModuleList or Sequential of modules of one type); "
    "name them with --blocks PATTERN"
)


class TrialFailed(Exception):
    """The model's own code raised, in the first step that was tried or before. The message is a sentence."""


class SubjectError(ValueError):
    """The named function does not return a model and a batch, or the model lacks the named blocks."""


@dataclass(frozen=True)
class AdviceSubject:
    """Subject of the measurements: a function that builds the model, its batch, and the loss if the model has none."""

    build: Callable[[torch.dtype], torch.nn.Module]
    """Takes the dtype in which weights are wanted, and may build them in another."""
    batch: Any
    loss: Loss | None
    containers: tuple[BlockContainer, ...]
    """The paths of the repeated blocks; empty when there are none."""
    task: Task = TRAINING
    """The task of the model in the step."""
    title: str = ""
    """A model's name and its batch, for people; empty of a function that makes them."""
    size: BatchSize | None = None
    """The size of its batch, where it can be had in another size, too."""
    sized: Callable[[BatchSize], AdviceSubject] | None = None
    """Returns the same with a batch of another size. Raises `ModelError` where the model takes none of that size."""
    has_length: bool = True
    """True if the size's length is one of tokens or of a sound, not the side of images."""
    seen_samples: int | None = None
    """The samples of its batch, where another process has counted them."""
    attention: str = ""
    """The attention implementation, like ``"sdpa"``; empty if transformers did not choose it."""
    warnings: tuple[str, ...] = ()
    """Warnings while the model was looked at, before a config ran."""
    make: Callable[[torch.device, bool], AdviceSubject] | None = None
    """Makes it in the process that measures it, where nothing of it can be taken along: on a device, and whether the model that
    is made beside the batch is the first that is built."""

    def number(self, sought: Sought) -> int | None:
        """Return the samples of its batch, or the tokens of each; ``None`` where they have no length."""
        if self.size is None:
            return None
        if sought == "samples":
            return self.size.samples
        return self.size.length if self.has_length else None

    def with_number(self, sought: Sought, number: int) -> AdviceSubject:
        """Return the same with another number of samples, or of tokens. Raises `ModelError` where the model takes none such."""
        assert self.size is not None, "only asked of what has a number"
        assert self.sized is not None, "same"
        return self.sized(replace(self.size, **{"samples" if sought == "samples" else "length": number}))

    def here(self, device: torch.device, *, keeps_model: bool) -> AdviceSubject:
        """Return it as it is made in this process, on a device: what was made already."""
        return self if self.make is None else self.make(device, keeps_model)

    @property
    def samples(self) -> int | None:
        """The samples of its batch; ``None`` where they cannot be told."""
        if self.make is not None:
            return self.seen_samples
        return samples_in(self.batch() if callable(self.batch) else self.batch)


def subject_of(
    factory: Callable[[], Any],
    device: torch.device,
    blocks: str | None = None,
    task: Task = TRAINING,
    *,
    keeps_model: bool = False,
) -> AdviceSubject:
    """Return the subject that ``factory()`` gives as ``(model, batch)`` or ``(model, batch, loss)``; it builds each model.

    A batch that is a function is made here, once.

    Args:
        factory: The function.
        device: Where its batch is wanted.
        blocks: The pattern that names the model's blocks.
        task: The task of the model in the step that is measured.
        keeps_model: Whether the model that is made here, beside the batch, is the first that is built: as in a program, which
            calls the function once.

    Raises:
        SubjectError: Something else is given, or nothing is so named.
    """
    import torch

    _needs_no_arguments(factory, _name(factory))

    made = built_on(device, factory)
    if not isinstance(made, tuple) or len(made) not in (2, 3) or not isinstance(made[0], torch.nn.Module):
        what = (
            f"({', '.join(type(part).__name__ for part in made)})" if isinstance(made, tuple) else type(made).__name__
        )
        raise SubjectError(f"expected (model, batch) or (model, batch, loss) of {_name(factory)}(), got {what}")
    model, batch, *loss = made
    if callable(batch):
        _needs_no_arguments(batch, f"the batch that {_name(factory)}() returns")
    containers = _containers(model, blocks)
    kept = [model] if keeps_model else []
    return AdviceSubject(
        lambda _: kept.pop() if kept else factory()[0],
        on_device(batch, device),
        loss[0] if loss else None,
        containers,
        task,
        attention=attention_of(model),
    )


def subject_by_name(model: NamedModel, blocks: str | None = None) -> AdviceSubject:
    """Return the subject that a model by name gives. Its batch is made where it is needed: nothing is on a device.

    Raises `SubjectError` where ``blocks`` names nothing, or no model can be built of the configuration.
    """
    import torch

    try:
        with torch.device("meta"):
            built = model.build(torch.float32)
    except Exception as error:  # noqa: BLE001, the model's own
        what = f"{type(error).__name__}: {' '.join(str(error).split())}"
        raise SubjectError(f"{model.name}: {model.class_name} cannot be built: {what}") from None
    containers, attention, facts = _containers(built, blocks), attention_of(built), _facts(built, blocks)

    def subject(model: NamedModel) -> AdviceSubject:
        return AdviceSubject(
            model.build,
            model.batch,
            model.loss,
            containers,
            model.task,
            _titled(model.title, facts),
            model.inputs.size,
            lambda size: subject(named_model(model.name, size, model.task)),
            has_length=model.inputs.shape is None,
            attention=attention,
        )

    return subject(model)


def _facts(model: torch.nn.Module, blocks: str | None) -> str:
    """Return a model's size and the dtype of its checkpoint: ``"8.03 B parameters, 32 layers, published in bfloat16"``."""
    try:
        layers = sum(map(len, repeated_blocks(model, blocks)))
    except ConfigError:
        layers = 0
    values = instance_dict((instance_dict(model) or {}).get("config")) or {}
    dtype = str(values.get("dtype") or values.get("torch_dtype") or "").removeprefix("torch.")
    parts = [f"{format_large_count(parameters_of(model))} parameters"]
    parts += [counted(layers, "layer")] if layers else []
    parts += [f"published in {dtype}"] if dtype else []
    return ", ".join(parts)


def _titled(title: str, facts: str) -> str:
    """Return a title with the facts on the model before the words on its step, which a semicolon parts."""
    model, separator, step = title.partition("; ")
    return f"{model}, {facts}{separator}{step}"


def try_config(device: Device, subject: AdviceSubject, config: StepConfig) -> Tried:
    """Measure the step under ``config``, and return the figures or why there are none, with the run's warnings.

    A failure of a config that is not the first is a result as well: the earlier measurements are worth more than a traceback.

    Raises:
        NotAStep: The subject gives no such step.
        TrialFailed: The first config, whose errors are the model's own. Of a function its traceback has been shown.
    """
    with warnings_kept() as warned:
        tried = _tried(device, subject, config)
    return replace(tried, warnings=tuple(warned))


def _tried(device: Device, subject: AdviceSubject, config: StepConfig) -> Tried:
    if config.checkpointing.kind.on_blocks and config.blocks is None and not subject.containers:
        return Tried(config, why_not=_NO_BLOCKS)
    try:
        metrics = _metrics(device, subject, config)
    except NotAStep:
        raise
    except (CannotRun, ConfigError, MeasuringError) as error:
        return Tried(config, why_not=str(error))
    except Exception as error:
        why_not = _why_not(device, error)
        if why_not is None and is_start(config):
            if not subject.title:
                traceback.print_exception(error)
            raise TrialFailed(_failure(subject, config, error)) from error
        return Tried(config, why_not=why_not or _first_line(error))
    lost = device.lost()
    if lost is not None:
        return Tried(config, why_not=lost)
    # What the allocator takes from the GPU is what has to fit.
    allocated = int(metrics["peak_allocated"])
    reserved = int(metrics.get("peak_reserved", allocated))
    slow = None if config.precision is None else device.emulates(config.precision)
    doubt = decided_a_branch(device.take_reads().notes())
    time = metrics.get("step_time")
    return Tried(config, reserved, time, allocated=allocated, slow=slow or "", doubt=doubt or "")


def _why_not(device: Device, error: Exception) -> str | None:
    """Return why a step fails that is right; ``None`` where it may fail by itself."""
    if is_out_of_memory(error):
        return OUT_OF_MEMORY
    lacking = device.why_cannot_run(error)
    return None if lacking is None else f"cannot run on it: {lacking}"


def _failure(subject: AdviceSubject, config: StepConfig, error: Exception) -> str:
    name = subject.title.partition(", ")[0] or "the model"
    how = "by itself" if config.sharding is None else f"under {config}"
    return f"{name} fails {how}: {_first_line(error)}"


def _first_line(error: BaseException) -> str:
    first_line = str(error).strip().partition("\n")[0]
    return f"{type(error).__name__}: {first_line}".removesuffix(": ")


_SECONDS = 0.5
"""Time budget of a config, whose time is shown beside the others' and not judged."""


def explain_config(device: Device, subject: AdviceSubject, config: StepConfig, *, over_time: bool) -> Explanation | str:
    """Run a config that was measured once more, recorded, and return what its peak is made of, or a clause that says why not.

    Args:
        device: Where it ran.
        subject: The model and its batch.
        config: The config.
        over_time: Whether the explanation shows the whole step, too.
    """
    if is_long(subject.task.new_tokens) and not device.tells_time:
        return f"{NOT_EXPLAINED}: {LEAST_TOKENS} or more tokens are not recorded; --generate {LEAST_TOKENS - 1} is explained"
    context = MeasuringContext(device, None, Sites(Path.cwd()), over_time=over_time, peak_only=True)
    try:
        # A model that is there before would be no part of the step.
        with _prepared(context, subject, config, keeps_model=False) as (prepared, _):
            return prepared.explain(prepared.measure())
    except RAISED_BY_A_STEP as error:
        return f"{NOT_EXPLAINED}: {_first_line(error)}"


def _metrics(device: Device, subject: AdviceSubject, config: StepConfig) -> dict[str, float]:
    context = MeasuringContext(device, TimeBudget(_SECONDS) if device.tells_time else None)
    # A model that is sharded is built without memory, and none that exists.
    whole_model = config.sharding is None or not config.sharding.in_place
    with _prepared(context, subject, config, keeps_model=whole_model) as (prepared, peak):
        whole = _whole_peak(prepared, peak, subject.task.new_tokens, config)
        if whole and not device.tells_time:
            return whole
        return {**prepared.measure().metrics(), **whole}


@contextmanager
def _prepared(
    context: MeasuringContext, subject: AdviceSubject, config: StepConfig, *, keeps_model: bool
) -> Iterator[tuple[PreparedStep, Callable[[], Peak] | None]]:
    """Yield the step under a config, and what tells the peak since its model was built, if the device does."""
    device, dtype = context.device, dtype_of_weights(config.precision)

    def build() -> torch.nn.Module:
        return subject.build(dtype)

    with ExitStack() as stack:
        if not keeps_model:
            subject = subject.here(device.torch_device, keeps_model=False)
            gc.collect()
        peak = stack.enter_context(device.peak_from_now_on())
        subject = subject.here(device.torch_device, keeps_model=True)
        device.open()
        # In this order, since a device that has failed may not settle any more.
        stack.callback(device.close)
        stack.callback(device.quiesce)
        step: AbstractContextManager[PreparedStep] = (
            prepared_train_step(context, build, subject.batch, config=config, loss=subject.loss)
            if subject.task.trains
            else prepared_infer_step(context, build, subject.batch, config=config, new_tokens=subject.task.new_tokens)
        )
        try:
            with step as prepared:
                if not subject.task.trains:
                    # How the weights were cast or quantised is not the step's.
                    peak = stack.enter_context(device.peak_from_now_on())
                yield prepared, peak
        except Exception as error:
            # The memory of the failed step must be free for the next one.
            traceback.clear_frames(error.__traceback__)
            raise


def _whole_peak(
    prepared: PreparedStep, peak: Callable[[], Peak] | None, new_tokens: int | None, config: StepConfig
) -> dict[str, float]:
    """Run the step as a program does, one after the other, until no more is reserved, and return the peaks since it was built.

    Measuring runs it in other ways besides, and gives back what the allocator keeps. Nothing on a device that does not reserve.
    A generation of many tokens is foretold from a few of them if the device does not compute.
    """
    if peak is None:
        return {}
    device = prepared.context.device
    if new_tokens is None or device.tells_time or prepared.model is None:
        return _figures(_peak_of_steps(prepared, peak))
    foretold = foretold_peak(device, prepared.model, prepared.batch, new_tokens, config)
    if foretold is not None:
        return _figures(foretold)
    with device.peak_from_now_on() as peak_of_all:
        assert peak_of_all is not None, "it told a peak before"
        return _figures(_peak_of_steps(prepared, peak_of_all))


def _peak_of_steps(prepared: PreparedStep, peak: Callable[[], Peak]) -> Peak:
    before, now = None, peak()
    for _ in range(_MOST_STEPS):
        run_phases(prepared.phases)
        now = peak()
        if now == before:
            return now
        before = now
    raise MeasuringError(f"it still takes more after {_MOST_STEPS} steps")


def _figures(peak: Peak) -> dict[str, float]:
    return {"peak_allocated": peak.allocated, **({} if peak.reserved is None else {"peak_reserved": peak.reserved})}


_MOST_STEPS = 8
"""Steps after which an allocator that still takes more is left."""


def _needs_no_arguments(function: Callable[..., Any], name: str) -> None:
    try:
        signature = inspect.signature(function)
    except (TypeError, ValueError):  # some builtins have none
        return
    try:
        signature.bind()
    except TypeError as error:
        raise SubjectError(f"{name} is called without arguments: {error}") from None


def _containers(model: torch.nn.Module, named: str | None) -> tuple[BlockContainer, ...]:
    try:
        lists = repeated_blocks(model, named)
    except ConfigError as error:
        if named is not None:
            raise SubjectError(str(error)) from None
        return ()
    return tuple(_container(model, blocks) for blocks in lists)


def _container(model: torch.nn.Module, blocks: list[Block]) -> BlockContainer:
    import torch

    path = blocks[0].path.rpartition(".")[0]
    module = model.get_submodule(path)
    if isinstance(module, (torch.nn.ModuleList, torch.nn.Sequential)) and [*module] == [one.module for one in blocks]:
        return path
    return tuple(block.path for block in blocks)


def _name(factory: object) -> str:
    return getattr(factory, "__qualname__", repr(factory))
