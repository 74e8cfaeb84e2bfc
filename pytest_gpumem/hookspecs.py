"""Hooks that other plugins and conftest files may implement (pluggy).

A recipe for each stands in its docstring; put the function into a ``conftest.py``, or into a plugin.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

import pytest

if TYPE_CHECKING:
    from collections.abc import Mapping

    from pytest_gpumem.devices.contract import Device
    from pytest_gpumem.devices.registry import DeviceFactory
    from pytest_gpumem.measurement import Measurement
    from pytest_gpumem.metrics import Tolerance


def pytest_gpumem_devices(config: pytest.Config) -> Mapping[str, DeviceFactory]:  # type: ignore[empty-body]
    """Add devices: a name for ``--gpumem-device``, and a function that makes the device (`pytest_gpumem.devices.contract`).

    The function is called when the first test that uses the device runs, and may raise `DeviceUnavailable`::

        def pytest_gpumem_devices(config):
            return {"xpu": make_xpu_device}
    """


def pytest_gpumem_environment(config: pytest.Config, device: Device) -> Mapping[str, str | int]:  # type: ignore[empty-body]
    """Add to the environment that is stored with a baseline, say the version of a library that moves figures::

    def pytest_gpumem_environment(config, device):
        return {"transformers": transformers.__version__}
    """


def pytest_gpumem_measurement(item: pytest.Item, measurement: Measurement) -> None:
    """See every measurement when it has been taken and judged, before its test ends, in the process that runs the test::

    def pytest_gpumem_measurement(item, measurement):
        log.info("%s: %d bytes", item.nodeid, measurement.peak_allocated)
    """


@pytest.hookspec(firstresult=True)
def pytest_gpumem_tolerance(item: pytest.Item, metric: str, tolerance: Tolerance) -> Tolerance | None:
    """Adjust how far ``metric`` of a test may move against its baseline; ``None`` leaves it to others::

    def pytest_gpumem_tolerance(item, metric, tolerance):
        if metric == "peak_allocated" and "dynamic_shapes" in item.keywords:
            return Tolerance(relative=0.05)
    """
