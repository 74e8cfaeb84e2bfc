"""A step that is ready to run under its config, and is measured, timed again, located and explained as its caller asks."""

from __future__ import annotations

from contextlib import contextmanager, nullcontext
from dataclasses import dataclass, field, replace
from typing import TYPE_CHECKING, Any

from pytest_gpumem.devices.contract import CannotRun
from pytest_gpumem.explain.compose import over_time_of
from pytest_gpumem.explain.recording import Expected, Subject, explain, explain_out_of_memory, phase
from pytest_gpumem.explain.sites import Places, creation_sites
from pytest_gpumem.measurement import ITEMS, Workload
from pytest_gpumem.ranks.together import ALONE
from pytest_gpumem.steps.batches import describe, feed, micro_batches, number_of_items, work_in
from pytest_gpumem.steps.config import StepConfig
from pytest_gpumem.steps.counting import located
from pytest_gpumem.steps.growth import WINDOW
from pytest_gpumem.steps.model_step import caching, in_mode, parameters_of, precision_of
from pytest_gpumem.steps.precision import autocasting, float32_precision
from pytest_gpumem.steps.random_numbers import random_numbers_given_back
from pytest_gpumem.steps.reading import Phase
from pytest_gpumem.steps.runner import SECONDS_BETWEEN_SAMPLES, measure_step, sample_again
from pytest_gpumem.torch_support.garbage_collector import cyclic_collector_off
from pytest_gpumem.torch_support.private_api import outside_autocast
from pytest_gpumem.torch_support.reachability import blocks_of, reachable_tensors, storages_of
from pytest_gpumem.torch_support.static_access import is_a
from pytest_gpumem.torch_support.tracebacks import RAISED_BY_A_STEP
from pytest_gpumem.values.composition import NOT_EXPLAINED

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator, Mapping, Sequence

    import torch

    from pytest_gpumem.devices.contract import Device
    from pytest_gpumem.explain.artifacts import Artifacts
    from pytest_gpumem.explain.owners import TensorOwners
    from pytest_gpumem.explain.recording import Recorded
    from pytest_gpumem.explain.sites import Site, Sites
    from pytest_gpumem.explain.tracker import Tracker
    from pytest_gpumem.ranks.together import Alone
    from pytest_gpumem.steps.dry_run import CallsInBackward
    from pytest_gpumem.steps.settling import StepFigures
    from pytest_gpumem.timing.sampling import TimeBudget
    from pytest_gpumem.values.composition import Explanation

PLAIN = StepConfig()
MOST_SAMPLES = 3
"""Of a step's time: two, and one more where one of them shows what the other can neither confirm nor contradict."""


