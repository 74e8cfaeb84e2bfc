"""A function of the test's own, made ready to run as a step that repeats."""

from __future__ import annotations

from contextlib import contextmanager
from typing import TYPE_CHECKING

from pytest_gpumem.measure.prepared import PreparedStep
from pytest_gpumem.measure.random_numbers import random_numbers_given_back
from pytest_gpumem.measure.reading import Phase
from pytest_gpumem.measurement import Workload
from pytest_gpumem.steps.batches import work_of_items

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator

    from pytest_gpumem.measure.context import MeasuringContext


@contextmanager
def prepared_function(
    context: MeasuringContext, fn: Callable[[], object], items: float | None = None
) -> Iterator[PreparedStep]:
    """Make ``fn()`` ready to run as a step that repeats. What it holds belongs to the step."""
    with random_numbers_given_back(context.device):
        not_own = context.begin(fn)
        yield PreparedStep(
            context=context,
            workload=Workload("measure"),
            work=work_of_items(items),
            phases=[Phase("step", fn)],
            not_own=not_own,
            held=fn,
        )
