"""Measures a model's step under a config, from what a test author hands in to figures."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import ExitStack, contextmanager, suppress
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any

from pytest_gpumem.explain.recording import Expected, is_out_of_memory, not_explained_note
from pytest_gpumem.measurement import ITEMS, Workload
from pytest_gpumem.steps.batches import describe, number_of_items, on_device, work_in
from pytest_gpumem.steps.compiling import compile_now, compiled
from pytest_gpumem.steps.config import StepConfig
from pytest_gpumem.steps.dry_run import dry_run_inference
from pytest_gpumem.steps.inference import infer_phases, quantized
from pytest_gpumem.steps.lazy import initialise
from pytest_gpumem.steps.model_step import build_model, given_model, parameters_of, precision_of
from pytest_gpumem.steps.precision import batch_in_precision, in_precision
from pytest_gpumem.steps.prepared import can_run, prepared_train_step
from pytest_gpumem.steps.random_numbers import random_numbers_given_back
from pytest_gpumem.steps.runner import Phase
from pytest_gpumem.steps.state import StateBytes, state_of
from pytest_gpumem.steps.surroundings import surroundings
from pytest_gpumem.torch_support.private_api import compiled_graphs
from pytest_gpumem.torch_support.tracebacks import RAISED_BY_A_STEP, clear_frames

if TYPE_CHECKING:
    from collections.abc import Iterator, Mapping, Sequence

    from pytest_gpumem.explain.recording import Subject
    from pytest_gpumem.explain.sites import Site
    from pytest_gpumem.explain.tracker import Tracker
    from pytest_gpumem.steps.measuring_context import MeasuringContext
    from pytest_gpumem.steps.model_step import Loss, ModelOrFactory, OptimizerOrFactory
    from pytest_gpumem.steps.runner import StepFigures
    from pytest_gpumem.values.composition import Explanation

_PLAIN = StepConfig()
MOST_SAMPLES = 3
"""Of a step's time: two, and one more where one of them shows what the other can neither confirm nor contradict."""


@dataclass(frozen=True, slots=True)
class MeasuredStep:
    """What measuring a model's step gave. ``state`` is there when it was asked for."""

    figures: StepFigures
    workload: Workload
    work: Mapping[str, float]
    """What the step works on, by its name (``samples``, ``tokens``, ``items``); throughput is of the first."""
    notes: tuple[str, ...] = ()
    state: StateBytes | None = None
    recomputed: int | None = None
    explanation: Explanation | None = None

    def metrics(self) -> dict[str, float]:
        """Every metric of the step: bytes, counts, seconds, items per second."""
        return metrics_of(self.figures, next(iter(self.work.values()), None))


Asking = Callable[[MeasuredStep], bool]
"""A question about a step that has been measured."""


@dataclass(frozen=True, slots=True)
class Asked:
    """Whether a step that has been measured is ``wanted`` explained, and whether its time is ``doubted`` and taken again.

    ``placed``: whether it is told at which lines its counts come about.
    """

    wanted: Asking | None = None
    doubted: Asking | None = None
    placed: Asking | None = None


NOTHING = Asked()


def metrics_of(figures: StepFigures, items: float | None) -> dict[str, float]:
    """The metrics of a measured step; throughput when ``items`` says how much a step works on."""
    metrics: dict[str, float] = {**figures.memory_metrics(), **figures.counted.counts.metrics()}
    times = figures.times
    if times is not None:
        metrics["step_time"] = times.median
        metrics |= {f"{name}_time": seconds for name, seconds in times.phases.items()}
        if items is not None and times.median > 0:
            metrics["throughput"] = items / times.median
    return metrics


def measure_function(
    bench: MeasuringContext, fn: Callable[[], object], items: float | None = None, asked: Asked = NOTHING
) -> MeasuredStep:
    """Measure ``fn()`` as a step that repeats. What it holds belongs to the step."""
    with random_numbers_given_back(bench.device):
        return _measured_function(bench, fn, items, asked)


def _measured_function(
    bench: MeasuringContext, fn: Callable[[], object], items: float | None, asked: Asked
) -> MeasuredStep:
    start = bench.begin(fn)
    phases = [Phase("step", fn)]

    def know(tracker: Tracker) -> None:
        tracker.known.within(fn)
        tracker.know(inputs=fn)

    subject = bench.subject(phases, start, lambda: fn, know=know)
    with out_of_memory_explained(bench, subject, asked.wanted):
        figures = bench.measure(phases, start, held=lambda: fn)
    notes = figures.notes()
    work = {} if items is None else {ITEMS: number_of_items(items)}
    step = timed_again(MeasuredStep(figures, Workload("measure"), work, notes), bench, phases, lambda: fn, asked)
    step = placed(step, bench, phases, asked)
    return explained(step, bench, subject, asked.wanted)


