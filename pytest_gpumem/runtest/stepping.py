"""Steps of a loop that the test runs itself: found at its optimizer's steps, measured beside it, judged as any step is."""

from __future__ import annotations

from contextlib import contextmanager, suppress
from functools import partial
from typing import TYPE_CHECKING, Any

from pytest_gpumem.explain.recording import is_out_of_memory
from pytest_gpumem.measure.loop import EndOfLoop, Loop
from pytest_gpumem.measure.looped import FEWEST_STEPS, FirstStep, PreparedLoop
from pytest_gpumem.measure.reading import Phase
from pytest_gpumem.measure.step_boundaries import Borders
from pytest_gpumem.measurement import MeasuringError, Workload
from pytest_gpumem.session.callbacks import callback_of
from pytest_gpumem.steps.batches import work_of_items

if TYPE_CHECKING:
    from collections.abc import Iterator

    from pytest_gpumem.measurement import Measurement
    from pytest_gpumem.runtest.judging import Judged
    from pytest_gpumem.runtest.run import TestRun


class Steps:
    """Steps of a loop that `Gpumem.steps` measures; ``measurement`` is there once they have been."""

    def __init__(
        self, run: TestRun, steps: int, name: str | None, items: float | None, *, explain: bool | None
    ) -> None:
        if steps < FEWEST_STEPS:
            raise ValueError(f"steps={steps}: a loop's memory is read from {FEWEST_STEPS} steps at least")
        self._run = run
        self._steps = steps
        self._name = name
        self._items = items
        self._explain = explain
        self._loop = Loop(self._measure)
        self._borders = Borders(self._optimizer_stepped)
        self._is_told = False
        """Whether the loop says itself where its steps end."""
        self._judged: Judged | None = None
        self._measurement: Measurement | None = None
        self._foreign_blocks: frozenset[int] = frozenset()
        self._first: FirstStep | None = None

    @property
    def measurement(self) -> Measurement:
        if self._measurement is None:
            raise MeasuringError("the steps have not been measured yet: read their measurement after the with block")
        return self._measurement

    def step_ended(self) -> bool:
        """Say that a step has ended, where no optimizer of torch does; from then on optimizers end none.

        Returns:
            Whether the loop has been measured, and may end.
        """
        self._is_told = True
        self._loop.border()
        return self._loop.is_measured

    def callback(self) -> Any:
        """Return a callback for the ``Trainer`` of transformers or Lightning, which stops in its own way when it is measured.

        Without one, `Gpumem.steps` ends training by an exception. Raises ``RuntimeError`` where neither is imported.
        """
        self._is_told = True
        return callback_of(self.step_ended)

    @contextmanager
    def within(self) -> Iterator[None]:
        """Measure the steps of the loop within, and end it when they have been measured."""
        self._foreign_blocks = self._run.foreign_blocks()
        self._first = FirstStep(self._run.device, self._run.foreign)
        try:
            with self._borders.watched():
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
            if self._borders.stepped_elsewhere:
                raise MeasuringError(
                    "the loop has made no step: an optimizer has stepped in another thread, and steps of other threads than "
                    "this one are not seen"
                )
            raise MeasuringError(
                "the loop has made no step: one ends with the step of an optimizer of torch, and none has made any; where the "
                "loop has no such optimizer, call steps.step_ended() at the end of each step"
            )

    def _ran_out_by_counting(self, error: BaseException) -> bool:
        """Return whether memory ran out in a step that was counted, which takes more than an ordinary one.

        Of several ranks the others may wait for this one in such a step, so that there it is an error of the loop.
        """
        return self._loop.is_counted and is_out_of_memory(error) and not self._run.context.together.several

    def _optimizer_stepped(self) -> None:
        if self._is_told:
            return
        self._loop.border()
        if self._loop.is_measured:
            raise EndOfLoop(self._loop)

    def _measure(self) -> None:
        assert self._first is not None, "measured only within the with block"
        prepared = PreparedLoop(
            context=self._run.context,
            workload=Workload("steps"),
            work=work_of_items(self._items),
            phases=[Phase("step", self._loop.next_step)],
            run_counted=partial(self._loop.next_step, counted=True),
            foreign=self._run.foreign,
            held=None,
            steps=self._steps,
            first=self._first.ended(),
            optimizers=self._borders.optimizers,
            foreign_blocks=self._foreign_blocks,
        )
        step = self._run.measure(prepared)
        self._judged = self._run.judge(prepared, step, self._name, explain=self._explain)

    def _keep(self) -> None:
        """Keep what was measured, and nothing of the loop: what comes after it in its test is measured without it."""
        self._borders.optimizers.clear()
        if self._judged is not None and self._measurement is None:
            self._measurement = self._run.keep(self._judged)
