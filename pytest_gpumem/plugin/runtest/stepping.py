"""Implement `Gpumem.loop`: find the steps in a test's own loop by its calls to optimizers, and measure them.

For example, after ``optimizer.step()`` in the loop, the plugin reads the step's memory before the loop continues.
"""

from __future__ import annotations

import importlib
import sys
from contextlib import ExitStack, contextmanager, suppress
from functools import cache, partial
from typing import TYPE_CHECKING, Any, NoReturn

from pytest_gpumem.base.errors import MeasuringError
from pytest_gpumem.base.units import nearest
from pytest_gpumem.facts.measurement import Workload
from pytest_gpumem.measuring.explain.recording import is_out_of_memory
from pytest_gpumem.measuring.jobs.windows import Window
from pytest_gpumem.measuring.measure.loop import EndOfLoop, Loop
from pytest_gpumem.measuring.measure.looped import FEWEST_STEPS, FirstStep, PreparedLoop
from pytest_gpumem.measuring.measure.reading import Phase
from pytest_gpumem.measuring.measure.step_boundaries import StepBoundaries
from pytest_gpumem.measuring.steps.batches import number_of_steps, work_of_items
from pytest_gpumem.plugin.runtest.single_run import keep_script

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator

    from pytest_gpumem.facts.measurement import Measurement
    from pytest_gpumem.measuring.measure.reading import ByDevice
    from pytest_gpumem.plugin.runtest.run import JudgedStep, TestRun


_LEAST = (
    f"a loop's memory is read from at least {FEWEST_STEPS} steps. The loop itself runs in the `with` block: "
    "`with gpumem.loop() as training:`"
)
_NO_STEP = "no step was seen: a step ends with optimizer.step() of a torch optimizer, and no optimizer stepped"
_NO_OPTIMIZER = (
    "In a loop without a torch optimizer, call training.step_ended() at the end of each step, after "
    "`with gpumem.loop() as training:`"
)
NOT_ITERABLE = (
    "gpumem.loop() runs no steps itself: write the loop into the body of `with gpumem.loop() as training:`. A step ends with "
    "optimizer.step(), or with training.step_ended() if the loop has no optimizer"
)


