"""pytest-gpumem: tests that fail when a model's GPU memory grows."""

from __future__ import annotations

from pytest_gpumem.measurement import Measurement, MeasuringError, MissingMetric

__all__ = ["Measurement", "MeasuringError", "MissingMetric", "__version__"]

__version__ = "0.1.0"
