"""Measure the steps of a test's own loop, by watching its optimizers.

For example, ``optimizer.step()`` in the loop ends a step, and the plugin reads the step's memory before the loop goes on.
"""

from __future__ import annotations

import importlib
import sys
from contextlib import contextmanager, suppress
from functools import cache, partial
from typing import TYPE_CHECKING, Any, NoReturn

from pytest_gpumem.base.units import nearest
from pytest_gpumem.facts.measurement import MeasuringError, Workload
from pytest_gpumem.measuring.explain.recording import is_out_of_memory
from pytest_gpumem.measuring.measure.loop import EndOfLoop, Loop
from pytest_gpumem.measuring.measure.looped import FEWEST_STEPS, FirstStep, PreparedLoop
from pytest_gpumem.measuring.measure.reading import Phase
from pytest_gpumem.measuring.measure.step_boundaries import StepBoundaries
from pytest_gpumem.measuring.steps.batches import number_of_steps, work_of_items

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator

    from pytest_gpumem.facts.measurement import Measurement
    from pytest_gpumem.plugin.runtest.judging import JudgedMeasurement
    from pytest_gpumem.plugin.runtest.run import TestRun


_LEAST = (
    f"a loop's memory is read from at least {FEWEST_STEPS} steps. The loop itself runs in the `with` block: "
    "`with gpumem.loop() as training:`"
)
NOT_ITERABLE = (
    "gpumem.loop() runs no steps itself: write the loop into the body of `with gpumem.loop() as training:`. A step ends with "
    "optimizer.step(), or with training.step_ended() if the loop has no optimizer"
)


class MeasuredLoop:
    """The loop within `Gpumem.loop`."""

    def __init__(
        self, run: TestRun, steps: int, name: str | None, items: float | None, *, explain: bool | None
    ) -> None:
        self._run = run
        self._steps = number_of_steps(steps, FEWEST_STEPS, _LEAST)
        self._name = name
        self._items = items
        self._explain = explain
        self._loop = Loop(self._measure)
        self._boundaries = StepBoundaries(self._optimizer_stepped)
        self._ends_steps_itself = False
        """True if the loop, or a callback, calls `step_ended`. In this case, optimizers end no step."""
        self._judged: JudgedMeasurement | None = None
        self._measurement: Measurement | None = None
        self._other_blocks: frozenset[int] = frozenset()
        self._first: FirstStep | None = None

    @property
    def measurement(self) -> Measurement:
        """The measurement, which is available after the ``with`` block. Before, reading it raises `MeasuringError`."""
        if self._measurement is None:
            raise MeasuringError("the steps have not been measured yet: read their measurement after the with block")
        return self._measurement

    def step_ended(self) -> bool:
        """End a step in a loop without a torch optimizer. From the first call on, optimizers end no step.

        Unlike an optimizer's step, this method never ends the loop.

        Returns:
            True if the loop has been measured and may end.
        """
        self._ends_steps_itself = True
        self._loop.boundary()
        return self._loop.is_measured

    def callback(self) -> Any:
        """Return a callback for the ``Trainer`` of transformers or Lightning, which stops training when the loop has been
        measured.

        Without a callback, `Gpumem.loop` ends training by an exception.

        Raises:
            RuntimeError: Neither transformers nor Lightning is imported.
        """
        self._ends_steps_itself = True
        return callback_of(self.step_ended)

    def __getattr__(self, name: str) -> NoReturn:
        near = nearest(name, ["measurement", "step_ended", "callback"])
        raise AttributeError(f"the loop of gpumem.loop() has no attribute {name!r}; {near}", name=name, obj=self)

    def __iter__(self) -> NoReturn:
        raise TypeError(NOT_ITERABLE)

    @contextmanager
    def within(self) -> Iterator[None]:
        """Measure the steps of the loop in this context, and end the loop when they have been measured."""
        self._other_blocks = self._run.other_blocks()
        self._first = FirstStep(self._run.device, self._run.other_bytes)
        try:
            with self._boundaries.watched():
                yield
        except EndOfLoop as end:
            if end.loop is not self._loop:
                raise
        except BaseException as error:
            counting_error = error if self._ran_out_by_counting(error) else None
            # The test fails with the loop's own error. Measurements up to the error are kept.
            with suppress(Exception):
                self._loop.end(counting_error)
            self._keep()
            if counting_error is None or self._measurement is None:
                raise
        finally:
            self._first.forget()
        self._loop.end()
        self._keep()
        if self._judged is None:
            if self._boundaries.has_stepped_in_other_thread:
                raise MeasuringError(
                    "no step was seen: an optimizer stepped in another thread, and only steps in the test's own thread are "
                    "seen; run the loop in the test's thread"
                )
            raise MeasuringError(
                "no step was seen: a step ends with optimizer.step() of a torch optimizer, and no optimizer stepped. In a loop "
                "without a torch optimizer, call training.step_ended() at the end of each step, after "
                "`with gpumem.loop() as training:`"
            )

    def _ran_out_by_counting(self, error: BaseException) -> bool:
        """Return whether memory ran out in a counted step, which takes more memory than an ordinary step.

        With several ranks, the other ranks may wait for this rank in such a step. There the error belongs to the loop.
        """
        return self._loop.is_counted and is_out_of_memory(error) and not self._run.device.consensus.several

    def _optimizer_stepped(self) -> None:
        if self._ends_steps_itself:
            return
        self._loop.boundary()
        if self._loop.is_measured:
            raise EndOfLoop(self._loop)

    def _measure(self) -> None:
        assert self._first is not None, "steps are measured only within the with block"
        prepared = PreparedLoop(
            context=self._run.context,
            workload=Workload("loop"),
            work=work_of_items(self._items),
            phases=[Phase("step", self._loop.next_step)],
            run_counted=partial(self._loop.next_step, counted=True),
            other_bytes=self._run.other_bytes,
            held=None,
            steps=self._steps,
            first_figures=self._first.figures(),
            optimizers=self._boundaries.optimizers,
            other_blocks=self._other_blocks,
        )
        step = self._run.measure(prepared)
        self._judged = self._run.judge(prepared, step, self._name, explain=self._explain)

    def _keep(self) -> None:
        """Keep the measurement, and release the optimizers, so later measurements in the test do not count the loop."""
        self._boundaries.optimizers.clear()
        if self._judged is not None and self._measurement is None:
            self._measurement = self._run.keep(self._judged)