@dataclass(frozen=True, slots=True)
class MeasuringContext:
    """Where steps are measured and explained.

    ``time_budget`` is ``None`` where no step is timed, ``sites`` where none is explained. ``artifacts`` keep the recordings
    that explanations are taken from. With ``over_time`` an explanation shows the whole step.
    """

    device: Device
    time_budget: TimeBudget | None
    sites: Sites | None = None
    artifacts: Artifacts | None = None
    over_time: bool = False
    together: Alone = ALONE
    """What the ranks of a job decide together."""

    def begin(self, held: object) -> tuple[int, ...]:
        """Bring memory to rest before anything of a step is made, and return the bytes that are live and not the step's own.

        Args:
            held: What there is of the step already.

        Returns:
            The bytes on each of `Device.everywhere`.
        """
        self.together.release()
        self.device.quiesce()
        self.device.register_existing(self.storages(held))
        if self.together.several:
            self.device.hold_known()
        tensors = list(reachable_tensors([held]))
        return tuple(one.live() - sum(blocks_of(tensors, one.torch_device).values()) for one in self.device.everywhere)

    def storages(self, held: object, device: Device | None = None) -> Iterator[torch.UntypedStorage]:
        """Return the storages on a device, by default that of the context, that can be reached from ``held``."""
        return storages_of(reachable_tensors([held]), (device or self.device).torch_device)

    @contextmanager
    def creation_sites(self) -> Iterator[dict[int, Site]]:
        """Yield the lines that make tensors within the context, by address; none where nothing is explained."""
        found: dict[int, Site] = {}
        with nullcontext() if self.sites is None else creation_sites(self.sites, found):
            yield found

    def named(self, name: str | None) -> int:
        """Return the place among `Device.everywhere` of the device called ``name``; ``None`` is the first."""
        return next((n for n, one in enumerate(self.device.everywhere) if str(one.torch_device) == name), 0)

    def explain(self, subject: Subject, expected: Expected, place: int = 0) -> Explanation | str:
        """Run ``subject`` once more, recorded, and return what its peak is made of.

        Args:
            subject: A step or call that was measured.
            expected: What was measured of it.
            place: The device whose peak it is, as its place among `Device.everywhere`.

        Returns:
            The explanation, or a clause that says why there is none: what goes wrong this time is no failure of the step.
        """
        assert self.sites is not None, "only called where something is explained"
        try:
            with cyclic_collector_off(), random_numbers_given_back(self.device):
                device = self.device.everywhere[place]
                # No window of the others sees the recorded run, either.
                with self.device.unrecorded() if place else nullcontext():
                    explanation, recorded = explain(device, self.sites, subject, expected, self.together)
            return self._kept(self._named(explanation, place), recorded)
        except RAISED_BY_A_STEP as error:
            return f"{NOT_EXPLAINED}: " + f"{type(error).__name__}: {error}".partition("\n")[0]

    def explain_out_of_memory(self, subject: Subject, place: int = 0) -> Explanation | None:
        """Run what ran out of memory once more, recorded; return where memory went if it runs out again.

        ``place`` is the device that ran out of it, as its place among `Device.everywhere`.
        """
        assert self.sites is not None, "only called where something is explained"
        with cyclic_collector_off(), random_numbers_given_back(self.device):
            found = explain_out_of_memory(self.device.everywhere[place], self.sites, subject)
        return None if found is None else self._kept(self._named(found[0], place), found[1])

    def _named(self, explanation: Explanation, place: int) -> Explanation:
        """Return the explanation with the name of its GPU, where the process sees several."""
        return (
            replace(explanation, gpu=str(self.device.everywhere[place].torch_device))
            if self.device.others
            else explanation
        )

    def _kept(self, explanation: Explanation, recorded: Recorded) -> Explanation:
        """Keep the recording, and return its explanation, with the whole step if ``over_time``, and with a note on failure."""
        if self.over_time:
            explanation = replace(explanation, over_time=over_time_of(recorded).thinned())
        trouble = None if self.artifacts is None else self.artifacts.keep(recorded)
        if trouble is None:
            return explanation
        return replace(explanation, peak=replace(explanation.peak, notes=(*explanation.peak.notes, trouble)))


@dataclass(frozen=True, slots=True)
class MeasuredStep:
    """Result of measuring a step."""

    figures: StepFigures
    workload: Workload
    work: Mapping[str, float]
    """What the step works on, by its name (``samples``, ``tokens``, ``items``); throughput is of the first."""
    notes: tuple[str, ...] = ()
    recomputed: int | None = None
    """Training steps: module calls that were repeated in backward; ``None`` of others."""
    is_over: bool = False
    """Whether it cannot be run again: a step of a loop that has ended."""

    @property
    def may_be_timed_again(self) -> bool:
        times = self.figures.times
        return times is not None and len(times.samples) < MOST_SAMPLES and not self.is_over

    def metrics(self) -> dict[str, float]:
        """Return every metric of the step: bytes, counts, seconds, items per second."""
        figures = self.figures
        metrics: dict[str, float] = {**figures.memory_metrics(), **figures.counted.counts.metrics()}
        times = figures.times
        if times is not None:
            metrics["step_time"] = times.median
            metrics |= {f"{name}_time": seconds for name, seconds in times.phases.items()}
            items = next(iter(self.work.values()), None)
            if items is not None and times.median > 0:
                metrics["throughput"] = items / times.median
        return metrics


