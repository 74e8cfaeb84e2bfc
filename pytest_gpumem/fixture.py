"""The ``gpumem`` fixture: steps and regions that a test measures itself."""

from __future__ import annotations

from contextlib import contextmanager
from typing import TYPE_CHECKING, Any, NoReturn

from pytest_gpumem.measurement import Measurement, MeasuringError, Workload
from pytest_gpumem.reach import blocks_of, reachable_tensors, storages_of
from pytest_gpumem.steps.batches import describe, on_device, samples_in
from pytest_gpumem.steps.runner import Phase, measure_step

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Iterator

    import torch

    from pytest_gpumem.devices.contract import Blocks
    from pytest_gpumem.steps.model_step import Loss, ModelOrFactory, OptimizerOrFactory
    from pytest_gpumem.test_run import TestRun


class Region:
    """A region of a test that `Gpumem.track` measures; ``measurement`` is there once the region has ended."""

    def __init__(self) -> None:
        self._measurement: Measurement | None = None

    def end(self, measurement: Measurement) -> None:
        """The region has ended and this is its measurement."""
        self._measurement = measurement

    @property
    def measurement(self) -> Measurement:
        if self._measurement is None:
            raise MeasuringError("the region has not ended yet: read its measurement after the with block")
        return self._measurement


class Gpumem:
    """Measures steps of a model, or any code, on the device of this run (``--gpumem-device``).

    What is measured is judged when the test has ended: against the budget of its marker and of the settings, and, with
    ``--gpumem-baseline``, against its baselines. A test may measure more than once; ``name`` tells its measurements apart.
    """

    def __init__(self, run: TestRun | None, refuse: Callable[[], NoReturn]) -> None:
        """``run`` is ``None`` when the device cannot be used here; then any use ends in ``refuse``."""
        self._maybe_run = run
        self._refuse = refuse

    @property
    def _run(self) -> TestRun:
        return self._refuse() if self._maybe_run is None else self._maybe_run

    @property
    def device(self) -> torch.device:
        """The torch device that is measured: put models and batches there."""
        return self._run.device.torch_device

    def measure(self, fn: Callable[[], object], items: float | None = None, name: str | None = None) -> Measurement:
        """Measure ``fn()`` as a step that repeats: warmed up, then its memory, then its time.

        ``items`` is how many samples, tokens, ... one call works on; with it, throughput is measured. What ``fn`` holds
        (its closure, arguments bound to it, its object) belongs to the step; everything else that is live does not.
        """
        self._run.device.settle()
        blocks = self._adopt(fn)
        return self._step(
            [Phase("step", fn)],
            Workload("measure"),
            name=name,
            items=items,
            own=lambda: self._storages(fn),
            own_before=sum(blocks.values()),
            live_before=self._run.device.live(),
        )

    @contextmanager
    def track(self, name: str | None = None) -> Iterator[Region]:
        """Measure the body of a ``with`` block, which runs once::

            with gpumem.track("generate") as region:
                model.generate(prompt)
            assert region.measurement.peak_allocated < 2e9

        What the test and its fixtures hold when the region begins belongs to it. Runs cold: no time is taken.
        """
        region = Region()
        with self._run.tracked() as figures:
            yield region
        region.end(self._run.record(Workload("region"), figures().memory_metrics(), name=name))

    def train_step(
        self,
        model_or_factory: ModelOrFactory,
        batch: Any,
        *,
        loss: Loss | None = None,
        optimizer: OptimizerOrFactory | None = None,
        items: float | None = None,
        name: str | None = None,
    ) -> Measurement:
        """Measure forward + backward + optimizer of a model, in fp32, in training mode.

        ``model_or_factory``: a module on the device, which is trained; or a class or function that builds one there.
        ``batch``: a tensor, a tuple of positional or a mapping of keyword arguments; moved to the device.
        ``loss(output, batch)`` returns a scalar; without it ``output.loss``, ``output["loss"]`` or a scalar output is taken.
        ``optimizer``: a class or function of the parameters (default ``torch.optim.AdamW``), or an optimizer of a given model.
        ``items``: what one step works on, for the throughput; the batch's first dimension by default.

        Raises ``ValueError`` or ``TypeError`` when the model, batch, loss and optimizer do not make a step.
        """
        from pytest_gpumem.steps import model_step

        device = self._run.device
        batch = on_device(batch, self.device)
        given = _given(model_or_factory)
        if given is not None:
            # Gradients that somebody left would be in the first step and not in the others.
            given.zero_grad(set_to_none=True)
        device.settle()
        blocks = self._adopt((given, batch, optimizer))
        live_before = device.live()
        model = model_step.build_model(model_or_factory, self.device)
        made = model_step.build_optimizer(optimizer, model, given is not None)
        with model_step.in_mode(model, training=True), model_step.autocast_off(self.device):
            return self._step(
                model_step.train_phases(model, batch, made, loss),
                Workload(
                    "train_step", model_step.precision_of(model), model_step.parameters_of(model), describe(batch)
                ),
                name=name,
                items=samples_in(batch) if items is None else items,
                own=lambda: self._storages((model, batch, made)),
                own_before=sum(blocks.values()),
                live_before=live_before,
            )

    def infer_step(
        self, model_or_factory: ModelOrFactory, batch: Any, *, items: float | None = None, name: str | None = None
    ) -> Measurement:
        """Measure one forward pass under ``torch.inference_mode``, in evaluation mode. Arguments as for `train_step`."""
        from pytest_gpumem.steps import model_step

        device = self._run.device
        batch = on_device(batch, self.device)
        given = _given(model_or_factory)
        device.settle()
        blocks = self._adopt((given, batch))
        live_before = device.live()
        model = model_step.build_model(model_or_factory, self.device)
        with model_step.in_mode(model, training=False), model_step.autocast_off(self.device):
            return self._step(
                model_step.infer_phases(model, batch),
                Workload(
                    "infer_step", model_step.precision_of(model), model_step.parameters_of(model), describe(batch)
                ),
                name=name,
                items=samples_in(batch) if items is None else items,
                own=lambda: self._storages((model, batch)),
                own_before=sum(blocks.values()),
                live_before=live_before,
            )

    def _step(
        self,
        phases: list[Phase],
        workload: Workload,
        *,
        name: str | None,
        items: float | None,
        own: Callable[[], Iterable[torch.UntypedStorage]],
        own_before: int,
        live_before: int,
    ) -> Measurement:
        figures = measure_step(
            phases,
            self._run.device,
            self._run.windows,
            own=own,
            own_before=own_before,
            live_before=live_before,
            timed=self._run.timed,
        )
        metrics: dict[str, float] = dict(figures.memory.memory_metrics())
        if figures.times is not None:
            metrics["step_time"] = figures.times.median
            if items is not None and figures.times.median > 0:
                metrics["throughput"] = items / figures.times.median
        notes = () if figures.settled else (figures.unsettled_note(),)
        return self._run.record(workload, metrics, name=name, settled=figures.settled, notes=notes)

    def _adopt(self, held: object) -> Blocks:
        self._run.device.adopt(self._storages(held))
        return blocks_of(reachable_tensors([held]), self.device)

    def _storages(self, held: object) -> Iterator[torch.UntypedStorage]:
        return storages_of(reachable_tensors([held]), self.device)


def _given(model_or_factory: ModelOrFactory) -> torch.nn.Module | None:
    """The model, when one was given and not a function that builds it."""
    import torch

    return model_or_factory if isinstance(model_or_factory, torch.nn.Module) else None