def measure_train_step(
    bench: MeasuringContext,
    model_or_factory: ModelOrFactory,
    batch: Any,
    *,
    config: StepConfig | None = None,
    loss: Loss | None = None,
    optimizer: OptimizerOrFactory | None = None,
    items: float | str | None = None,
    with_state: bool = False,
    asked: Asked = NOTHING,
) -> MeasuredStep:
    """Measure forward + backward + optimizer. Without a config: plainly, in the model's own precision, with AdamW.

    Raises `ConfigError`, ``ValueError`` or ``TypeError`` when it makes no
    step, and `CannotRun` where the device cannot.
    """
    with prepared_train_step(bench, model_or_factory, batch, config=config, loss=loss, optimizer=optimizer) as prepared:
        training, seen = prepared.training, prepared.seen
        subject = prepared.subject()
        with out_of_memory_explained(bench, subject, asked.wanted):
            figures = prepared.measure()
        state = state_of(training, figures, bench) if with_state else None
        notes = (*seen.notes, *figures.notes())
        work = work_in(training.batch, items)
        step = MeasuredStep(figures, prepared.workload(), work, notes, state, seen.recomputed)
        step = timed_again(step, bench, prepared.phases, prepared.held, asked)
        step = placed(step, bench, prepared.phases, asked)
        return explained(step, bench, subject, asked.wanted)


def timed_again(
    step: MeasuredStep, bench: MeasuringContext, phases: Sequence[Phase], held: Callable[[], object], asked: Asked
) -> MeasuredStep:
    """The step, with other samples of its time as long as those that there are leave it ``doubted``, and `MOST_SAMPLES`."""
    times = step.figures.times
    while times is not None and len(times.samples) < MOST_SAMPLES and asked.doubted is not None and asked.doubted(step):
        times = replace(times, samples=(*times.samples, bench.sample_again(phases, held)))
        step = replace(step, figures=replace(step.figures, times=times))
    return step


def placed(step: MeasuredStep, bench: MeasuringContext, phases: Sequence[Phase], asked: Asked) -> MeasuredStep:
    """The step, with the lines of its counts if they are asked for."""
    counted = step.figures.counted
    # Kernels are told by the GPU, which does not know lines.
    if not any(counted.by_operator.get(name) for name in ("operators", "flops", "syncs")):
        return step
    if bench.explaining is None or asked.placed is None or not asked.placed(step):
        return step
    return replace(step, figures=replace(step.figures, counted=bench.locate(phases, counted)))


def explained(step: MeasuredStep, bench: MeasuringContext, subject: Subject, wanted: Asking | None) -> MeasuredStep:
    """The step, with its explanation if it is ``wanted``."""
    if bench.explaining is None or wanted is None or not wanted(step):
        return step
    memory = step.figures.memory
    own = memory.own if step.figures.growth else None
    expected = Expected(memory.memory_metrics()["peak_allocated"], memory.turnover or None, own)
    try:
        return replace(step, explanation=bench.explain(subject, expected))
    except RAISED_BY_A_STEP as error:
        return replace(step, notes=(*step.notes, not_explained_note(error)))


@contextmanager
def out_of_memory_explained(bench: MeasuringContext, subject: Subject, wanted: Asking | None) -> Iterator[None]:
    """An out-of-memory error within is explained on its way out."""
    try:
        yield
    except Exception as error:
        explains = bench.explaining is not None and bench.explaining.ran_out is not None
        if explains and wanted is not None and is_out_of_memory(error):
            # What the step's frames hold has to go, or memory would run out earlier this time.
            clear_frames(error)
            with suppress(*RAISED_BY_A_STEP):
                bench.explain_out_of_memory(subject)
        raise


def measure_infer_step(
    bench: MeasuringContext,
    model_or_factory: ModelOrFactory,
    batch: Any,
    *,
    config: StepConfig | None = None,
    items: float | str | None = None,
    asked: Asked = NOTHING,
) -> MeasuredStep:
    """Measure one forward pass, or with ``cache=on`` a prompt and the token after it. Raises as `measure_train_step`."""
    config = config or _PLAIN
    config.only_for("infer_step")
    device = bench.device.torch_device
    can_run(bench.device, config)
    batch = batch_in_precision(on_device(batch, device), config.precision)
    given = given_model(model_or_factory)
    with ExitStack() as stack:
        stack.enter_context(random_numbers_given_back(bench.device))
        start = bench.begin((given, batch))
        creation_sites: dict[int, Site] = {}
        with bench.born(creation_sites):
            model = in_precision(build_model(model_or_factory, device), config.precision, given is not None)
            initialise(model, batch, config, bench.device, training=False)
            precision = precision_of(model)
            model = quantized(model, config, given is not None)
        stack.enter_context(surroundings(model, config, bench.device, training=False))
        dry_run_inference(infer_phases(model, model, batch, config, device), config)
        run = stack.enter_context(compiled(model, config.compile))
        phases = infer_phases(model, run, batch, config, device)
        compile_now(phases, config.compile)
        compiles = config.compile != "none"

        def know(tracker: Tracker) -> None:
            tracker.know(model, inputs=batch)

        subject = bench.subject(
            phases, start, lambda: (model, batch), know=know, births_of=creation_sites, compiled=compiles
        )

        def held() -> object:
            return model, batch

        with out_of_memory_explained(bench, subject, asked.wanted):
            figures = bench.measure(
                phases, start, held=held, state=compiled_graphs if compiles else None, compiled=compiles
            )
        workload = Workload("infer_step", config.text(precision), parameters_of(model), describe(batch))
        step = MeasuredStep(figures, workload, work_in(batch, items), figures.notes())
        step = placed(timed_again(step, bench, phases, held, asked), bench, phases, asked)
        return explained(step, bench, subject, asked.wanted)
