"""pytest-gpumem: tests that fail when a model's GPU memory grows."""

from __future__ import annotations

from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from pytest_gpumem.measurement import Measurement, MeasuringError, MissingMetric
    from pytest_gpumem.step_config.config import StepConfig
    from pytest_gpumem.step_config.errors import ConfigError
    from pytest_gpumem.values.composition import Composition, Explanation, MissingComposition, Row

__all__ = [
    "Composition",
    "ConfigError",
    "Explanation",
    "Measurement",
    "MeasuringError",
    "MissingComposition",
    "MissingMetric",
    "Row",
    "StepConfig",
    "__version__",
]

__version__ = "0.1.0"


def __getattr__(name: str) -> object:
    # pytest imports this package in every run, also in those that measure nothing.
    if name in ("Composition", "Explanation", "MissingComposition", "Row"):
        from pytest_gpumem.values import composition

        return getattr(composition, name)
    if name in ("Measurement", "MeasuringError", "MissingMetric"):
        from pytest_gpumem import measurement

        return getattr(measurement, name)
    if name in ("ConfigError", "StepConfig"):
        from pytest_gpumem.step_config import config

        return getattr(config, name)
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
