"""Measure a model's step with a config. A failure is a result as well, and an error is raised only for the first config."""

from __future__ import annotations

import gc
import inspect
import traceback
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

from pytest_gpumem.base.errors import CannotRun, ConfigError, MeasuringError, NotAStep, SubjectError, TrialFailed
from pytest_gpumem.base.units import counted, format_large_count
from pytest_gpumem.facts.values.composition import NOT_EXPLAINED
from pytest_gpumem.facts.values.unknown_reads import decided_a_branch
from pytest_gpumem.measuring.explain.recording import is_out_of_memory
from pytest_gpumem.measuring.explain.sites import Sites
from pytest_gpumem.measuring.measure.context import MeasuringContext
from pytest_gpumem.measuring.measure.reading import run_phases
from pytest_gpumem.measuring.models.attention import attention_of
from pytest_gpumem.measuring.models.sources import named_model
from pytest_gpumem.measuring.models.task import TRAINING, Task
from pytest_gpumem.measuring.step_config.blocks import repeated_blocks
from pytest_gpumem.measuring.steps.batches import on_device, samples_in
from pytest_gpumem.measuring.steps.inference import prepared_infer_step
from pytest_gpumem.measuring.steps.model_source import ModelFactory, built_on, factory_name
from pytest_gpumem.measuring.steps.precision import dtype_of_weights
from pytest_gpumem.measuring.steps.train_step import prepared_train_step
from pytest_gpumem.measuring.timing.sampling import TimeBudget
from pytest_gpumem.tools.advise.foretold_peak import LEAST_TOKENS, foretold_peak, is_long
from pytest_gpumem.tools.advise.run_warnings import collected_warnings
from pytest_gpumem.tools.advise.search_order import OUT_OF_MEMORY, Trial, is_start
from pytest_gpumem.torch_support.static_access import instance_dict, parameters_of
from pytest_gpumem.torch_support.tracebacks import RAISED_BY_A_STEP

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator
    from contextlib import AbstractContextManager

    import torch

    from pytest_gpumem.facts.values.composition import Explanation
    from pytest_gpumem.measuring.devices.contract import Device, Peak
    from pytest_gpumem.measuring.measure.prepared import PreparedStep
    from pytest_gpumem.measuring.models.name import BatchSize
    from pytest_gpumem.measuring.models.named_model import NamedModel
    from pytest_gpumem.measuring.step_config.blocks import Block
    from pytest_gpumem.measuring.step_config.config import StepConfig
    from pytest_gpumem.measuring.steps.model_step import Loss
    from pytest_gpumem.tools.advise.largest import SizeAxis
    from pytest_gpumem.tools.advise.snippet import BlockContainer

_NO_BLOCKS = (
    "the model has no repeated blocks (a ModuleList or Sequential of modules of one type); "
    "name them with --blocks PATTERN"
)


@dataclass(frozen=True)
class AdviceSubject:
    """The subject of the trials: a batch, a function that builds the model, and a loss function unless the model computes its
    loss.
    """

    build: Callable[[torch.dtype], torch.nn.Module]
    """Builds a new model. The argument is the requested dtype for the weights, which a project's function ignores."""
    batch: Any
    loss: Loss | None
    containers: tuple[BlockContainer, ...]
    """The module paths of the model's repeated blocks. Empty if the model has no repeated blocks."""
    task: Task = TRAINING
    """The measured task: training, inference or token generation."""
    title: str = ""
    """A text with the model's name and its batch. Empty if the model comes from a project's function."""
    size: BatchSize | None = None
    """The batch size, or ``None`` if it cannot be changed."""
    sized: Callable[[BatchSize], AdviceSubject] | None = None
    """Returns the subject with another batch size. Raises `ModelError` if the model does not accept this size."""
    has_length: bool = True
    """True if ``size.length`` counts tokens or audio samples. False if ``size.length`` is the side of images."""
    seen_samples: int | None = None
    """The number of samples in the batch, as counted in another process. Used only if ``make`` is set."""
    attention: str = ""
    """The attention implementation that transformers chose, such as ``"sdpa"``. Empty for models from other libraries."""
    warnings: tuple[str, ...] = ()
    """Warnings from the model's code before the first trial."""
    make: Callable[[torch.device, bool], AdviceSubject] | None = None
    """Makes the subject anew in each trial's process. Set for a project's function, whose model a forked process may not
    inherit.

    The arguments are the device and a flag. If the flag is true, the first call of ``build`` returns the model that the
    function returned together with the batch.
    """

    def number(self, axis: SizeAxis) -> int | None:
        """Return the batch's size along ``axis``: the number of samples, or the number of tokens in each sample.

        Return ``None`` if this number is unknown.
        """
        if self.size is None:
            return None
        if axis == "samples":
            return self.size.samples
        return self.size.length if self.has_length else None

    def with_number(self, axis: SizeAxis, number: int) -> AdviceSubject:
        """Return the subject with another number of samples or tokens. Raises `ModelError` if the model does not accept it."""
        assert self.size is not None, "the caller has checked that the size is known"
        assert self.sized is not None, "a subject with a size also has `sized`"
        return self.sized(replace(self.size, **{"samples" if axis == "samples" else "length": number}))

    def here(self, device: torch.device, *, keeps_model: bool) -> AdviceSubject:
        """Return the subject for measuring in this process. If ``make`` is set, make the subject on the device."""
        return self if self.make is None else self.make(device, keeps_model)

    @property
    def samples(self) -> int | None:
        """The number of samples in the batch, or ``None`` if samples cannot be counted."""
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
    """Return the subject for a project's function. The function is called once for the batch, and again for each new model.

    Args:
        factory: A function without arguments that returns ``(model, batch)`` or ``(model, batch, loss)``. The batch may be a
            function that returns a batch.
        device: The device for the batch.
        blocks: The path pattern for the model's repeated blocks, such as ``h.*``.
        task: The model's task in the measured step.
        keeps_model: Whether to measure the model that the function returned together with the batch, as in a program that calls
            the function only once.

    Raises:
        SubjectError: The function returns something else, or the pattern matches no blocks.
    """
    import torch

    _needs_no_arguments(factory, factory_name(factory))

    result = built_on(device, factory)
    if not isinstance(result, tuple) or len(result) not in (2, 3) or not isinstance(result[0], torch.nn.Module):
        result_type = (
            f"({', '.join(type(part).__name__ for part in result)})"
            if isinstance(result, tuple)
            else type(result).__name__
        )
        raise SubjectError(
            f"expected (model, batch) or (model, batch, loss) from {factory_name(factory)}(), got {result_type}"
        )
    model, batch, *loss = result
    if callable(batch):
        _needs_no_arguments(batch, f"the batch that {factory_name(factory)}() returns")
    containers = _containers(model, blocks)
    first_model = [model] if keeps_model else []
    return AdviceSubject(
        lambda _: first_model.pop() if first_model else factory()[0],
        on_device(batch, device),
        loss[0] if loss else None,
        containers,
        task,
        attention=attention_of(model),
    )


