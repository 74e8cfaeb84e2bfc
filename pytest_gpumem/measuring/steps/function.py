"""A test's function, prepared as a step that repeats."""

from __future__ import annotations

from contextlib import contextmanager
from typing import TYPE_CHECKING

from pytest_gpumem.facts.measurement import Workload
from pytest_gpumem.measuring.measure.prepared import PreparedStep
from pytest_gpumem.measuring.measure.random_numbers import restored_random_numbers
from pytest_gpumem.measuring.measure.reading import Phase
from pytest_gpumem.measuring.steps.batches import work_of_items

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator

    from pytest_gpumem.measuring.measure.context import MeasuringContext


@contextmanager
def prepared_function(
    context: MeasuringContext, fn: Callable[[], object], items: float | None = None
) -> Iterator[PreparedStep]:
    """Prepare ``fn()`` as a step that repeats. Tensors that can be reached from ``fn`` belong to the step.

    Args:
        context: The context in which the step is measured.
        fn: The function.
        items: The number of items in a call, for throughput.
    """
    with restored_random_numbers(context.device):
        other_bytes = context.bytes_of_other_code(fn)
        yield PreparedStep(
            context=context,
            workload=Workload("measure"),
            work=work_of_items(items),
            phases=[Phase("step", fn)],
            other_bytes=other_bytes,
            held=fn,
        )