_BASES = {
    "transformers": ("transformers", "TrainerCallback"),
    "lightning.pytorch": ("lightning.pytorch", "Callback"),
    "pytorch_lightning": ("pytorch_lightning", "Callback"),
}
"""Base classes of callbacks: the trainer's package, and the module and name of its callback class.

A base class is used if the package is imported already.
"""


def callback_of(step_ended: Callable[[], bool]) -> Any:
    """Return a callback for the ``Trainer`` of transformers or Lightning, whichever is imported.

    Args:
        step_ended: Called when a step has ended. It returns whether training may stop.

    Raises:
        RuntimeError: Neither package is imported.
    """
    loaded = tuple(name for name in _BASES if name in sys.modules)
    if not loaded:
        raise RuntimeError(
            "training.callback() is for the Trainer of transformers or lightning, and neither is imported; "
            "in other loops, call training.step_ended() at the end of each step"
        )
    return _class_for(loaded)(step_ended)


@cache
def _class_for(loaded: tuple[str, ...]) -> Any:
    """Return the callback class for the loaded packages.

    The class is made once and cached, because a class is a reference cycle and would be reported as cyclic garbage.
    """
    bases = tuple(getattr(importlib.import_module(module), name) for module, name in map(_BASES.__getitem__, loaded))

    class GpumemCallback(*bases):  # type: ignore[misc]  # the bases are known at run time
        def __init__(self, step_ended: Callable[[], bool]) -> None:
            super().__init__()
            self._step_ended = step_ended
            self._optimizer_steps = 0

        def on_step_end(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
            """End a step after the optimizer's step, in transformers."""
            if self._step_ended():
                control.should_training_stop = True

        def on_train_batch_end(self, trainer: Any, *args: Any, **kwargs: Any) -> None:
            """End a step after a batch, in Lightning, if the optimizer has stepped.

            With ``accumulate_grad_batches=4``, for example, the optimizer steps after every fourth batch.
            """
            if trainer.global_step != self._optimizer_steps:
                self._optimizer_steps = trainer.global_step
                if self._step_ended():
                    trainer.should_stop = True

        def on_train_end(self, *args: Any, **kwargs: Any) -> None:
            """Do nothing. Both base classes have a method with this name, but their arguments differ."""

    return GpumemCallback
