"""Hooks for the ``conftest.py`` of the root directory, or for a plugin."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import replace
from typing import TYPE_CHECKING

import pytest

if TYPE_CHECKING:
    from collections.abc import Iterable

    import pluggy

    from pytest_gpumem.devices.contract import Device
    from pytest_gpumem.devices.registry import DeviceFactory
    from pytest_gpumem.measurement import Environment, Measurement
    from pytest_gpumem.metrics import Tolerance


def pytest_gpumem_devices(config: pytest.Config) -> Mapping[str, DeviceFactory]:  # type: ignore[empty-body]
    """Add devices for ``--gpumem-device``.

    Args:
        config: pytest's configuration.

    Returns:
        A function without arguments for each name of a device. It returns a ``pytest_gpumem.Device``, or raises
        ``pytest_gpumem.DeviceUnavailable`` with the reason. It is called when the first test with this device runs.

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
    """Add details to a baseline's environment, such as the version of a library that affects figures.

    A result of another type fails the measured tests.

    Args:
        config: pytest's configuration.
        device: The device that measures.

    Returns:
        A string or an int for each name. The names ``slug`` and ``device`` are not allowed, because the device sets them.

    Example::

        def pytest_gpumem_environment(config, device):
            return {"my_library": my_library.__version__}
    """


def pytest_gpumem_measurement(item: pytest.Item, measurement: Measurement) -> None:
    """See every measurement after it was taken and judged.

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
        tolerance: The tolerance without this hook, from the metric's default or the settings.

    Returns:
        A ``pytest_gpumem.Tolerance`` in the metric's unit, or ``None`` to change nothing. Any other result fails the test and
        names the plugins with this hook. A negative tolerance, or one that is not finite, does so as well.

    Example::

        from pytest_gpumem import Tolerance


        def pytest_gpumem_tolerance(item, metric, tolerance):
            if metric == "peak_allocated" and "dynamic_shapes" in item.keywords:
                return Tolerance(relative=0.05)
    """


_RESERVED = ("slug", "device")


class HookError(ValueError):
    """Error for a wrong result of a hook. The message names the hook, the plugins with it, and the expected result."""


def checked_tolerance(result: object, metric: str, default: Tolerance, hook: pluggy.HookCaller) -> Tolerance:
    """Return the tolerance from ``pytest_gpumem_tolerance`` for ``metric``, or the ``default`` for ``None``.

    Raises:
        HookError: The result is not a tolerance, or its amounts are negative or not finite.
    """
    from pytest_gpumem.metrics import Tolerance

    if result is None:
        return default
    if isinstance(result, Tolerance) and _is_amount(result.relative) and _is_amount(result.absolute):
        return result
    raise HookError(
        f"{_called(hook)} returned {result!r} for {metric}, "
        "expected None or a Tolerance of finite ratios and amounts that are not negative, like Tolerance(relative=0.05)"
    )


def environment_of(device: Device, config: pytest.Config) -> Environment:
    """Return a device's environment with the details from ``pytest_gpumem_environment``. Raises `HookError`."""
    environment = device.environment()
    hook = config.hook.pytest_gpumem_environment
    details = {**environment.details, **checked_details(hook(config=config, device=device), hook)}
    return replace(environment, details=details)


def checked_details(results: Iterable[object], hook: pluggy.HookCaller) -> dict[str, str | int]:
    """Return the combined details from all ``pytest_gpumem_environment`` hooks. Raises `HookError` for a wrong result."""
    details: dict[str, str | int] = {}
    for result in results:
        if not isinstance(result, Mapping):
            raise HookError(f"{_called(hook)} returned {result!r}, expected a mapping of names to strings or ints")
        for name, value in result.items():
            if name in _RESERVED:
                # The device's slug names the folder of its baselines.
                raise HookError(f"{_called(hook)} returned {name!r}, which is the device's own; give it another name")
            if not isinstance(name, str) or isinstance(value, bool) or not isinstance(value, (str, int)):
                raise HookError(f"{_called(hook)} returned {name!r}: {value!r}, expected a name and a string or an int")
            details[name] = value
    return details


def _is_amount(value: object) -> bool:
    return isinstance(value, (int, float)) and not isinstance(value, bool) and math.isfinite(value) and value >= 0


def _called(hook: pluggy.HookCaller) -> str:
    """Return the names of a hook and all plugins with it, because pluggy does not say which plugin returned a result.

    For example, ``pytest_gpumem_tolerance (/project/conftest.py or my_plugin)``.
    """
    names = [str(implementation.plugin_name) for implementation in hook.get_hookimpls()]
    return f"{hook.name} ({' or '.join(names)})" if names else hook.name