def subject_by_name(model: NamedModel, blocks: str | None = None) -> AdviceSubject:
    """Return the subject for a model by name, such as ``timm:resnet50``. No device memory is allocated yet.

    Raises:
        SubjectError: ``blocks`` matches no blocks, or the library cannot build a model from the configuration.
    """
    import torch

    try:
        with torch.device("meta"):
            built = model.build(torch.float32)
    except Exception as error:  # noqa: BLE001, the model's own
        problem = f"{type(error).__name__}: {' '.join(str(error).split())}"
        raise SubjectError(f"{model.name}: {model.class_name} cannot be built: {problem}") from None
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
    """Return a model's size and its checkpoint's dtype: ``"8.03 B parameters, 32 layers, published in bfloat16"``."""
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
    """Insert facts about the model before the title's first semicolon. The text after the semicolon describes the step."""
    model, separator, step = title.partition("; ")
    return f"{model}, {facts}{separator}{step}"


def try_config(device: Device, subject: AdviceSubject, config: StepConfig) -> Trial:
    """Measure the step with ``config``. Return its peak and time, or the reason why the step failed, together with warnings.

    An error is raised only for the first config (see `is_start`). For a later config, an exception would discard the earlier
    measurements.

    Raises:
        NotAStep: The subject cannot run this step.
        TrialFailed: The first config failed, so the model's own code is the cause. For a project's function, the traceback has
            been printed.
    """
    with collected_warnings() as warnings:
        trial = _try(device, subject, config)
    return replace(trial, warnings=tuple(warnings))


def _try(device: Device, subject: AdviceSubject, config: StepConfig) -> Trial:
    if config.checkpointing.kind.on_blocks and config.blocks is None and not subject.containers:
        return Trial(config, why_not=_NO_BLOCKS)
    try:
        metrics = _metrics(device, subject, config)
    except NotAStep:
        raise
    except (CannotRun, ConfigError, MeasuringError) as error:
        return Trial(config, why_not=str(error))
    except Exception as error:
        why_not = _why_not(device, error)
        if why_not is None and is_start(config):
            if not subject.title:
                traceback.print_exception(error)
            raise TrialFailed(_failure(subject, config, error)) from error
        return Trial(config, why_not=why_not or _first_line(error))
    lost = device.lost()
    if lost is not None:
        return Trial(config, why_not=lost)
    # The allocator's reserved bytes, and not only the tensors, have to fit into the GPU's memory.
    allocated = int(metrics["peak_allocated"])
    reserved = int(metrics.get("peak_reserved", allocated))
    slow = None if config.precision is None else device.emulates(config.precision)
    doubt = decided_a_branch(device.take_reads().notes())
    time = metrics.get("step_time")
    return Trial(config, reserved, time, allocated=allocated, slow=slow or "", doubt=doubt or "")


def _why_not(device: Device, error: Exception) -> str | None:
    """Return the reason if the device is too small or lacks a feature, or ``None`` if the model's own code may be the cause."""
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
"""The seconds to spend on timing a config. Times are only printed for comparison, so half a second is enough."""


