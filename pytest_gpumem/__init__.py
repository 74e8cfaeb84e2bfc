"""pytest-gpumem: tests that fail when a model's GPU memory grows."""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from pytest_gpumem.base.errors import (
        ConfigError,
        DeviceUnavailable,
        MeasuringError,
        MissingComposition,
        MissingMetric,
    )
    from pytest_gpumem.facts.measurement import Environment, Measurement
    from pytest_gpumem.facts.metrics import Tolerance
    from pytest_gpumem.facts.values.composition import Composition, Explanation, Row
    from pytest_gpumem.measuring.devices.contract import Device
    from pytest_gpumem.measuring.step_config.config import StepConfig
    from pytest_gpumem.plugin.fixture import Gpumem

__all__ = [
    "Composition",
    "ConfigError",
    "Device",
    "DeviceUnavailable",
    "Environment",
    "Explanation",
    "Gpumem",
    "Measurement",
    "MeasuringError",
    "MissingComposition",
    "MissingMetric",
    "Row",
    "StepConfig",
    "Tolerance",
    "__version__",
]

__version__ = "0.1.0"

_HOMES = {
    "pytest_gpumem.base.errors": (
        "ConfigError",
        "DeviceUnavailable",
        "MeasuringError",
        "MissingComposition",
        "MissingMetric",
    ),
    "pytest_gpumem.facts.measurement": ("Environment", "Measurement"),
    "pytest_gpumem.facts.metrics": ("Tolerance",),
    "pytest_gpumem.facts.values.composition": ("Composition", "Explanation", "Row"),
    "pytest_gpumem.measuring.devices.contract": ("Device",),
    "pytest_gpumem.measuring.step_config.config": ("StepConfig",),
    "pytest_gpumem.plugin.fixture": ("Gpumem",),
}


def __getattr__(name: str) -> object:
    # pytest imports this package in every run. To keep this fast, a name is imported only when it is used.
    for module, names in _HOMES.items():
        if name in names:
            return getattr(importlib.import_module(module), name)
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
