"""Steps that are prepared and measured and timed once, as nothing but a test of theirs needs them."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from pytest_gpumem.measuring.steps.function import prepared_function
from pytest_gpumem.measuring.steps.inference import prepared_infer_step
from pytest_gpumem.measuring.steps.model_source import model_source
from pytest_gpumem.measuring.steps.train_step import prepared_train_step

if TYPE_CHECKING:
    from pytest_gpumem.measuring.measure.context import MeasuringContext
    from pytest_gpumem.measuring.measure.prepared import MeasuredStep


def measure_function(*args: Any, **kwargs: Any) -> MeasuredStep:
    with prepared_function(*args, **kwargs) as prepared:
        return prepared.time(prepared.measure())


def measure_train_step(context: MeasuringContext, model: Any, batch: Any, **options: Any) -> MeasuredStep:
    with prepared_train_step(context, model_source(model), batch, **options) as prepared:
        return prepared.time(prepared.measure())


def measure_infer_step(context: MeasuringContext, model: Any, batch: Any, **options: Any) -> MeasuredStep:
    with prepared_infer_step(context, model_source(model), batch, **options) as prepared:
        return prepared.time(prepared.measure())
