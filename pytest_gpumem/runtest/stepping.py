"""Steps of a loop that the test runs itself: found at its optimizer's steps, measured beside it, judged as any step is."""

from __future__ import annotations

import importlib
import sys
from contextlib import contextmanager, suppress
from functools import cache, partial
from typing import TYPE_CHECKING, Any, NoReturn

from pytest_gpumem.explain.recording import is_out_of_memory
from pytest_gpumem.measure.loop import EndOfLoop, Loop
from pytest_gpumem.measure.looped import FEWEST_STEPS, FirstStep, PreparedLoop
from pytest_gpumem.measure.reading import Phase
from pytest_gpumem.measure.step_boundaries import StepBoundaries
from pytest_gpumem.measurement import MeasuringError, Workload
from pytest_gpumem.steps.batches import number_of_steps, work_of_items
from pytest_gpumem.units import nearest

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator

    from pytest_gpumem.measurement import Measurement
    from pytest_gpumem.runtest.judging import Judged
    from pytest_gpumem.runtest.run import TestRun


_LEAST = (
    f"a loop's memory is read from {FEWEST_STEPS} steps at least. The loop itself runs in the `with` block: "
    "`with gpumem.loop() as training:`"
)
NOT_ITERABLE = (
    "gpumem.loop() runs no steps itself: write the loop as it is into the body of `with gpumem.loop() as training:`. A step "
    "ends with optimizer.step(), or with training.step_ended() where there is no optimizer"
)


class MeasuredLoop:
    """The steps of a loop that `Gpumem.loop` measures."""

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
        self._is_told = False
        """True if the loop says itself where its steps end."""
        self._judged: Judged | None = None
        self._measurement: Measurement | None = None
        self._blocks_not_own: frozenset[int] = frozenset()
        self._first: FirstStep | None = None

    @property
    def measurement(self) -> Measurement:
        """The measurement, after the ``with`` block. Before, it raises `MeasuringError`."""
        if self._measurement is None:
            raise MeasuringError("the steps have not been measured yet: read their measurement after the with block")
        return self._measurement

    def step_ended(self) -> bool:
        """End a step, if no torch optimizer does. From the first call on, optimizers end no step. It never ends the loop.

        Returns:
            True if the loop has been measured and may end.
        """
        self._is_told = True
        self._loop.boundary()
        return self._loop.is_measured

    def callback(self) -> Any:
        """Return a callback for the ``Trainer`` of transformers or Lightning, which stops training when it has been measured.

        Without a callback, `Gpumem.loop` ends training by an exception.

        Raises:
            RuntimeError: Neither transformers nor Lightning is imported.
        """
        self._is_told = True
        return callback_of(self.step_ended)

    def __getattr__(self, name: str) -> NoReturn:
        near = nearest(name, ["measurement", "step_ended", "callback"])
        raise AttributeError(f"gpumem.loop() gives no {name!r}; {near}", name=name, obj=self)

    def __iter__(self) -> NoReturn:
        raise TypeError(NOT_ITERABLE)

    @contextmanager
    def within(self) -> Iterator[None]:
        """Measure the steps of the loop within, and end it when they have been measured."""
        self._blocks_not_own = self._run.blocks_not_own()
        self._first = FirstStep(self._run.device, self._run.not_own)
        try:
            with self._boundaries.watched():
                yield
        except EndOfLoop as end:
            if end.loop is not self._loop:
                raise
        except BaseException as error:
            counted = error if self._ran_out_by_counting(error) else None
            # The loop's own error is what its test fails with. What was measured before is kept.
            with suppress(Exception):
                self._loop.end(counted)
            self._keep()
            if counted is None or self._measurement is None:
                raise
        finally:
            self._first.forget()
        self._loop.end()
        self._keep()
        if self._judged is None:
            if self._boundaries.stepped_in_other_thread:
                raise MeasuringError(
                    "no step was seen: an optimizer has stepped in another thread, and steps of other threads than "
                    "this one are not seen"
                )
            raise MeasuringError(
                "no step was seen: a step ends with optimizer.step() of a torch optimizer, and none was called; where the loop "
                "has no such optimizer, call step_ended() of what gpumem.loop() gives at the end of each step"
            )

    def _ran_out_by_counting(self, error: BaseException) -> bool:
        """Return whether memory ran out in a step that was counted, which takes more than an ordinary one.

        Of several ranks the others may wait for this one in such a step, so that there it is an error of the loop.
        """
        return self._loop.is_counted and is_out_of_memory(error) and not self._run.device.consensus.several

    def _optimizer_stepped(self) -> None:
        if self._is_told:
            return
        self._loop.boundary()
        if self._loop.is_measured:
            raise EndOfLoop(self._loop)

    def _measure(self) -> None:
        assert self._first is not None, "measured only within the with block"
        prepared = PreparedLoop(
            context=self._run.context,
            workload=Workload("loop"),
            work=work_of_items(self._items),
            phases=[Phase("step", self._loop.next_step)],
            run_counted=partial(self._loop.next_step, counted=True),
            not_own=self._run.not_own,
            held=None,
            steps=self._steps,
            first=self._first.ended(),
            optimizers=self._boundaries.optimizers,
            blocks_not_own=self._blocks_not_own,
        )
        step = self._run.measure(prepared)
        self._judged = self._run.judge(prepared, step, self._name, explain=self._explain)

    def _keep(self) -> None:
        """Keep what was measured, and nothing of the loop: what comes after it in its test is measured without it."""
        self._boundaries.optimizers.clear()
        if self._judged is not None and self._measurement is None:
            self._measurement = self._run.keep(self._judged)


_BASES = {
    "transformers": ("transformers", "TrainerCallback"),
    "lightning.pytorch": ("lightning.pytorch", "Callback"),
    "pytorch_lightning": ("pytorch_lightning", "Callback"),
}
"""Callback classes of trainers: by a module that is loaded where it may be used, the class's module and name."""


def callback_of(step_ended: Callable[[], bool]) -> Any:
    """Return a callback for the ``Trainer`` of transformers and that of Lightning, as far as they are imported.

    Args:
        step_ended: Called when a step has ended; returns whether training may stop.

    Raises:
        RuntimeError: Neither is imported.
    """
    loaded = tuple(name for name in _BASES if name in sys.modules)
    if not loaded:
        raise RuntimeError(
            "a callback is for the Trainer of transformers or of lightning, and neither is imported; "
            "in other loops call step_ended() at the end of each step"
        )
    return _class_for(loaded)(step_ended)


@cache
def _class_for(loaded: tuple[str, ...]) -> Any:
    """Return the class, made once: a class is a reference cycle, and would be among the garbage that is reported."""
    bases = tuple(getattr(importlib.import_module(module), name) for module, name in map(_BASES.__getitem__, loaded))

    class GpumemCallback(*bases):  # type: ignore[misc]  # whichever there are
        def __init__(self, step_ended: Callable[[], bool]) -> None:
            super().__init__()
            self._step_ended = step_ended
            self._optimizer_steps = 0

        def on_step_end(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
            """End a step after the optimizer's, in transformers."""
            if self._step_ended():
                control.should_training_stop = True

        def on_train_batch_end(self, trainer: Any, *args: Any, **kwargs: Any) -> None:
            """End a step after a batch, in Lightning, if the optimizer has stepped: with accumulation it does not in each."""
            if trainer.global_step != self._optimizer_steps:
                self._optimizer_steps = trainer.global_step
                if self._step_ended():
                    trainer.should_stop = True

        def on_train_end(self, *args: Any, **kwargs: Any) -> None:
            """Both have a method of this name, with other arguments."""

    return GpumemCallback
