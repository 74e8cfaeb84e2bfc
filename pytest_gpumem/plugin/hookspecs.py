"""Hooks that you can define in the root directory's ``conftest.py`` or in a plugin."""

from __future__ import annotations

from typing import TYPE_CHECKING

import pytest

if TYPE_CHECKING:
    from collections.abc import Mapping

    from pytest_gpumem.facts.measurement import Measurement
    from pytest_gpumem.facts.metrics import Tolerance
    from pytest_gpumem.measuring.devices.contract import Device
    from pytest_gpumem.measuring.devices.registry import DeviceFactory


def pytest_gpumem_devices(config: pytest.Config) -> Mapping[str, DeviceFactory]:  # type: ignore[empty-body]
    """Add devices for ``--gpumem-device``.

    Args:
        config: pytest's configuration.

    Returns:
        A mapping from device names to functions without arguments. Each function returns a ``pytest_gpumem.Device``, or
        raises ``pytest_gpumem.DeviceUnavailable`` with the reason. The function for a device is called when the first test
        with this device runs.

    Example::

        from pytest_gpumem import DeviceUnavailable


        def make_xpu():
            if not torch.xpu.is_available():
                raise DeviceUnavailable("no XPU was found")
            return XpuDevice()


        def pytest_gpumem_devices(config):
            return {"xpu": make_xpu}
    """


def pytest_gpumem_environment(config: pytest.Config, device: Device) -> Mapping[str, str | int]:  # type: ignore[empty-body]
    """Add details to the environment in baselines, such as the version of a library with an effect on memory.

    If the hook returns a value of another type, the measured tests fail.

    Args:
        config: pytest's configuration.
        device: The device whose memory is measured.

    Returns:
        A mapping from names to strings or ints. The names ``slug`` and ``device`` are not allowed, because the device sets
        them.

    Example::

        def pytest_gpumem_environment(config, device):
            return {"my_library": my_library.__version__}
    """


def pytest_gpumem_measurement(item: pytest.Item, measurement: Measurement) -> None:
    """Receive every measurement after it was compared with its budget and baseline.

    The hook runs before the test ends, in the process that runs the test.

    Args:
        item: The test.
        measurement: The measurement, a [`Measurement`](values.md).

    Example::

        def pytest_gpumem_measurement(item, measurement):
            log.info("%s: %d bytes", item.nodeid, measurement.peak_allocated)
    """


@pytest.hookspec(firstresult=True)
def pytest_gpumem_tolerance(item: pytest.Item, metric: str, tolerance: Tolerance) -> Tolerance | None:
    """Replace the tolerance of a metric for a test.

    Args:
        item: The test.
        metric: The name of the [metric](metrics.md), for example ``peak_allocated``.
        tolerance: The tolerance without this hook: the metric's default, or the tolerance from the settings or the marker.

    Returns:
        A ``pytest_gpumem.Tolerance`` in the metric's unit, or ``None`` to change nothing. The test fails if the hook
        returns anything else, or a tolerance that is negative or not finite. The failure names the plugins with this hook.

    Example::

        from pytest_gpumem import Tolerance


        def pytest_gpumem_tolerance(item, metric, tolerance):
            if metric == "peak_allocated" and "dynamic_shapes" in item.keywords:
                return Tolerance(relative=0.05)
    """
