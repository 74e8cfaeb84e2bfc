"""Steps that are prepared and measured and timed once, as nothing but a test of theirs needs them."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from pytest_gpumem.facts.measurement import Workload
from pytest_gpumem.measuring.measure.context import MeasuringContext
from pytest_gpumem.measuring.measure.prepared import PreparedStep
from pytest_gpumem.measuring.steps.function import prepared_function
from pytest_gpumem.measuring.steps.inference import prepared_infer_step
from pytest_gpumem.measuring.steps.model_source import model_source
from pytest_gpumem.measuring.steps.train_step import prepared_train_step

if TYPE_CHECKING:
    from collections.abc import Sequence

    from pytest_gpumem.measuring.devices.contract import Device
    from pytest_gpumem.measuring.measure.prepared import MeasuredStep
    from pytest_gpumem.measuring.measure.reading import Phase
    from pytest_gpumem.measuring.measure.settling import StepFigures


def measure_function(*args: Any, **kwargs: Any) -> MeasuredStep:
    with prepared_function(*args, **kwargs) as prepared:
        return prepared.time(prepared.measure())


def measure_train_step(context: MeasuringContext, model: Any, batch: Any, **options: Any) -> MeasuredStep:
    with prepared_train_step(context, model_source(model), batch, **options) as prepared:
        return prepared.time(prepared.measure())


def measure_infer_step(context: MeasuringContext, model: Any, batch: Any, **options: Any) -> MeasuredStep:
    with prepared_infer_step(context, model_source(model), batch, **options) as prepared:
        return prepared.time(prepared.measure())


def measured_steps(
    phases: Sequence[Phase], device: Device, *, other_bytes: Sequence[int], peak_only: bool = False, **more: Any
) -> StepFigures:
    """Measure a step that consists of nothing but its phases."""
    context = MeasuringContext(device, time_budget=None, peak_only=peak_only)
    prepared = PreparedStep(
        context=context,
        workload=Workload("measure"),
        work={},
        phases=phases,
        other_bytes=other_bytes,
        held=None,
        **more,
    )
    return prepared.measure().figures