@dataclass(frozen=True, slots=True, kw_only=True)
class PreparedStep:
    """A step that is ready to run.

    ``model`` is ``None`` for a function of the test's own. A step that changes ``state()`` is not like the next one.
    """

    context: MeasuringContext
    name: str
    phases: Sequence[Phase]
    foreign: Sequence[int]
    """Bytes that were live before its model was built, and are not its own, on each of `Device.everywhere`."""
    held: object
    """What leads to everything that the step holds between steps."""
    model: torch.nn.Module | None = None
    optimizer: torch.optim.Optimizer | None = None
    batch: object = None
    config: StepConfig = PLAIN
    precision: str | None = None
    """That of the model before its weights were quantised; ``None`` where it has it still."""
    items: float | str | None = None
    state: Callable[[], object] | None = None
    notes: tuple[str, ...] = ()
    again: CallsInBackward | None = None
    """What its backward repeats, of a training step."""
    creation_sites: Mapping[int, Site] = field(default_factory=dict)
    buckets: Mapping[int, torch.Tensor] = field(default_factory=dict)
    """As of `Built`."""

    def measure(self) -> MeasuredStep:
        """Run the step until it repeats, then measure it."""
        figures = measure_step(
            self.phases,
            self.context.device,
            own=self._storages,
            foreign=self.foreign,
            time_budget=self.context.time_budget,
            state=self.state,
            compiled=self._compiled,
            together=self.context.together,
        )
        recomputed = None if self.again is None else self.again.number
        return MeasuredStep(figures, self._workload(), self._work(), (*self.notes, *figures.notes()), recomputed)

    def time_again(self, step: MeasuredStep) -> MeasuredStep:
        """Return ``step``, which was measured and timed, with one more sample of its time."""
        times, time_budget = step.figures.times, self.context.time_budget
        assert times is not None, "only a step that was timed is timed again"
        assert time_budget is not None, "same"
        context, seconds = self.context, time_budget.second_sample
        sample = sample_again(self.phases, context.device, self._storages, seconds, context.together)
        time_budget.spend_on_second_sample(SECONDS_BETWEEN_SAMPLES + sample.spent)
        times = replace(times, samples=(*times.samples, sample))
        return replace(step, figures=replace(step.figures, times=times))

    def locate(self, step: MeasuredStep) -> MeasuredStep:
        """Return ``step`` with the lines at which what it counts is called; the step is run once more for that."""
        counted, context = step.figures.counted, self.context
        # The GPU counts kernels and does not know lines.
        has_lines = any(counted.by_operator.get(name) for name in ("operators", "flops", "syncs"))
        if not context.together.any(has_lines):
            return step
        assert context.sites is not None, "only called where something is explained"
        places = Places(context.sites, context.device.torch_device)
        with cyclic_collector_off(), random_numbers_given_back(context.device), context.device.peak_ignored():
            counted = located(self._run_counted, context.device, counted, places)
        return replace(step, figures=replace(step.figures, counted=counted))

    def _run_counted(self) -> None:
        """Run the step while what it does is counted."""
        for one in self.phases:
            one.run()

    def explain(self, step: MeasuredStep, device: str | None = None) -> Explanation | str:
        """Run the step once more, recorded, and return what its peak is made of, or a clause that says why not.

        ``device`` is the name of the GPU whose peak it is, where there are several.
        """
        figures, place = step.figures, self.context.named(device)
        one = self.context.device.everywhere[place]
        grows = bool(figures.growth or any(figures.growth_elsewhere.values()))
        memory = figures.memory_on(None if place == 0 else one.name, keeps=grows)
        alike = self.context.together.all(figures.allocate_alike)
        expected = Expected(
            memory.memory_metrics()["peak_allocated"],
            memory.turnover if one.turnover() and alike else None,
            memory.own if grows else None,
            keeps=grows,
            # Of a leak at least as many as growth is told by.
            steps=1 if alike else max(len(figures.seen), WINDOW if grows else 0),
        )
        return self.context.explain(self.subject(place), expected, place)

    def subject(self, place: int = 0) -> Subject:
        """Return the step as what is to be recorded on a device, given as its place among `Device.everywhere`."""
        device, foreign = self.context.device.everywhere[place], self.foreign[place]

        def run(tracker: Tracker) -> None:
            for one in self.phases:
                with phase(tracker, one.name):
                    one.run()

        return Subject(
            run,
            own=lambda: list(self._storages(device)),
            own_bytes=lambda: device.live() - foreign,
            register=self._register,
            creation_sites=self.creation_sites,
            compiled=self._compiled,
        )

    def _register(self, owners: TensorOwners) -> None:
        if self.model is None:
            owners.within(self.held)
            owners.inputs(self.held)
            return
        owners.model(self.model)
        if self.optimizer is not None:
            owners.optimizer(self.optimizer)
        owners.inputs(self.batch)
        owners.buckets(self.buckets)

    @property
    def _compiled(self) -> bool:
        return self.config.compile != "none"

    def _storages(self, device: Device | None = None) -> Iterator[torch.UntypedStorage]:
        return self.context.storages(self.held, device)

    def _workload(self) -> Workload:
        if self.model is None:
            return Workload(self.name)
        config = self.config.text(self.precision or precision_of(self.model))
        return Workload(self.name, config, parameters_of(self.model), describe(self.batch))

    def _work(self) -> dict[str, float]:
        if self.model is not None:
            return work_in(self.batch, self.items)
        return {} if self.items is None else {ITEMS: number_of_items(self.items)}