class MeasuredLoop:
    """The object that ``with gpumem.loop() as training:`` yields."""

    def __init__(
        self,
        run: TestRun,
        steps: int,
        name: str | None = None,
        items: float | None = None,
        *,
        explain: bool | None = None,
        is_script: bool = False,
    ) -> None:
        """Prepare to measure a loop.

        Args:
            run: The run of the test.
            steps: The number of steps for the memory figures.
            name: The measurement's name; by default ``loop``.
            items: The number of items in a step.
            explain: Whether to explain the peak; ``None`` if the verdict and the settings decide.
            is_script: Whether the loop is a whole script. If a script makes no step, but other processes use a GPU, the script
                is measured from its start to its end under the name ``script``.
        """
        self._run = run
        self._steps = number_of_steps(steps, FEWEST_STEPS, _LEAST)
        self._name = name
        self._items = items
        self._explain = explain
        self._is_script = is_script
        self._loop = Loop(self._measure)
        self._boundaries = StepBoundaries(self._optimizer_stepped)
        self._ends_steps_itself = False
        """True if the loop or a callback calls `step_ended`. From then on, a step ends only by such a call, and not by an
        optimizer."""
        self._judged: JudgedStep | None = None
        self._measurement: Measurement | None = None
        self._other_blocks: frozenset[int] = frozenset()
        self._first: FirstStep | None = None
        self._processes = ExitStack()
        """Has the window of other processes."""
        self._window: Window | None = None
        self._script_figures: ByDevice | None = None
        """The figures of a script without steps."""

    @property
    def measurement(self) -> Measurement:
        """The measurement of the loop's steps. Reading this attribute within the ``with`` block raises `MeasuringError`."""
        if self._measurement is None:
            raise MeasuringError("the steps have not been measured yet: read their measurement after the with block")
        return self._measurement

    def step_ended(self) -> bool:
        """End a step in a loop without a torch optimizer. After the first call, optimizers do not end steps any more.

        After the last measured step, an optimizer's step ends the loop by an exception, whereas this method only returns
        True.

        Returns:
            True if all steps have been measured, so the loop may end.
        """
        self._ends_steps_itself = True
        self._loop.boundary()
        return self._loop.is_measured

    def callback(self) -> Any:
        """Return a callback for the ``Trainer`` of transformers or Lightning. It stops the training when all steps have
        been measured.

        Without this callback, `Gpumem.loop` ends the training by an exception.

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
        """Measure the steps of the loop in the ``with`` block, and end the block when all steps have been measured."""
        self._other_blocks = self._run.memory.other_blocks()
        self._window = self._processes.enter_context(self._run.processes.window())
        self._first = FirstStep(self._run.device, self._run.memory.other_bytes)
        try:
            with self._boundaries.watched():
                yield
        except EndOfLoop as end:
            if end.loop is not self._loop:
                raise
        except BaseException as error:
            counting_error = error if self._ran_out_by_counting(error) else None
            # Raise the loop's own error below, so the test fails with it. First store what was measured up to the error.
            with suppress(Exception):
                self._loop.end(counting_error)
            if counting_error is None or self._judged is None:
                self._keep_before(error)
                raise
        finally:
            self._end_window()
        self._loop.end()
        self._keep()
        if self._measurement is None:
            if self._boundaries.has_stepped_in_other_thread:
                raise MeasuringError(
                    "no step was seen: an optimizer stepped in another thread, and only steps in the test's own thread are "
                    "seen; run the loop in the test's thread"
                )
            if not self._is_script:
                raise MeasuringError(f"{_NO_STEP}. {_NO_OPTIMIZER}")
            no_figures = f"{_NO_STEP}, and no process that reports used a GPU"
            raise MeasuringError("; ".join((no_figures, *self._run.processes.unmeasured)))

    def _end_window(self) -> None:
        """End the window of other processes, if it has not ended. Read the figures of a script without steps."""
        assert self._first is not None, "the first step has begun"
        try:
            if self._is_script and not self._loop.has_begun and self._script_figures is None:
                self._script_figures = self._first.figures()
        finally:
            self._first.forget()
            self._processes.close()

    def _keep_before(self, error: BaseException) -> None:
        """Store what was measured before an error ended the loop."""
        if isinstance(error, KeyboardInterrupt):
            self._processes.__exit__(type(error), error, None)  # do not wait for answers
            self._window = Window()
        else:
            with suppress(MeasuringError):
                self._end_window()
        try:
            self._keep()
        except MeasuringError as unknown:
            # For example, the loop failed because the system killed a process without free memory.
            self._run.item.add_report_section("call", "gpumem processes", str(unknown))

    def _ran_out_by_counting(self, error: BaseException) -> bool:
        """Return whether memory ran out in the step whose operators are counted. Counting makes this step need more memory
        than an ordinary step.

        With several ranks, the answer is always no: the other ranks may be waiting for this rank, so the loop has to fail.
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
            other_bytes=self._run.memory.other_bytes,
            held=None,
            steps=self._steps,
            first_figures=self._first.figures(),
            optimizers=self._boundaries.optimizers,
            other_blocks=self._other_blocks,
        )
        step = self._run.measure(prepared)
        self._judged = self._run.judge(prepared, step, self._name, explain=self._explain)

    def _keep(self) -> None:
        """Add the measurements to the test, and release the references to the optimizers, so the test can free them."""
        assert self._window is not None, "the loop has begun"
        self._boundaries.optimizers.clear()
        if self._judged is not None:
            self._measurement = self._run.keep_step(self._judged, self._window)
        elif self._script_figures is not None:
            self._measurement = keep_script(self._run, self._script_figures, self._window)


_BASES = {
    "transformers": ("transformers", "TrainerCallback"),
    "lightning.pytorch": ("lightning.pytorch", "Callback"),
    "pytorch_lightning": ("pytorch_lightning", "Callback"),
}
"""Base classes of callbacks: the trainer's package, and the module and name of its callback class.

A base class is used only if its package is already imported.
"""


def callback_of(step_ended: Callable[[], bool]) -> Any:
    """Return a callback for the ``Trainer`` of transformers or Lightning, whichever is imported.

    Args:
        step_ended: The function to call when a step has ended. It returns whether the training may stop.

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
    """Return the callback class for the imported packages.

    The class is cached, because every new class is a reference cycle, which would be measured as cyclic garbage.
    """
    bases = tuple(getattr(importlib.import_module(module), name) for module, name in map(_BASES.__getitem__, loaded))

    class GpumemCallback(*bases):  # type: ignore[misc]  # the bases are known at run time
        def __init__(self, step_ended: Callable[[], bool]) -> None:
            super().__init__()
            self._step_ended = step_ended
            self._optimizer_steps = 0

        def on_step_end(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
            """End a step in transformers, which calls this method after an optimizer's step."""
            if self._step_ended():
                control.should_training_stop = True

        def on_train_batch_end(self, trainer: Any, *args: Any, **kwargs: Any) -> None:
            """End a step in Lightning, which calls this method after each batch, if the optimizer has stepped.

            With ``accumulate_grad_batches=4``, for example, the optimizer steps after every fourth batch.
            """
            if trainer.global_step != self._optimizer_steps:
                self._optimizer_steps = trainer.global_step
                if self._step_ended():
                    trainer.should_stop = True

        def on_train_end(self, *args: Any, **kwargs: Any) -> None:
            """Do nothing, with any arguments. Both base classes have this method, but with different arguments."""

    return GpumemCallback