def explain_config(device: Device, subject: AdviceSubject, config: StepConfig, *, over_time: bool) -> Explanation | str:
    """Run a measured config once more, record its allocations, and explain its peak.

    Args:
        device: The trial's device.
        subject: The model and its batch.
        config: The config.
        over_time: Whether the explanation includes a curve of the memory during the step.

    Returns:
        The explanation, or the reason why the peak cannot be explained, as a clause.
    """
    if is_long(subject.task.new_tokens) and not device.tells_time:
        return (
            f"{NOT_EXPLAINED}: a generation of {LEAST_TOKENS} or more tokens is not recorded; "
            f"use --generate {LEAST_TOKENS - 1} or less"
        )
    context = MeasuringContext(device, None, Sites(Path.cwd()), over_time=over_time, peak_only=True)
    try:
        # Build the model during the recording. Tensors from before the recording would have no module and no line.
        with _prepared(context, subject, config, keeps_model=False) as (prepared, _):
            return prepared.explain(prepared.measure())
    except RAISED_BY_A_STEP as error:
        return f"{NOT_EXPLAINED}: {_first_line(error)}"


def _metrics(device: Device, subject: AdviceSubject, config: StepConfig) -> dict[str, float]:
    context = MeasuringContext(device, TimeBudget(_SECONDS) if device.tells_time else None)
    # For in-place sharding, the model is built without memory, so the function's first model cannot be used.
    keeps_model = config.sharding is None or not config.sharding.in_place
    with _prepared(context, subject, config, keeps_model=keeps_model) as (prepared, peak):
        program_peaks = _program_peaks(prepared, peak, subject.task.new_tokens, config)
        if program_peaks and not device.tells_time:
            return program_peaks
        return {**prepared.measure().metrics(), **program_peaks}


@contextmanager
def _prepared(
    context: MeasuringContext, subject: AdviceSubject, config: StepConfig, *, keeps_model: bool
) -> Iterator[tuple[PreparedStep, Callable[[], Peak] | None]]:
    """Yield the prepared step, and a function that returns the peak since the model was built. The function is ``None`` if the
    device does not report peaks.
    """
    device, dtype = context.device, dtype_of_weights(config.precision)
    source = ModelFactory(lambda: subject.build(dtype))
    with ExitStack() as stack:
        if not keeps_model:
            subject = subject.here(device.torch_device, keeps_model=False)
            gc.collect()
        peak = stack.enter_context(device.peak_from_now_on())
        subject = subject.here(device.torch_device, keeps_model=True)
        device.open()
        # At the end, `quiesce` runs first. `close` runs next, even if `quiesce` raises because the device has failed.
        stack.callback(device.close)
        stack.callback(device.quiesce)
        step: AbstractContextManager[PreparedStep] = (
            prepared_train_step(context, source, subject.batch, config=config, loss=subject.loss)
            if subject.task.trains
            else prepared_infer_step(context, source, subject.batch, config=config, new_tokens=subject.task.new_tokens)
        )
        try:
            with step as prepared:
                if not subject.task.trains:
                    # Count the peak from here, without the casting or quantising of the weights that has just prepared the
                    # inference step.
                    peak = stack.enter_context(device.peak_from_now_on())
                yield prepared, peak
        except Exception as error:
            # The traceback refers to tensors from the failed step. Free these tensors for the next trial.
            traceback.clear_frames(error.__traceback__)
            raise


def _program_peaks(
    prepared: PreparedStep, peak: Callable[[], Peak] | None, new_tokens: int | None, config: StepConfig
) -> dict[str, float]:
    """Repeat the step as a program does until the allocator reserves no more memory, and return the peaks. Return an empty dict
    if ``peak`` is ``None``.

    Peaks in a program differ from the measured peaks, because a measurement runs the step in several ways and empties the
    allocator's cache. On an emulated GPU, `foretold_peak` computes a long generation's peak.
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
        assert peak_of_all is not None, "the device has reported a peak before"
        return _figures(_peak_of_steps(prepared, peak_of_all))


def _peak_of_steps(prepared: PreparedStep, peak: Callable[[], Peak]) -> Peak:
    previous_peak, current_peak = None, peak()
    for _ in range(_MOST_STEPS):
        run_phases(prepared.phases)
        current_peak = peak()
        if current_peak == previous_peak:
            return current_peak
        previous_peak = current_peak
    raise MeasuringError(f"the peak is not known: the step reserves more memory in each of {_MOST_STEPS} runs")


def _figures(peak: Peak) -> dict[str, float]:
    return {"peak_allocated": peak.allocated, **({} if peak.reserved is None else {"peak_reserved": peak.reserved})}


_MOST_STEPS = 8
"""The step is repeated at most this many times until the allocator reserves no more memory."""


def _needs_no_arguments(function: Callable[..., Any], name: str) -> None:
    try:
        signature = inspect.signature(function)
    except (TypeError, ValueError):  # some builtins have no signature
        return
    try:
        signature.bind()
    except TypeError as error:
        raise SubjectError(f"{name} must work without arguments: {error}") from None


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
    if isinstance(module, (torch.nn.ModuleList, torch.nn.Sequential)) and [*module] == [
        block.module for block in blocks
    ]:
        return path
    return tuple(block.path for block in blocks)