@contextmanager
def prepared_function(
    context: MeasuringContext, fn: Callable[[], object], items: float | None = None
) -> Iterator[PreparedStep]:
    """Make ``fn()`` ready to run as a step that repeats. What it holds belongs to the step."""
    with random_numbers_given_back(context.device):
        foreign = context.begin(fn)
        yield PreparedStep(
            context=context, name="measure", phases=[Phase("step", fn)], foreign=foreign, held=fn, items=items
        )


@contextmanager
def surroundings(model: torch.nn.Module, config: StepConfig, device: Device, *, training: bool) -> Iterator[None]:
    """Set mode, matrix precision, key/value cache and autocast as in the config, whatever is set outside."""
    # With cache=on the calls say so themselves.
    cache = False if training or config.cache == "off" else None
    with (
        in_mode(model, training=training),
        float32_precision(config.precision, device),
        caching(model, cache, required=config.cache == "off"),
        outside_autocast(device.torch_device.type),
    ):
        yield


def initialise(model: torch.nn.Module, batch: Any, config: StepConfig, device: Device, *, training: bool) -> None:
    """Run a model that has uninitialised parameters or buffers forward once, as its step does; nothing for other models.

    Before an optimizer is made, the weights are quantised or the model is compiled, as torch's documentation asks for. In the
    first step of inference they would become inference tensors, which cannot be trained any more.
    """
    import torch

    if not any(is_uninitialised(tensor) for tensor in (*model.parameters(), *model.buffers())):
        return
    with (
        surroundings(model, config, device, training=training),
        nullcontext() if training else torch.no_grad(),
        autocasting(config.precision, device.torch_device),
    ):
        feed(model, micro_batches(batch, config.accumulate)[0])


def is_uninitialised(tensor: torch.Tensor) -> bool:
    """Return whether it is a parameter or buffer of a lazy module that has not been called."""
    import torch

    return is_a(tensor, torch.nn.UninitializedParameter, torch.nn.UninitializedBuffer)


def can_run(device: Device, config: StepConfig) -> None:
    """Raise `CannotRun` if the device cannot run a step under this config."""
    more = ["offload"] if config.offloaded else []
    if config.sharding is not None:
        more += ["cp"] if config.sharding.degree("cp") > 1 else []
        more += ["fully_shard"] if config.sharding.fully else []
    for feature in (config.precision, config.checkpointing.kind.name, config.compile, *more):
        why_not = None if feature is None else device.lacks(feature)
        if why_not is not None:
            raise CannotRun(why_not)
